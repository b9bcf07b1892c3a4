"""Statistics of speculative decoding: `python -m headrace.engine.acceptance` prints them and fails if one is wrong.

    greedy          prompts whose greedy tokens and log-probabilities with drafts differ from those without: must be none
    distribution    first three tokens of many draws against the target's distribution, which is computed from the target's
                    logits alone: Pearson's chi-square over the joint cells, and over each token's own
    counterexample  DSpark's own: seconds of a step with 1, 2, 3 rows such that a search for the best budget which looks past
                    the first draft that does not help bends the distribution (0.7, 0.3) to (0.85, 0.15). With the early stop it
                    must pass the test above, without it must fail. Where steps are planned ahead, budgets are made before the
                    drafts, so it must pass without

Of the draws every other batch has its steps planned ahead.

Every distribution test has the level ALPHA divided by the number of tests of the run (Bonferroni).

Draws and prompts are independent of each other: each has its own seed, and what an engine answers does not hang on who else is
there. So the run is cut into parts (`parts.py`), which `--workers` processes work off and `--journal` remembers.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import api, parts
from .agreeing import agreeing_checkpoint
from .batch import Segment
from .cache import CacheSpec, KVPool
from .core import EngineCore
from .llm import Answer, collect
from .loader import load_model
from .pipeline import Pipeline
from .sampler import Draw, probabilities
from .speculation import Costs, Options, Speculator, StepCurve

ALPHA = 1e-3
LEAST = 5.0  # draws that a cell must let expect; smaller ones are put together
TOKENS = 3  # of each draw that are looked at: the first comes from the prompt, the others from verified rows
OUTPUT = TOKENS + 2  # tokens of a draw, so that drafts are verified behind the first
BATCH = 128

CASES = (  # (acceptance, sampling)
    ("standard", {"temperature": 1.0, "top_k": 4}),
    ("standard", {"temperature": 0.7, "top_p": 0.8, "top_k": 6}),
    ("standard", {"temperature": 1.2, "top_k": 4, "presence_penalty": 0.8, "repetition_penalty": 1.3}),
    ("exact", {"temperature": 1.0, "top_k": 4}),
)


# ---------------------------------------------------------------- tests


@dataclass(frozen=True, slots=True)
class Test:
    name: str
    draws: int
    cells: int
    chi2: float
    p: float  # probability of a chi2 at least this large, were the draws of the expected distribution


def chi_square(name: str, counts: dict[Any, int], expected: dict[Any, float]) -> Test:
    """counts: draws in each cell; expected: probabilities that add up to 1. Draws outside of all cells give p = 0."""
    total = sum(counts.values())
    outside = total - sum(counts.get(cell, 0) for cell in expected)
    cells, rest = [], [0.0, 0.0]
    for cell, p in expected.items():
        pair = [counts.get(cell, 0), p * total]
        if pair[1] >= LEAST:
            cells.append(pair)
        else:
            rest = [rest[0] + pair[0], rest[1] + pair[1]]
    if rest[1] > 0:
        cells.append(rest)
    chi2 = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells) if not outside else math.inf
    degrees = max(len(cells) - 1, 1)
    half = torch.tensor([degrees / 2, min(chi2, 1e9) / 2], dtype=torch.float64)
    return Test(name, total, len(cells), chi2, float(torch.special.gammaincc(half[0], half[1])))


def tests_of_tokens(name: str, counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> list[Test]:
    """The joint distribution of the tokens, and each one's own."""
    out = [chi_square(f"{name}: all {TOKENS} tokens", counts, expected)]
    for at in range(TOKENS):
        out.append(chi_square(f"{name}: token {at + 1}", _marginal(counts, at), _marginal(expected, at)))
    return out


def _marginal(table: dict[tuple[int, ...], Any], at: int) -> dict[int, Any]:
    own: dict[int, Any] = {}
    for tokens, value in table.items():
        own[tokens[at]] = own.get(tokens[at], 0) + value
    return own


def target_distribution(model, prompt: Sequence[int], params: api.SamplingParams) -> dict[tuple[int, ...], float]:
    """Probabilities of the first TOKENS tokens, by enumeration: each prefix is a prompt of its own, without any draft."""
    out: dict[tuple[int, ...], float] = {(): 1.0}
    kv, states = KVPool(model.spec, 1), model.new_states(1)
    for _ in range(TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, p in out.items():
            ids = [*prompt, *prefix]
            states.reset(0)
            hidden = model.forward([Segment(0, 0, ids, (), (0,), outputs=(len(ids) - 1,))], kv, states)
            draw = Draw(params, 0, len(ids), ids, len(prompt))
            weights = probabilities(model.logits(hidden), [draw], model.eos_token_ids)[0]
            for token in weights.nonzero().flatten().tolist():
                longer[*prefix, token] = p * float(weights[token])
        out = longer
    return out


def draw_tokens(model, prompt: Sequence[int], sampling: dict, seeds: range, **config) -> tuple[list[tuple[int, ...]], dict]:
    """(the first TOKENS tokens of each draw, the engine's statistics). Every draw is a request with its own seed; every other
    batch has its steps planned ahead."""
    block = model.spec.block_tokens
    blocks = BATCH * (-(-(len(prompt) + OUTPUT) // block) + 1)
    core = EngineCore(
        model, api.EngineConfig(num_blocks=blocks, max_num_seqs=BATCH, prefix_caching=False, rollback_gate=1.0, **config)
    )
    drawn: list[tuple[int, ...]] = []
    for start in range(0, len(seeds), BATCH):
        todo = []
        for seed in seeds[start : start + BATCH]:
            params = api.SamplingParams(**sampling, seed=seed, max_tokens=OUTPUT, ignore_eos=True)
            todo.append(api.EngineRequest(f"{seed}", prompt, [], params))
        answers = collect_ahead(core, todo) if start // BATCH % 2 else collect(core, todo)
        drawn += [tuple(answer.choices[0].ids[:TOKENS]) for answer in answers]
    return drawn, core.stats()


def collect_ahead(core: EngineCore, todo: Sequence[api.EngineRequest]) -> list[Answer]:
    with Pipeline(core) as pipeline:
        return collect(core, todo, step=pipeline.step)


def favourites(model, last: int, count: int = 4) -> list[int]:
    """A prompt that ends with `last` and holds what is likely behind it, so that penalties have something to do."""
    kv, states = KVPool(model.spec, 1), model.new_states(1)
    hidden = model.forward([Segment(0, 0, [last], (), (0,), outputs=(0,))], kv, states)
    return [*model.logits(hidden)[0].topk(count).indices.tolist(), last]


@dataclass(slots=True)
class Drawn:
    """What some draws of a case gave: how often each TOKENS tokens came, and of their first drafts how many were looked at."""

    counts: Counter
    verified: int = 0
    accepted: int = 0

    def __add__(self, other: Drawn) -> Drawn:
        return Drawn(self.counts + other.counts, self.verified + other.verified, self.accepted + other.accepted)


def draw_case(model, prompt: Sequence[int], case: tuple[str, dict], seeds: range) -> Drawn:
    """Draws of one of CASES, all drafts verified."""
    mode, sampling = case
    config = {"speculative": "dspark", "acceptance": mode, "draft_budget": 1 << 30}
    drawn, stats = draw_tokens(model, prompt, sampling, seeds, **config)
    return Drawn(Counter(drawn), *(stats[f"drafts_{name}/position=1"] for name in ("verified", "accepted")))


def tests_of_case(model, prompt: Sequence[int], case: tuple[str, dict], drawn: Drawn) -> list[Test]:
    mode, sampling = case
    assert 0 < drawn.accepted < drawn.verified, (
        f"drafts must be accepted and rejected here: {drawn.accepted} of {drawn.verified} were"
    )
    expected = target_distribution(model, prompt, api.SamplingParams(**sampling, max_tokens=OUTPUT, ignore_eos=True))
    settings = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
    return tests_of_tokens(f"{mode}, {settings}", drawn.counts, expected)


# ---------------------------------------------------------------- greedy


def greedy(model, prompts: range, output: int = 24, **config) -> dict:
    """Greedy answers with drafts and without, for random prompts of 1 to 160 tokens; each number is a prompt."""
    params = api.SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, logprobs=1)
    todo = []
    for i in prompts:
        rng = np.random.default_rng(i)
        ids = rng.integers(3, model.vocab_size, int(rng.integers(1, 161))).tolist()
        todo.append(api.EngineRequest(f"{i}", ids, [], params))
    said, stats = [], {}
    for speculation in ({}, {"speculative": "dspark", "draft_budget": 1 << 30, "rollback_gate": 1.0} | config):
        core = EngineCore(model, api.EngineConfig(num_blocks=256, **speculation))
        said.append([answer.choices[0] for answer in collect(core, todo)])
        stats = core.stats()
    pairs = zip(prompts, *said, strict=True)
    return {
        "prompts": len(prompts),
        "tokens": sum(len(choice.ids) for choice in said[1]),
        "different": [i for i, a, b in pairs if a.ids != b.ids or a.logprobs != b.logprobs],
        "windows": stats["draft_windows"],
        "window_tokens": stats["draft_window_tokens"],
    }


# ---------------------------------------------------------------- the counterexample


class Coin:
    """A model of two tokens, 0.7 and 0.3 always, whose draft says 0.5 and 0.5 (accepted with 0.8). The confidence of a second
    draft is 1 behind token 0 and 0 behind token 1."""

    kind, dtype, draft_block, vocab_size, hidden_size = "coin", torch.float32, 2, 2, 1
    eos_token_ids, max_model_len, checkpoint_digest = (), 64, "coin"
    spec = CacheSpec("coin", 64, (), 0, "exact", 0, 0, 64)
    target = torch.tensor([0.7, 0.3]).log()
    first, second = math.log(0.8 / 0.2), 40.0  # logits

    class States:
        slots = 1

        def reset(self, slot: int) -> None: ...

        def rewind(self, slot: int, position: int) -> None: ...

    def new_states(self, slots: int) -> States:
        return self.States()

    def forward(self, segments, kv, states) -> torch.Tensor:
        return torch.zeros(sum(len(s.outputs) for s in segments), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.target.expand(len(hidden), 2)

    def draft(self, slots, anchors, positions, states, choose) -> Any:
        logits = torch.zeros(len(slots), 2, 2)
        tokens = torch.stack([choose(place, logits[:, place]) for place in range(2)], 1)
        second = torch.where(tokens[:, 0] == 0, self.second, -self.second)
        confidence = torch.stack([torch.full_like(second, self.first), second], 1)
        return _CoinDrafts(tokens, logits, confidence)


@dataclass(slots=True)
class _CoinDrafts:
    tokens: torch.Tensor
    logits: torch.Tensor
    confidence_logits: torch.Tensor


class FixedCosts(Costs):
    """Steps of 1, 2, 3 rows take 1, 1 / 0.5, 1 / 0.45 seconds; nothing is learned."""

    def __init__(self) -> None:
        super().__init__(StepCurve({1: 1.0, 2: 1 / 0.5, 3: 1 / 0.45}), StepCurve({1: 1e-12}))

    def observe(self, *_) -> None: ...


class NoEarlyStop(Speculator):
    """What must not be done: all budgets are looked at with the confidences of the very drafts that are admitted."""

    stops_early = False


def flip(policy: type[Speculator], seeds: range, ahead: bool = False) -> list[int]:
    """How often each token came second, each draw by an engine that has seen nothing before. `ahead`: steps are planned ahead,
    and it is the third token, the first whose budget hangs on what a draft was."""
    core = EngineCore(
        Coin(), api.EngineConfig(num_blocks=2, max_num_seqs=1, speculative="dspark", acceptance="standard", draft_budget=0)
    )
    counts: Counter[int] = Counter()
    for seed in seeds:
        core.use(policy(Options(block=2, gate=1.0), FixedCosts()))
        params = api.SamplingParams(seed=seed, max_tokens=5)
        answers = (collect_ahead if ahead else collect)(core, [api.EngineRequest(f"{seed}", [0], [], params)])
        counts[answers[0].choices[0].ids[1 + ahead]] += 1
    return [counts[0], counts[1]]


def test_of_flips(name: str, counts: Sequence[int]) -> Test:
    return chi_square(f"flips, {name}", dict(enumerate(counts)), {0: 0.7, 1: 0.3})


# ---------------------------------------------------------------- the command

# name -> (policy, whether steps are planned ahead, whether the distribution is kept)
POLICIES = {
    "early stop": (Speculator, False, True),
    "no early stop": (NoEarlyStop, False, False),
    "planned ahead": (NoEarlyStop, True, True),
}
SIZES = {"greedy": 10, "draws": 4 * BATCH, "flips": 1000}  # prompts, draws of a part: under half a minute each


class Worker:
    """Makes parts, with a model of its own. `path`: the checkpoint."""

    def __init__(self, path: str) -> None:
        torch.set_num_threads(1)
        self.model = load_model(path, numerics="exact", batch_invariant=True)
        self.prompt = favourites(self.model, 95)

    def __call__(self, part: parts.Part) -> Any:
        """A JSON value."""
        if part.kind == "greedy":
            return greedy(self.model, part.numbers)
        if part.kind == "flips":
            policy, ahead, _ = POLICIES[part.of]
            return flip(policy, part.numbers, ahead)
        drawn = draw_case(self.model, self.prompt, CASES[int(part.of)], part.numbers)
        return [[[list(tokens), count] for tokens, count in drawn.counts.items()], drawn.verified, drawn.accepted]


def all_parts(prompts: int, draws: int) -> list[parts.Part]:
    """The dearest first, so that no worker begins a long part when the others are through."""
    out = [part for case in range(len(CASES)) for part in parts.cut("draws", str(case), draws, SIZES["draws"])]
    out += parts.cut("greedy", "", prompts, SIZES["greedy"])
    return out + [part for policy in POLICIES for part in parts.cut("flips", policy, draws, SIZES["flips"])]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m headrace.engine.acceptance", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint with a draft (default: a small random one whose draft often agrees)")
    parser.add_argument("--prompts", type=int, default=500, help="greedy answers to compare (default 500)")
    parser.add_argument("--draws", type=int, default=20_000, help="of each distribution (default 20000)")
    parser.add_argument("--workers", type=int, default=1, help="processes, of one thread each (default 1)")
    parser.add_argument("--journal", type=Path, help="a file of finished parts: a run that was stopped goes on from there")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        path = str(args.model or agreeing_checkpoint(Path(scratch) / "model"))
        here = Worker(path)
        journal = parts.Journal(args.journal, parts.digest_of(Path(__file__).parent, here.model.checkpoint_digest))
        done = parts.work(all_parts(args.prompts, args.draws), Worker, path, args.workers, journal)
    return 0 if report(here.model, here.prompt, done) else 1


def report(model, prompt: Sequence[int], done: dict[parts.Part, Any]) -> bool:
    """Print what the parts say together; whether all of it is as it must be."""
    by: dict[tuple[str, str], list] = {}
    for part, value in done.items():
        by.setdefault((part.kind, part.of), []).append(value)
    answers = by["greedy", ""]
    different = sorted(i for answer in answers for i in answer["different"])
    total = {name: sum(answer[name] for answer in answers) for name in ("prompts", "tokens", "windows", "window_tokens")}
    length = total["window_tokens"] / max(total["windows"], 1)
    print(f"greedy {total['prompts']} prompts, {total['tokens']} tokens, {length:.2f} a window; different: {different}")
    good = not different
    level = ALPHA / (len(CASES) * (TOKENS + 1) + len(POLICIES))
    print(f"chi-square; {ALPHA:g} over all tests is {level:.2g} for each", flush=True)
    for number, case in enumerate(CASES):
        values = by["draws", str(number)]
        drawn = sum((Drawn(Counter({tuple(t): n for t, n in v[0]}), *v[1:]) for v in values), Drawn(Counter()))
        for test in tests_of_case(model, prompt, case, drawn):
            good &= _show(test, test.p >= level)
    for name, (_, _, keeps) in POLICIES.items():
        counts = [sum(pair) for pair in zip(*by["flips", name], strict=True)]
        test = test_of_flips(name, counts)
        good &= _show(test, (test.p >= level) == keeps, f"shares {counts[0] / sum(counts):.3f}")
    return good


def _show(test: Test, good: bool, more: str = "") -> bool:
    figures = f"{test.draws} draws, {test.cells} cells, chi2 {test.chi2:.1f}, p {test.p:.3g}"
    print(f"{'ok  ' if good else 'FAIL'} {test.name}: {figures} {more}", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())
