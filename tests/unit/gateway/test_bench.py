"""`headrace bench gateway`: what it prints of two systems that serve the same prompts in turns."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.gateway.bench import Process, main, per_token, ratios


@pytest.mark.slow
def test_whole_answers_and_the_same_code_as_another_tree(capsys):
    tree = str(Path(__file__).parents[3])
    main(["--answers", "streamed,whole", "--against-tree", tree, "--requests", "6", "--warmup", "2", "--repeat", "1",
          "--concurrency", "2", "--words", "8", "--tokens", "1,5", "--json"])  # fmt: skip
    told = json.loads(capsys.readouterr().out)
    assert [(case["answers"], case["tokens"]) for case in told["cases"]] == [
        ("streamed", 1), ("streamed", 5), ("whole", 1), ("whole", 5)
    ]  # fmt: skip
    assert [line["answers"] for line in told["per_token"]] == ["streamed", "whole"]
    assert all(case["ratio"]["cpu_gateway_ms"] > 0 for case in told["cases"])


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


def test_a_tree_has_sources_and_answers_have_a_kind(tmp_path, capsys):
    for wrong in (["--against-tree", str(tmp_path)], ["--answers", "half"], ["--against", "A=1", "--against-tree", "."]):
        with pytest.raises(SystemExit):
            main(wrong)
        assert wrong[0] in capsys.readouterr().err


def test_what_a_token_adds_to_what_a_request_costs():
    def case(answers: str, tokens: int, ms: float, other: float) -> dict:
        against = {"cpu_gateway_ms": other}
        return {"answers": answers, "words": 8, "concurrency": 4, "tokens": tokens, "cpu_gateway_ms": ms, "against": against}

    cases = [case("streamed", 50, 1.6, 1.1), case("streamed", 10, 0.8, 0.7), case("whole", 10, 0.7, 0.7)]
    (line,) = per_token(cases)
    assert (line["answers"], line["this"]) == ("streamed", {"token_us": 20.0, "request_us": 600.0})
    assert line["against"] == {"token_us": 10.0, "request_us": 600.0}


def test_cpu_time_is_that_of_all_threads():
    """It sees a few milliseconds of work, and is no more than the clock of the process."""
    here = Process("here", os.getpid())
    before, clock = here.cpu(), time.process_time()
    while time.process_time() < clock + 0.05:
        pass
    spent = here.cpu() - before
    assert 0.02 <= spent <= time.process_time() - clock + 0.02


@pytest.mark.parametrize("kind", ["fresh", "shared"])
async def test_the_race_beside_vllm_cpu_asks_and_counts(cluster, kind):
    """Its client is this benchmark's; the servers take too long to start for a test."""
    path = Path(__file__).parents[3] / "benchmarks" / "race_vllm_cpu.py"
    spec = importlib.util.spec_from_file_location("race_vllm_cpu", path)
    race = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(race)
    side = SimpleNamespace(name="headrace", port=int(cluster.url.rsplit(":", 1)[1]), log="nowhere", body={"model": "fake"})
    source = race.fresh(1, race.WORDS, 8, side.body) if kind == "fresh" else race.shared(1, side.body)
    row = await asyncio.to_thread(race.run, side, 2, 4, source, 8)
    assert row["tokens_per_second"] > 0 and 0 < row["ttft_p50_ms"] <= row["e2e_p50_ms"]
