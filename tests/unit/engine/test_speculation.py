"""Speculative decoding in the engine, on a toy model whose state notices every stale row: what comes out in exact mode is what
comes out without drafts, and a rejected draft leaves no trace."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import api
from headrace.engine.core import EngineCore
from headrace.engine.llm import Answer, collect
from headrace.engine.toy import ToyModel

BLOCK, DRAFTS = 8, 4
MODELS = {numerics: ToyModel(numerics, block_tokens=BLOCK, draft_block=DRAFTS) for numerics in ("exact", "bounded")}
IDS = random.Random(7).choices(range(2, 97), k=90)


def engine(numerics="exact", **config) -> EngineCore:
    sizes = {"num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 40, "rollback_gate": 1.0} | config
    return EngineCore(MODELS[numerics], api.EngineConfig(**sizes))


def drafting(numerics="exact", **config) -> EngineCore:
    return engine(numerics, **{"speculative": "dspark", "draft_budget": 100} | config)


def request(name, ids, **sampling) -> api.EngineRequest:
    defaults = {"max_tokens": 30, "temperature": 1.0, "seed": 5, "ignore_eos": True, "logprobs": 2}
    return api.EngineRequest(name, ids, [], api.SamplingParams(**defaults | sampling))


def again(r: api.EngineRequest) -> api.EngineRequest:
    return api.EngineRequest(r.request, r.ids, [], r.sampling, r.namespace, r.priority)


def said(answers: list[Answer]) -> dict:
    assert not any(a.error for a in answers), [a.error for a in answers]
    return {a.request: [(c.ids, c.logprobs, c.finish, c.stop_id) for c in a.choices] for a in answers}


@st.composite
def requests(draw):
    out = []
    for i in range(draw(st.integers(1, 5))):
        start, size = draw(st.integers(0, 3)), draw(st.integers(1, 40))
        sampling = {
            "temperature": draw(st.sampled_from([0.0, 0.3, 1.0])),
            "top_p": draw(st.sampled_from([1.0, 0.8])),
            "top_k": draw(st.sampled_from([0, 5])),
            "repetition_penalty": draw(st.sampled_from([1.0, 1.3])),
            "presence_penalty": draw(st.sampled_from([0.0, 0.5])),
            "seed": draw(st.integers(0, 3)),
            "max_tokens": draw(st.integers(1, 40)),
            "n": draw(st.sampled_from([1, 1, 1, 3])),
            "ignore_eos": draw(st.booleans()),
            "stop_token_ids": draw(st.sampled_from([(), (1,), (38, 69)])),
        }
        sampling["min_tokens"] = draw(st.integers(0, sampling["max_tokens"]))
        out.append(request(f"r{i}", IDS[start : start + size], **sampling))
    return out


@st.composite
def configs(draw):
    return {
        "num_blocks": draw(st.integers(13, 24)),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.integers(12, 60)),
        "chunk_tokens": draw(st.sampled_from([(), (3,), (5, 1, 7)])),
        "snapshot_bytes": draw(st.sampled_from([0, 1 << 20])),
        "draft_budget": draw(st.sampled_from([0, 1, 3, 100, None])),
        "rollback_gate": draw(st.sampled_from([0.0, 0.3, 1.0])),
    }


@settings(deadline=None, max_examples=20)
@given(requests(), configs())
def test_exact_mode_says_what_is_said_without_drafts(todo, config):
    """Ids, log-probabilities, stops: alone and undrafted against any batch, budget, preemption, cache and gate."""
    want = {}
    for r in todo:
        want |= said(collect(engine(num_blocks=128, max_num_batched_tokens=512, prefix_caching=False), [again(r)]))
    core = drafting(**config)
    core.ledger.room = lambda blocks: core.pool.available >= blocks  # no room kept for growth: sequences push each other out
    for _ in range(2):  # the second time from the cache
        assert said(collect(core, [again(r) for r in todo])) == want
        core.pool.check(core.owners())
        assert core.pool.used == 0 and core.stats()["free_slots"] == config["max_num_seqs"]


def test_drafts_save_steps_and_are_counted():
    plain, core = engine(), drafting()
    todo = [request(f"r{i}", IDS[i : i + 12], temperature=0.0) for i in range(4)]
    assert said(collect(core, [again(r) for r in todo])) == said(collect(plain, [again(r) for r in todo]))
    stats = core.stats()
    assert stats["steps"] < 0.7 * plain.stats()["steps"]
    drafted, verified, accepted, pruned = (
        [stats[f"drafts_{name}/position={at}"] for at in range(1, DRAFTS + 1)]
        for name in ("drafted", "verified", "accepted", "pruned")
    )
    assert [v + p <= d for d, v, p in zip(drafted, verified, pruned, strict=True)] == [True] * DRAFTS
    assert accepted == sorted(accepted, reverse=True) and accepted[0] > 0 and verified[-1] < verified[0] or pruned[-1]
    assert all(a <= v for a, v in zip(accepted, verified, strict=True))
    assert stats["draft_window_tokens"] == sum(accepted) + stats["draft_windows"]
    assert stats["generated_tokens"] == 4 * 30


@pytest.mark.parametrize("stop_at", range(1, 12))
def test_nothing_is_published_behind_a_stop_inside_a_block(stop_at):
    r = request("a", IDS[:20], temperature=0.0)
    whole = collect(engine(), [again(r)])[0].choices[0].ids
    r.sampling.stop_token_ids = (whole[stop_at],)
    core = drafting()
    choice = collect(core, [again(r)])[0].choices[0]
    cut = whole.index(whole[stop_at])
    assert (choice.ids, choice.finish, choice.stop_id) == (whole[: cut + 1], "stop", whole[stop_at])
    assert len(choice.logprobs) == cut + 1 and core.pool.used == 0
    longer = [*IDS[:20], *choice.ids]
    assert said(collect(core, [request("b", longer)])) == said(collect(engine(), [request("b", longer)]))


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_max_tokens_ends_inside_a_block(max_tokens):
    r = request("a", IDS[:20], temperature=0.0, max_tokens=max_tokens)
    core = drafting()
    answers = collect(core, [again(r)])
    assert said(answers) == said(collect(engine(), [again(r)]))
    assert len(answers[0].choices[0].ids) == max_tokens and answers[0].choices[0].finish == "length"


def states_of(core: EngineCore) -> dict[str, tuple]:
    """Every running sequence's memory, as it would travel: position, state, and its blocks up to its last whole row."""
    out = {}
    for s in core.ledger.running:
        if not s.prefilling and s.slot >= 0 and not s.hidden:
            paged = b"".join(bytes(core.runner.kv.data[block].numpy()) for block in s.block_table)
            out[s.name] = (s.computed, core.runner.states.pack(s.slot, s.computed), paged[: 8 * s.computed], list(s.ids))
    return out


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 40), st.integers(0, 5), st.sampled_from(["exact", "bounded"]), st.sampled_from([0.0, 1.0]))
def test_after_a_rejection_all_memory_is_as_if_there_had_been_no_draft(size, seed, numerics, temperature):
    """Step by step: at every position that both engines pass, packed state and paged bytes are equal."""
    r = request("a", IDS[:size], seed=seed, temperature=temperature, max_tokens=36)
    seen: dict[int, tuple] = {}
    plain = engine(numerics, prefix_caching=False)
    plain.submit(again(r))
    while plain.has_work():
        plain.step()
        seen |= {state[0]: state for state in states_of(plain).values()}
    core = drafting(numerics, prefix_caching=False)
    core.submit(again(r))
    compared = 0
    while core.has_work():
        core.step()
        for state in states_of(core).values():
            assert state == seen[state[0]]
            compared += 1
    stats = core.stats()
    assert compared > 5 and stats["drafts_verified/position=1"] > stats["drafts_accepted/position=1"]


def test_auto_drafts_where_there_is_a_draft():
    assert drafting(speculative="auto").speculator is not None
    plain = EngineCore(ToyModel("exact", block_tokens=BLOCK), api.EngineConfig(num_blocks=8, speculative="auto"))
    assert plain.speculator is None


def test_speculation_without_a_draft_is_refused():
    with pytest.raises(ValueError, match="no draft"):
        EngineCore(ToyModel("exact", block_tokens=BLOCK), api.EngineConfig(num_blocks=8, speculative="dspark"))
    for wrong in ({"speculative": "eagle"}, {"acceptance": "loose"}, {"draft_budget": -1}, {"rollback_gate": 2.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            drafting(**wrong)
