"""The offline API on a real checkpoint, the example and the benchmark as a user runs them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.engine import LLM, SamplingParams, bench
from headrace.engine.loader import load_model
from headrace.engine.make_checkpoint import make_checkpoint

ROOT = Path(__file__).parents[3]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint("w16", 2, tmp_path_factory.mktemp("llm") / "w16")


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint, numerics="exact", batch_invariant=True, num_blocks=48, max_num_seqs=4)


def test_text_and_its_ids_are_the_same_prompt(llm):
    text = "The wheel turns, and the water runs on. " * 5
    ids = llm.tokenizer.encode(text, add_special_tokens=False).ids
    by_text, by_ids = llm.generate([text, ids], GREEDY)
    assert by_text.prompt_ids == by_ids.prompt_ids == ids
    assert by_text.choices == by_ids.choices
    choice = by_text.choices[0]
    assert len(choice.ids) == 6 and choice.finish == "length" and choice.text == llm.tokenizer.decode(choice.ids)
    assert llm.generate(text, GREEDY)[0].choices == by_text.choices == llm.generate(ids, GREEDY)[0].choices


def test_each_prompt_may_have_its_own_parameters(llm):
    params = [GREEDY, SamplingParams(seed=4, n=2, max_tokens=3, logprobs=1, ignore_eos=True)]
    one, two = llm.generate(["a", "b"], params)
    assert len(one.choices[0].ids) == 6 and not one.choices[0].logprobs
    assert [len(choice.ids) for choice in two.choices] == [3, 3] and all(len(choice.logprobs) == 3 for choice in two.choices)
    with pytest.raises(ValueError, match="3 prompts and 2 sampling parameters"):
        llm.generate(["a", "b", "c"], params)


def test_the_prefix_cache_lives_as_long_as_the_object(llm):
    text = "x" * 300
    first, again = llm.generate(text, GREEDY)[0], llm.generate(text, GREEDY)[0]
    assert first.cached_tokens < again.cached_tokens == 256 and again.snapshot_hit
    assert first.choices == again.choices


def test_one_bad_prompt_harms_no_other(llm):
    bad, empty, good = llm.generate([[3] * 7000, [], [3, 4]], GREEDY)
    assert "7000 tokens" in bad.error and "6144" in bad.error and "empty" in empty.error
    assert not good.error and len(good.choices[0].ids) == 6


def test_an_interrupted_call_leaves_nothing_behind(llm, monkeypatch):
    steps = []

    def forward(*args, **kwargs):
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    original = llm.engine.runner.model.forward
    monkeypatch.setattr(llm.engine.runner.model, "forward", forward)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], GREEDY)
    assert not llm.engine.has_work() and llm.engine.pool.used == 0
    assert len(llm.generate("three", GREEDY)[0].choices[0].ids) == 6


@pytest.mark.parametrize("ahead", [False, True], ids=["steps that wait", "planned ahead"])
@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize("part", ["pool.release", "pool.allocate", "ledger.end", "postprocessor._leave_step", "runner._gather"])
def test_ctrl_c_waits_until_the_books_of_an_engine_are_whole(llm, monkeypatch, ahead, call, part):
    """Wherever it comes: the object serves other calls as if nothing had been."""
    owner, calls = getattr(llm.engine, part.split(".")[0]), []

    def interrupt(*args):
        calls.append(1)
        out = inner(*args)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return out

    name = part.split(".")[1]
    inner = getattr(owner, name)
    monkeypatch.setattr(llm, "_ahead", ahead)
    prompts, params = ["one", "two", "three", "four"], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    wanted = llm.generate(prompts, params)
    monkeypatch.setattr(owner, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, params)
    assert len(calls) >= call and not llm.engine.has_work() and llm.engine.pool.used == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [a.choices for a in llm.generate(prompts, params)] == [a.choices for a in wanted]


def test_a_second_ctrl_c_does_not_wait(llm, monkeypatch):
    def forward(*_):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        pytest.fail("nobody broke in")

    monkeypatch.setattr(llm.engine.runner.model, "forward", forward)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one"], GREEDY)
    assert not llm.engine.has_work() and llm.engine.pool.used == 0


def test_progress_is_shown_when_asked(llm, capsys):
    llm.generate(["a", "b"], GREEDY, progress=True)
    assert capsys.readouterr().err.endswith("2/2 answers, 12 tokens\n")


def test_the_example_runs(checkpoint):
    command = [sys.executable, ROOT / "examples" / "offline_inference.py", checkpoint, "--max-tokens", "4"]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=100)
    assert run.returncode == 0, run.stderr
    cold, again = run.stdout.split("--- again")
    assert "(0 cached," in cold and "(0 cached, 1" not in again.split("\n")[1] and "4 new" in again


def test_the_benchmark_prints_what_it_promises(checkpoint):
    command = [sys.executable, "-m", "headrace.engine.bench", "--model", checkpoint, "--json", "--batch", "1,2"]
    command += ["--prompt", "40", "--output", "6", "--repeat", "1", "--threads", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    for size in ("1", "2"):
        batch = report["batch"][size]
        assert batch["prefill_tokens_per_second"] > 0 and batch["decode_tokens_per_second"] > 0
        assert {"schedule", "forward", "logits", "sample", "post"} <= batch["step_ms"].keys()
        assert {"attn", "ffn", "other"} <= batch["forward_ms"].keys()
        assert batch["load"] >= 0
        assert sum(batch["step_ms"].values()) == pytest.approx(batch["decode_step_ms"], rel=0.05)


def test_what_lies_between_the_parts_of_a_step_is_of_one_run_and_never_less_than_nothing(checkpoint):
    """The median of the whole less the medians of its parts may be less."""
    args = bench.arguments().parse_args(["--prompt", "20", "--output", "5"])
    model = load_model(checkpoint, numerics="bounded")
    for _ in range(3):
        run = bench._run(model, 2, args, np.random.default_rng(0))
        parts = sum(run[part] for part in bench.STEP_PARTS)
        assert run["between"] == pytest.approx(run["decode"] - parts) and run["between"] >= 0
        assert bench._figures(run, 2, args)["step_ms"]["between"] == round(1e3 * run["between"] / run["steps"], 4)


@pytest.mark.parametrize(("given", "wanted"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_that_wait_leave_the_cores_to_others_unless_the_user_wants_it_otherwise(given, wanted):
    """Settled before torch is loaded, which reads it once."""
    code = "import os, sys, headrace.engine; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split() == [wanted, "False"]
