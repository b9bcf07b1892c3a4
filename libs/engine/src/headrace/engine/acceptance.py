"""Statistics of speculative decoding: `python -m headrace.engine.acceptance` prints them and fails if one is wrong.

    greedy          prompts whose greedy tokens and log-probabilities with drafts differ from those without: must be none
    distribution    first three tokens of many draws against the target's distribution, which is computed from the target's
                    logits alone: Pearson's chi-square over the joint cells, and over each token's own
    counterexample  DSpark's own: seconds of a step with 1, 2, 3 rows such that a search for the best budget which looks past
                    the first draft that does not help bends the distribution (0.7, 0.3) to (0.85, 0.15). With the early stop it
                    must pass the test above, without it must fail

Every distribution test has the level ALPHA divided by the number of tests of the run (Bonferroni).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import api
from .agreeing import agreeing_checkpoint
from .batch import Segment
from .cache import CacheSpec, KVPool
from .core import EngineCore
from .llm import collect
from .loader import load_model
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


def tests_of_tokens(name: str, drawn: Sequence[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> list[Test]:
    """The joint distribution of the tokens, and each one's own."""
    out = [chi_square(f"{name}: all {TOKENS} tokens", Counter(drawn), expected)]
    for at in range(TOKENS):
        own: dict[int, float] = {}
        for tokens, p in expected.items():
            own[tokens[at]] = own.get(tokens[at], 0.0) + p
        out.append(chi_square(f"{name}: token {at + 1}", Counter(tokens[at] for tokens in drawn), own))
    return out


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


def draw_tokens(model, prompt: Sequence[int], sampling: dict, draws: int, **config) -> tuple[list[tuple[int, ...]], dict]:
    """(the first TOKENS tokens of each draw, the engine's statistics). Every draw is a request with its own seed."""
    block = model.spec.block_tokens
    blocks = BATCH * (-(-(len(prompt) + OUTPUT) // block) + 1)
    core = EngineCore(
        model, api.EngineConfig(num_blocks=blocks, max_num_seqs=BATCH, prefix_caching=False, rollback_gate=1.0, **config)
    )
    drawn: list[tuple[int, ...]] = []
    for start in range(0, draws, BATCH):
        todo = []
        for seed in range(start, min(start + BATCH, draws)):
            params = api.SamplingParams(**sampling, seed=seed, max_tokens=OUTPUT, ignore_eos=True)
            todo.append(api.EngineRequest(f"{seed}", prompt, [], params))
        drawn += [tuple(answer.choices[0].ids[:TOKENS]) for answer in collect(core, todo)]
    return drawn, core.stats()


def favourites(model, last: int, count: int = 4) -> list[int]:
    """A prompt that ends with `last` and holds what is likely behind it, so that penalties have something to do."""
    kv, states = KVPool(model.spec, 1), model.new_states(1)
    hidden = model.forward([Segment(0, 0, [last], (), (0,), outputs=(0,))], kv, states)
    return [*model.logits(hidden)[0].topk(count).indices.tolist(), last]


def distribution(model, prompt: Sequence[int], draws: int, cases=CASES) -> Iterator[Test]:
    """The tests of each case, all drafts verified."""
    for mode, sampling in cases:
        params = api.SamplingParams(**sampling, max_tokens=OUTPUT, ignore_eos=True)
        expected = target_distribution(model, prompt, params)
        config = {"speculative": "dspark", "acceptance": mode, "draft_budget": 1 << 30}
        drawn, stats = draw_tokens(model, prompt, sampling, draws, **config)
        accepted, verified = (stats[f"drafts_{name}/position=1"] for name in ("accepted", "verified"))
        assert 0 < accepted < verified, f"drafts must be accepted and rejected here: {accepted} of {verified} were"
        settings = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
        yield from tests_of_tokens(f"{mode}, {settings}", drawn, expected)


# ---------------------------------------------------------------- greedy


def greedy(model, prompts: int, output: int = 24, seed: int = 0, **config) -> dict:
    """Greedy answers with drafts and without, for random prompts of 1 to 160 tokens."""
    rng = np.random.default_rng(seed)
    params = api.SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, logprobs=1)
    todo = [
        api.EngineRequest(f"{i}", rng.integers(3, model.vocab_size, int(rng.integers(1, 161))).tolist(), [], params)
        for i in range(prompts)
    ]
    said, stats = [], {}
    for speculation in ({}, {"speculative": "dspark", "draft_budget": 1 << 30, "rollback_gate": 1.0} | config):
        core = EngineCore(model, api.EngineConfig(num_blocks=256, **speculation))
        said.append([answer.choices[0] for answer in collect(core, todo)])
        stats = core.stats()
    different = [i for i, (a, b) in enumerate(zip(*said, strict=True)) if a.ids != b.ids or a.logprobs != b.logprobs]
    return {
        "prompts": prompts,
        "tokens": sum(len(choice.ids) for choice in said[1]),
        "different": different,
        "mean_accepted_length": stats["draft_window_tokens"] / max(stats["draft_windows"], 1),
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

    def observe(self, rows, drafted, seconds) -> None: ...


class NoEarlyStop(Speculator):
    """What must not be done: all budgets are looked at with the confidences of the very drafts that are admitted."""

    stops_early = False


def counterexample(policy: type[Speculator], draws: int) -> tuple[list[int], Test]:
    """(draws of each token, the test) of the second token, each draw by an engine that has seen nothing before."""
    core = EngineCore(
        Coin(), api.EngineConfig(num_blocks=2, max_num_seqs=1, speculative="dspark", acceptance="standard", draft_budget=0)
    )
    counts: Counter[int] = Counter()
    for seed in range(draws):
        core.use(policy(Options(block=2, gate=1.0), FixedCosts()))
        params = api.SamplingParams(seed=seed, max_tokens=4)
        counts[collect(core, [api.EngineRequest(f"{seed}", [0], [], params)])[0].choices[0].ids[1]] += 1
    name = "with early stop" if policy.stops_early else "without early stop"
    return [counts[0], counts[1]], chi_square(name, counts, {0: 0.7, 1: 0.3})


# ---------------------------------------------------------------- the command


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m headrace.engine.acceptance", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint with a draft (default: a small random one whose draft often agrees)")
    parser.add_argument("--prompts", type=int, default=500, help="greedy answers to compare (default 500)")
    parser.add_argument("--draws", type=int, default=20_000, help="of each distribution (default 20000)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        path = args.model or agreeing_checkpoint(Path(scratch) / "model")
        model = load_model(path, numerics="exact", batch_invariant=True)
    good = True
    report = greedy(model, args.prompts)
    print("greedy " + json.dumps(report), flush=True)
    good &= not report["different"]
    level = ALPHA / (len(CASES) * (TOKENS + 1) + 2)
    print(f"chi-square; {ALPHA:g} over all tests is {level:.2g} for each", flush=True)
    for test in distribution(model, favourites(model, 95), args.draws):
        good &= _show(test, test.p >= level)
    for policy in (Speculator, NoEarlyStop):
        counts, test = counterexample(policy, args.draws)
        good &= _show(test, (test.p >= level) == policy.stops_early, f"shares {counts[0] / args.draws:.3f}")
    return 0 if good else 1


def _show(test: Test, good: bool, more: str = "") -> bool:
    figures = f"{test.draws} draws, {test.cells} cells, chi2 {test.chi2:.1f}, p {test.p:.3g}"
    print(f"{'ok  ' if good else 'FAIL'} {test.name}: {figures} {more}", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())
