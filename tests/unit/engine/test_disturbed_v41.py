"""Requests on V4.1's real arithmetic that push each other out of memory: several choices, seeds, grammars and stops, with and
without drafts, steps planned ahead and not, in random order. Each answer is the undisturbed one, bit for bit, with
`batch_invariant`. Without it last bits hang on who else is in a batch: then each token must still be what its own
log-probabilities and its noise make it, and these must be, but for last bits, those that the model gives the same ids in one
undisturbed pass.
"""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
import torch

from headrace.engine import api, rng
from headrace.engine.agreeing import agreeing_checkpoint
from headrace.engine.core import EngineCore
from headrace.engine.grammar import Grammars
from headrace.engine.llm import Answer, collect
from headrace.engine.loader import load_model

from .grammars import SCHEMAS
from .test_ahead import run_in_any_order, same

pytestmark = pytest.mark.timeout(300)
DRAFTS = {"speculative": "dspark", "draft_budget": 1000, "rollback_gate": 1.0}
LAST_BITS = 2e-5  # of log-probabilities in fp32 of about -6, after eight layers (5.7e-6 is the most that was seen)
TIGHT = {"num_blocks": 5, "max_num_seqs": 6, "max_num_batched_tokens": 220}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return agreeing_checkpoint(tmp_path_factory.mktemp("agreeing"), seed=4)


def loaded(checkpoint, numerics="exact", **how):
    model = load_model(checkpoint, numerics=numerics, **how)
    return model, Grammars(checkpoint / "tokenizer.json", model.vocab_size, model.eos_token_ids)


@pytest.fixture(scope="module")
def varying(checkpoint):
    """Without quantisation, which now and then makes a whole step of a last bit."""
    return loaded(checkpoint, batch_invariant=False, kv_store="fp32")


def requests(chance: random.Random, logprobs: int = 2) -> list[api.EngineRequest]:
    """Outputs cross a boundary of blocks, where a sequence needs one more."""
    out = []
    for i, n in enumerate(chance.sample([7, 1, 2, 1], k=4)):
        grammar = api.Grammar("json_schema", json.dumps(SCHEMAS["array of objects"])) if i == 2 else None
        sampling = api.SamplingParams(
            temperature=chance.choice([0.0, 1.0, 1.0]), seed=chance.randint(0, 9), max_tokens=chance.randint(8, 24), n=n,
            stop_token_ids=chance.choice([(), tuple(range(5, 250, 40))]), grammar=grammar, logprobs=logprobs, ignore_eos=True,
        )  # fmt: skip
        ids = chance.choices(range(3, 250), k=chance.randint(108, 127) + 20 * (i == 1))
        out.append(api.EngineRequest(f"r{i}", ids, [], sampling, priority=chance.randint(0, 1)))
    return out


def disturbed(of, todo, chance: random.Random, **config) -> tuple[list[Answer], set[str], Counter]:
    """Requests that have too few blocks, in a random order: (answers, who was cancelled, what happened)."""
    model, grammars = of
    core = EngineCore(model, api.EngineConfig(**TIGHT | config), grammars=grammars)
    core.ledger.room = lambda blocks: core.pool.available >= blocks  # no room kept for growth: they push each other out
    answers, cancelled, ahead = run_in_any_order(core, todo, chance)
    counts = Counter(core.ledger.counters) + Counter(ahead=ahead)
    if core.speculator:
        counts["accepted"] = sum(core.speculator.counts["accepted"])
    return answers, cancelled, counts


def undisturbed(of, todo) -> list[Answer]:
    """Each alone."""
    model, grammars = of
    config = api.EngineConfig(num_blocks=64, async_scheduling=False, prefix_caching=False)
    return [collect(EngineCore(model, config, grammars=grammars), [r])[0] for r in todo]


@pytest.fixture(scope="module", params=["exact", "bounded"])
def scenes(request, checkpoint):
    """(model, grammars), and of some requests their undisturbed answers: [(requests, answers)]."""
    of, chance = loaded(checkpoint, request.param, batch_invariant=True), random.Random(4)
    todos = [requests(chance) for _ in range(4 if request.param == "exact" else 2)]
    return of, [(todo, undisturbed(of, todo)) for todo in todos]


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("ahead", [False, True], ids=["waits", "ahead"])
def test_answers_are_the_undisturbed_ones(scenes, ahead, drafts):
    (of, pairs), chance, seen = scenes, random.Random(4), Counter()
    exact = of[0].spec.numerics == "exact"
    for turn, (todo, wanted) in enumerate(pairs):  # class `bounded`: what a hit leaves out changes what is computed
        config = (DRAFTS if drafts else {}) | {"async_scheduling": ahead, "prefix_caching": exact and turn % 2 == 0}
        got, cancelled, counts = disturbed(of, todo, chance, **config)
        seen += counts
        for mine, theirs in zip(got, wanted, strict=True):
            if mine.request not in cancelled:
                same(mine, theirs)
    happened(seen, ahead, drafts)


def happened(seen: Counter, ahead: bool, drafts: bool) -> None:
    assert seen["preemptions"] > 0 and seen["resumptions"] > seen["preemptions"], "choices begin as images, too"
    assert (seen["ahead"] > 10) == ahead and (seen["accepted"] > 10) == drafts and seen["finished"] > 6


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("ahead", [False, True], ids=["waits", "ahead"])
def test_what_differs_without_batch_invariance_is_last_bits(varying, ahead, drafts):
    chance, seen = random.Random(4), Counter()
    for _ in range(2):
        todo = requests(chance, logprobs=varying[0].vocab_size)
        config = (DRAFTS if drafts else {}) | {"async_scheduling": ahead, "prefix_caching": False}
        got, _, counts = disturbed(varying, todo, chance, **config)
        seen += counts
        for r, answer in zip(todo, got, strict=True):
            for number, choice in enumerate(answer.choices):
                if choice.ids:
                    own = torch.stack([full(top) for _, _, top in choice.logprobs])
                    assert (own - forced(varying, r.ids, choice.ids)).abs().max() < LAST_BITS
                    assert r.sampling.grammar is not None or shortfall(r, number, choice.ids, own) < LAST_BITS
    happened(seen, ahead, drafts)


def full(top: list[tuple[int, float]]) -> torch.Tensor:
    """Log-probabilities of all tokens, by id."""
    ids, values = zip(*top, strict=True)
    out = torch.full((len(top),), float("nan"))
    out[list(ids)] = torch.tensor(values)
    return out


def shortfall(r: api.EngineRequest, choice: int, ids: list[int], own: torch.Tensor) -> float:
    """By how much the tokens miss the largest of log-probability and noise: 0, but for rounding."""
    worst = 0.0
    for at, token in enumerate(ids):
        scores = own[at].double()
        if r.sampling.temperature:
            key = rng.key(r.sampling.seed, choice, len(r.ids) + at, rng.Purpose.SAMPLE)
            noise = rng.gumbel(rng.keys([key], "cpu").unsqueeze(-1), torch.arange(len(scores)))[0]
            scores = scores / r.sampling.temperature + noise
        worst = max(worst, float(scores.max() - scores[token]))
    return worst


def forced(of, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """The log-probabilities behind a prompt and each of these tokens but the last, from one pass over all of them."""
    model, _ = of
    sampling = api.SamplingParams(max_tokens=1, prompt_logprobs=model.vocab_size)
    core = EngineCore(model, api.EngineConfig(num_blocks=8, prefix_caching=False))
    scores = collect(core, [api.EngineRequest("forced", [*prompt, *ids], [], sampling)])[0].prompt_logprobs
    return torch.stack([full(top) for _, _, top in scores[len(prompt) :]])
