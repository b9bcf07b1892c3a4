"""Speculative decoding on the real V4.1 arithmetic, class `exact` with `batch_invariant`: whatever the way through the engine,
ids and log-probabilities are bit for bit those of each request alone without drafts, and a rejection leaves no trace in paged
blocks, windows, compressor tails, draft rings or n-gram history.

The model is small and random, and its draft often agrees with it, so blocks are accepted, cut and rejected.
"""

import json
import random

import pytest
import torch

from headrace.engine import api
from headrace.engine.agreeing import agreeing_checkpoint
from headrace.engine.core import EngineCore
from headrace.engine.llm import collect
from headrace.engine.loader import load_model

pytestmark = pytest.mark.timeout(300)  # the model's fixture is computed within the first test's time

LENGTHS = [1, 2, 31, 125, 127, 128, 200, 250]
ALL = {"speculative": "dspark", "draft_budget": 1000, "rollback_gate": 1.0}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return agreeing_checkpoint(tmp_path_factory.mktemp("agreeing"), seed=4)


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, numerics="exact", batch_invariant=True)


@pytest.fixture(scope="module")
def requests(model):
    """Greedy and seeded; outputs cross block boundaries at 128 and 256."""
    rng = random.Random(6)
    base = rng.choices(range(3, model.vocab_size), k=300)
    out = []
    for i, n in enumerate(LENGTHS):
        ids = (base[:130] if i % 2 else []) + rng.choices(range(3, model.vocab_size), k=300)
        sampling = api.SamplingParams(
            temperature=(0.0, 1.0, 0.7)[i % 3], top_p=(1.0, 0.9)[i % 2], seed=i, max_tokens=14, logprobs=2,
            repetition_penalty=1.1 if i % 4 == 0 else 1.0, ignore_eos=i % 2 == 0,
        )  # fmt: skip
        out.append(api.EngineRequest(f"r{n}", ids[:n], [], sampling))
    return out


def engine(model, role="both", **config) -> EngineCore:
    return EngineCore(model, api.EngineConfig(role=role, **{"num_blocks": 64, "max_num_batched_tokens": 512} | config))


def said(answers) -> dict:
    assert not any(a.error for a in answers), [a.error for a in answers]
    return {a.request: (a.choices[0].ids, a.choices[0].logprobs, a.choices[0].finish) for a in answers}


@pytest.fixture(scope="module")
def alone(model, requests) -> dict:
    core = engine(model, prefix_caching=False)
    return {k: v for r in requests for k, v in said(collect(core, [r])).items()}


@pytest.mark.parametrize("budget", [1, 6, 1000, None])
def test_batched_at_any_budget_and_from_the_cache(model, requests, alone, budget):
    core = engine(model, **ALL | {"draft_budget": budget}, chunk_tokens=(37, 129, 5))
    for _ in range(2):
        assert said(collect(core, requests)) == alone
    stats = core.stats()
    assert stats["cached_tokens"] > 0 and stats["drafts_accepted/position=1"] > 0
    if budget == 1000:
        assert stats["drafts_accepted/position=4"] > 0 and stats["draft_window_tokens"] > 1.5 * stats["draft_windows"]


def test_preempted(model, requests, alone):
    long = [r for r in requests if len(r.ids) in (125, 127, 128, 250)]
    core = engine(model, num_blocks=7, prefix_caching=False, **ALL)
    core.ledger.room = lambda blocks: core.pool.available >= blocks  # no room kept for growth
    assert said(collect(core, long)) == {r.request: alone[r.request] for r in long}
    stats = core.stats()
    assert stats["preemptions"] > 0 and stats["drafts_accepted/position=1"] > 0


@pytest.mark.parametrize("where", ["both", "decode alone"])
def test_split_over_two_engines_the_rings_travel(model, requests, alone, where):
    """An engine that computes prompts does not draft, but its state brings the draft's rings."""
    prefill = engine(model, "prefill", chunk_tokens=(100, 77), **(ALL if where == "both" else {}))
    decode = engine(model, "decode", max_num_seqs=12, **ALL)
    out = {r.request: ([], [], "") for r in requests}
    by_name = {r.request: r for r in requests}
    for r in requests:
        prefill.submit(api.EngineRequest(r.request, r.ids, [], r.sampling))
    done = []
    while prefill.has_work() or done or decode.has_work():
        done += [e for e in (prefill.step() or () if prefill.has_work() else ()) if isinstance(e, api.PrefillDone)]
        while done and hand_over(prefill, decode, by_name[done[0].request], done[0]):
            done.pop(0)
        for e in decode.step() or () if decode.has_work() else ():
            if isinstance(e, api.Tokens):
                ids, logprobs, _ = out[e.request]
                out[e.request] = (ids + e.ids, logprobs + (e.logprobs or []), e.finish)
    assert out == alone
    assert decode.stats()["computed_rows"] == 0 and decode.stats()["drafts_accepted/position=2"] > 0


def hand_over(prefill, decode, request, done) -> bool:
    request.hashes = decode.ledger.hasher(b"").hashes(request.ids)
    reservation = decode.reserve(request.request, request.hashes, len(request.ids))
    if reservation is None:
        return False
    for block, source in zip(reservation.blocks, done.block_table[reservation.have :], strict=True):
        decode.runner.kv.data[block] = prefill.runner.kv.data[source]
    decode.admit(reservation, done.handoff, request)
    prefill.release(request.request)
    return True


def memory(core: EngineCore) -> dict[int, tuple]:
    """position -> packed state, paged entries of whole groups below it, ids, of the one running sequence."""
    out = {}
    for s in core.ledger.running:
        if s.prefilling or s.hidden:
            continue
        at, model, entries = s.computed, core.runner.model, []
        paged, table = model._paged(core.runner.kv), torch.tensor([s.block_table])
        for group in model.spec.groups:  # by value: where a record's bytes lie in a block is the family's own
            whole = paged[group.name].read_blocks(table)[0]
            entries.append(whole[: at // group.tokens_per_entry].numpy().tobytes())
        out[at] = (core.runner.states.pack(s.slot, at), entries, s.ids[: at + 1])
    return out


@pytest.mark.parametrize("numerics", ["exact", "bounded"])
def test_after_a_rejection_all_memory_is_as_if_there_had_been_no_draft(checkpoint, numerics):
    model = load_model(checkpoint, numerics=numerics, batch_invariant=True)
    for n, temperature in ((1, 0.0), (17, 1.0), (120, 0.0), (251, 1.0)):
        rng = random.Random(n)
        ids = rng.choices(range(3, model.vocab_size), k=n)
        r = api.EngineRequest("a", ids, [], api.SamplingParams(temperature=temperature, seed=n, max_tokens=22, ignore_eos=True))
        plain, core = engine(model, prefix_caching=False), engine(model, prefix_caching=False, **ALL)
        seen, compared = {}, 0
        for one in (plain, core):
            one.submit(r)
        while plain.has_work():
            plain.step()
            seen |= memory(plain)
        while core.has_work():
            core.step()
            for at, state in memory(core).items():
                assert state == seen[at], at
                compared += 1
        verified, accepted = (sum(core.speculator.counts[name]) for name in ("verified", "accepted"))
        assert compared >= 4 and verified > accepted > 0


def test_a_request_that_pauses_resumes_with_the_drafts_it_would_have_had(model):
    """Rings are fed by every forward pass, drafting or not: after a pause the block is the one that no pause would give."""
    r = api.EngineRequest("a", list(range(40, 60)), [], api.SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    blocks = []
    for pause in (False, True):
        core = engine(model, prefix_caching=False, **ALL)
        core.submit(r)
        seen = {}
        while core.has_work():
            core.step()
            for s in core.ledger.running:
                if s.draft.tokens:
                    seen[s.computed] = s.draft.tokens
                if pause and s.output_len == 3:
                    s.draft.closed_until, s.draft.tokens, s.draft.survival = core.speculator.step + 12, [], []
        blocks.append(seen)
    resumed = max(blocks[1])
    shared = blocks[0].keys() & blocks[1].keys()
    assert len(blocks[1]) < len(blocks[0]) + 12 and resumed > 30 and any(at > 30 for at in shared)
    assert all(blocks[0][at] == blocks[1][at] for at in shared)


def test_the_confidence_head_may_be_told_what_it_reads(checkpoint):
    model = load_model(checkpoint, numerics="exact")
    head = model.mtp[-1].confidence_head
    assert not head.normed
    engine(model, **ALL | {"confidence_normed": True})
    assert head.normed
    engine(model, **ALL | {"confidence_normed": False})
    assert not head.normed


def test_the_checkpoints_own_temperatures_are_used_unless_others_are_named(checkpoint, model, tmp_path):
    block, own, other = model.draft_block, checkpoint / "calibration.json", tmp_path / "other.json"

    def used(**config) -> tuple[list[float], str]:
        options = engine(model, **ALL | config).speculator
        stats = options.stats()
        told = [stats[f"draft_temperature_used/position={place}"] for place in range(1, block + 1)]
        assert told == list(options.options.temperatures)
        return told, options.options.calibration

    assert used() == ([1.0] * block, "none")
    own.write_text(json.dumps({"temperatures": [1.5] * block}))
    other.write_text(json.dumps({"temperatures": [0.5] * block}))
    try:
        assert used() == ([1.5] * block, str(own))
        assert used(draft_calibration=str(other)) == ([0.5] * block, str(other))
        assert used(draft_calibration="none") == ([1.0] * block, "none")
        own.write_text(json.dumps({"temperatures": [1.5]}))
        with pytest.raises(ValueError, match=f"{own} has 1 temperatures; this draft's block has {block} tokens; .*'none'"):
            used()
    finally:
        own.unlink()
