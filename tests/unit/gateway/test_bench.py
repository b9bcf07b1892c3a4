"""`headrace bench gateway`: what it prints of two systems that serve the same prompts in turns."""

from __future__ import annotations

import json

import pytest

from headrace.gateway.bench import main, ratios


@pytest.mark.slow
def test_two_systems_in_turns_and_their_ratio(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"one"\n"two words"\n')
    main(["--prompts", str(prompts), "--against", "HEADRACE_SIM_STEP_SECONDS=0.02", "--requests", "6", "--warmup", "2",
          "--repeat", "1", "--concurrency", "2", "--tokens", "5", "--json"])  # fmt: skip
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert (case["words"], case["concurrency"], case["requests"]) == (0, 2, 6)
    for one in (case, case["against"]):
        assert one["tokens_per_second"] == pytest.approx(5 * one["requests_per_second"], abs=0.05)
    assert case["against"]["e2e_p50_ms"] > 4 * 20, "the second one has the variable"
    assert case["ratio"]["e2e_p50_ms"] == pytest.approx(case["e2e_p50_ms"] / case["against"]["e2e_p50_ms"], abs=1e-3)


def test_a_ratio_of_what_both_have():
    assert ratios({"a": 3.0, "b": 1.0, "c": 1.0}, {"a": 2.0, "b": 0.0}) == {"a": 1.5}


def test_a_variable_is_a_name_and_a_value(capsys):
    with pytest.raises(SystemExit):
        main(["--against", "HEADRACE_TRACE"])
    assert "--against" in capsys.readouterr().err
