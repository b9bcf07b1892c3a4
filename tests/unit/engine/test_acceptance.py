"""Speculative decoding by statistics: the rules of acceptance on tables, engines with small models, the paper's counterexample.

The whole run (500 prompts, 20,000 draws each on real V4.1 arithmetic) is `python -m headrace.engine.acceptance`; this is a part
of it. Seeds are fixed, so a test that passes passes always.
"""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from headrace.engine import acceptance, api, bench, bench_speculation
from headrace.engine.agreeing import agreeing_checkpoint
from headrace.engine.loader import load_model
from headrace.engine.sampler import Draw
from headrace.engine.speculation import Speculator
from headrace.engine.toy import ToyModel
from headrace.engine.verify import Window, accept, window_draws

LEVEL = 1e-4
VOCAB, DRAWS = 8, 20_000


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(agreeing_checkpoint(tmp_path_factory.mktemp("agreeing")), numerics="exact", batch_invariant=True)


def sample_rows(tables: np.ndarray, rng) -> np.ndarray:
    """One draw from each row of probabilities [R, V]."""
    return (rng.random((len(tables), 1)) > tables.cumsum(1)[:, :-1]).sum(1)


class Chain:
    """Target p and draft q, each a table of the token before: fp64 [VOCAB, VOCAB]."""

    def __init__(self, seed: int, q_zeros: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.p, self.q = rng.dirichlet(np.full(VOCAB, 0.7), VOCAB), rng.dirichlet(np.full(VOCAB, 0.7), VOCAB)
        if q_zeros:  # a draft that can't say some tokens, and a target that can't say others
            self.q[:, :2] = 0.0
            self.p[:, -2:] = 0.0
            self.p, self.q = (table / table.sum(1, keepdims=True) for table in (self.p, self.q))

    def windows(self, params: api.SamplingParams, length, draws: int) -> tuple[torch.Tensor, list[Window]]:
        """Logits of all rows, and windows behind token 0. `length(drafts)`: how many of 3 drafts are verified."""
        rng, behind, windows = np.random.default_rng(9), [], []
        with np.errstate(divide="ignore"):
            log_p, log_q = (torch.tensor(np.log(table), dtype=torch.float32) for table in (self.p, self.q))
        blocks = [np.zeros(draws, np.int64)]
        for _ in range(3):
            blocks.append(sample_rows(self.q[blocks[-1]], rng))
        for seed, block in enumerate(np.stack(blocks, 1).tolist()):
            drafts = block[1 : 1 + length(block[1:])]
            behind += [0, *drafts]
            own = api.SamplingParams(seed=seed, temperature=params.temperature)
            windows.append(Window(window_draws(Draw(own, 0, 5, [1, 0], 1), drafts), drafts, log_q[[0, *drafts][:-1]]))
        return log_p[behind], windows

    def pairs(self, out, rng) -> Counter:
        """First and second token of each draw; what a window did not settle comes from p."""
        first = [tokens[0].token for tokens in out]
        more = sample_rows(self.p[first], rng).tolist()
        second = [tokens[1].token if len(tokens) > 1 else new for tokens, new in zip(out, more, strict=True)]
        return Counter(zip(first, second, strict=True))

    @property
    def expected(self) -> dict:
        return {(a, b): self.p[0, a] * self.p[a, b] for a in range(VOCAB) for b in range(VOCAB)}


LENGTHS = {
    "all": lambda drafts: 3,
    "one": lambda drafts: 1,
    "by the drafts before": lambda drafts: 1 + (drafts[0] % 2) * (1 + (drafts[1] > 3)),
}


@pytest.mark.parametrize(
    ("length", "zeros", "draws"),
    [("all", True, DRAWS), ("all", False, 4000), ("one", True, 4000), ("by the drafts before", True, 4000)],
)
def test_rejection_sampling_keeps_the_distribution(length, zeros, draws):
    chain = Chain(4, zeros)
    logits, windows = chain.windows(api.SamplingParams(), LENGTHS[length], draws)
    out = accept("standard", logits, windows, ())
    counts = chain.pairs(out, np.random.default_rng(10))
    test = acceptance.chi_square(length, counts, {cell: p for cell, p in chain.expected.items() if p > 0})
    assert test.cells > 15 and test.p > LEVEL, test
    if length == "all":
        assert 1.2 < np.mean([len(tokens) for tokens in out]) < 3.5


def test_a_length_that_looks_at_the_draft_itself_is_found_out():
    """The same test sees what must not be done: to verify a draft only if it is a likely one."""
    chain = Chain(4)
    logits, windows = chain.windows(api.SamplingParams(), lambda drafts: 1 if drafts[0] < 4 else 0, 4000)
    counts = chain.pairs(accept("standard", logits, windows, ()), np.random.default_rng(10))
    assert acceptance.chi_square("bent", counts, chain.expected).p < 1e-12


def test_a_draft_that_equals_the_target_is_never_rejected():
    chain = Chain(5)
    chain.q = chain.p
    logits, windows = chain.windows(api.SamplingParams(), LENGTHS["all"], draws=2000)
    assert all(len(tokens) == 4 for tokens in accept("standard", logits, windows, ()))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_exact_windows_give_what_single_rows_give(temperature):
    """A window's tokens are those of its rows one by one, whatever its length; greedy is so in both modes."""
    chain = Chain(6)
    params = api.SamplingParams(temperature=temperature)
    logits, windows = chain.windows(params, LENGTHS["by the drafts before"], draws=300)
    single, start = [], 0
    for window in windows:
        tokens = []
        for at, draw in enumerate(window.draws):
            tokens.append(accept("exact", logits[start + at : start + at + 1], [Window([draw])], ())[0][0].token)
            if at == len(window.drafts) or tokens[-1] != window.drafts[at]:
                break
        single.append(tokens)
        start += len(window.draws)
    assert len({len(tokens) for tokens in single}) == (2 if temperature == 0.0 else 4)
    for mode in ("exact", "standard") if temperature == 0.0 else ("exact",):
        assert [[one.token for one in tokens] for tokens in accept(mode, logits, windows, ())] == single


@pytest.mark.parametrize("case", [0, 2])
def test_engine_keeps_the_distribution(case):
    model = ToyModel("exact", block_tokens=32, draft_block=3)
    prompt, case = acceptance.favourites(model, 40), acceptance.CASES[case]
    drawn = acceptance.draw_case(model, prompt, case, range(600)) + acceptance.draw_case(model, prompt, case, range(600, 1000))
    tests = acceptance.tests_of_case(model, prompt, case, drawn)
    assert len(tests) == 4 and tests[0].cells > 20
    assert all(test.p > LEVEL for test in tests), tests


def test_v41_greedy_is_token_for_token_what_it_is_without_drafts(model):
    report = acceptance.greedy(model, range(24), output=16)
    assert report["different"] == [] and report["tokens"] == 24 * 16
    assert report["window_tokens"] > 1.5 * report["windows"]


def test_early_stop_keeps_the_distribution_and_without_it_it_bends():
    """DSpark's example: (0.7, 0.3) becomes (0.85, 0.15)."""
    for policy, ahead in ((Speculator, False), (acceptance.NoEarlyStop, True)):
        test = acceptance.test_of_flips("kept", acceptance.flip(policy, range(600), ahead))
        assert test.p > LEVEL, test
    counts = acceptance.flip(acceptance.NoEarlyStop, range(600))
    test = acceptance.test_of_flips("bent", counts)
    assert test.p < 1e-9 and abs(counts[0] / 600 - 0.85) < 0.05


@pytest.mark.slow
def test_the_command_says_the_same_with_two_processes_and_after_it_was_stopped(tmp_path, capsys):
    command, journal = ["--prompts", "3", "--draws", "300"], tmp_path / "journal"
    assert acceptance.main([*command, "--workers", "2", "--journal", str(journal)]) == 0
    whole = capsys.readouterr().out
    lines = journal.read_text().splitlines(keepends=True)
    assert len(lines) == len(acceptance.all_parts(3, 300)) == 8
    journal.write_text("".join(lines[:5]) + lines[5][:20])  # stopped in the middle of a line
    assert acceptance.main([*command, "--journal", str(journal)]) == 0
    assert capsys.readouterr().out == whole
    assert sorted(journal.read_text().splitlines()) == sorted("".join(lines).splitlines())


def test_the_benchmark_accepts_by_lot_as_often_as_it_was_told(capsys):
    profile = [0.8, 0.6, 0.5, 0.5, 0.5]
    command = ["--speculation", "--preset", "w16-draft", "--batch", "4", "--prompt", "8", "--seconds", "1.5", "--json"]
    assert bench.main([*command, "--profile", ",".join(map(str, profile)), "--spread", "0"]) == 0
    report = json.loads(capsys.readouterr().out)
    ways = report["batch"]["4"]
    assert ways["none"]["tokens_per_step"] == 1.0 and set(ways) == {"none", "full", "scheduled"}
    expected = 1 + sum(np.cumprod(profile))  # 2.76
    assert abs(ways["full"]["mean_accepted_length"] - expected) < 0.8
    lines = bench_speculation.table(report).splitlines()
    assert len(lines) == 3 and lines[2].split()[0] == "4"


def test_the_benchmark_serves_the_same_requests_in_each_way(tmp_path, capsys):
    """... and the answers are compared there; what was served fits a table that an engine takes."""
    path, prompts, fitted = agreeing_checkpoint(tmp_path / "model"), tmp_path / "prompts", tmp_path / "fitted.json"
    prompts.write_text('"Why is the sky blue?"\n[5, 6, 7]\n"x"\n')
    command = ["--speculation", "--model", str(path), "--prompts", str(prompts), "--batch", "2", "--output", "24", "--json"]
    assert bench.main([*command, "--repeat", "1", "--temperature", "1", "--fit", str(fitted)]) == 0
    report = json.loads(capsys.readouterr().out)
    ways = report["batch"]["2"]
    assert ways["none"]["tokens_per_step"] < ways["full"]["tokens_per_step"] and ways["full"]["mean_accepted_length"] > 1.2
    assert ways["scheduled"]["least"] == ways["scheduled"]["ratio"] == ways["scheduled"]["most"] > 0
    assert "2" in bench_speculation.table(report).splitlines()[2]
    table = json.loads(fitted.read_text())["temperatures"]
    assert len(table) == 5 and all(t > 0 for t in table)
    assert bench.main([*command, "--repeat", "1", "--calibration", str(fitted)]) == 0
