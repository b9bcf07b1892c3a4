"""One prompt, many ways: on the real V4.1 arithmetic in class `exact` with `batch_invariant`, every way through the engine
gives the same token ids and bitwise the same log-probabilities. Each way is proven taken by its counters.

Preset w16 (a 16-token window, so that exact replay is 120 rows) with random weights.
"""

import random
from dataclasses import dataclass

import pytest
import torch

from headrace.engine import api
from headrace.engine.core import EngineCore
from headrace.engine.llm import Answer, collect
from headrace.engine.loader import load_model
from headrace.engine.make_checkpoint import make_checkpoint

LENGTHS = [1, 2, 31, 127, 128, 129, 200, 255, 256, 257, 391, 512, 641, 777, 900]
ODD_CHUNKS = (37, 129, 5, 300, 1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint("w16", 11, tmp_path_factory.mktemp("w16") / "w16")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, numerics="exact", batch_invariant=True)


@pytest.fixture(scope="module")
def requests(model):
    """Greedy and seeded; the longer prompts share prefixes that end inside a block and at its edge."""
    rng = random.Random(5)
    base = rng.choices(range(3, model.vocab_size), k=900)
    out = []
    for i, n in enumerate(LENGTHS):
        shared = (0, 0, 128, 300)[i % 4]
        ids = (base[:shared] + rng.choices(range(3, model.vocab_size), k=900))[:n]
        sampling = api.SamplingParams(
            temperature=(0.0, 1.0, 0.7)[i % 3], top_p=(1.0, 0.9)[i % 2], seed=i, max_tokens=(5, 8)[i % 2], logprobs=3,
            repetition_penalty=1.1 if i % 5 == 0 else 1.0, ignore_eos=i % 2 == 0,
        )  # fmt: skip
        out.append(api.EngineRequest(f"r{n}", ids, [], sampling))
    return out


def engine(model, role="both", **config) -> EngineCore:
    return EngineCore(model, api.EngineConfig(role=role, **{"num_blocks": 96, "max_num_batched_tokens": 1024} | config))


@dataclass
class Said:
    """What must not depend on the way."""

    ids: list[int]
    logprobs: list
    finish: str

    @classmethod
    def of(cls, answer: Answer) -> "Said":
        assert not answer.error and answer.cached_tokens + answer.computed_rows == len(answer.prompt_ids)
        choice = answer.choices[0]
        assert len(choice.logprobs) == len(choice.ids) and choice.ids
        return cls(choice.ids, choice.logprobs, choice.finish)


@pytest.fixture(scope="module")
def alone(model, requests) -> dict[str, Said]:
    """Each by itself: one chunk, no cache, nobody else in the batch."""
    core = engine(model, prefix_caching=False)
    out = {}
    for r in requests:
        answer = collect(core, [r])[0]
        assert (answer.cached_tokens, answer.computed_rows, answer.replay_rows) == (0, len(r.ids), 0)
        out[r.request] = Said.of(answer)
    assert core.stats()["steps"] == sum(len(said.ids) + (said.finish == "stop") for said in out.values())
    return out


def widest(core: EngineCore, requests) -> tuple[list[Answer], int, int]:
    """(answers, most sequences in one step, most chunks of one prompt)."""
    rows, chunks, schedule = [], {}, core.scheduler.schedule

    def watch(now, before=None):
        plan = schedule(now, before)
        if plan:
            rows.append(len(plan.rows))
            for row in plan.rows:
                chunks[row.sequence.name] = row.sequence.chunks + 1
        return plan

    core.scheduler.schedule = watch
    answers = collect(core, requests)
    core.scheduler.schedule = schedule
    return answers, max(rows), max(chunks.values())


def test_batched(model, requests, alone):
    answers, sequences, _ = widest(engine(model, prefix_caching=False), requests)
    assert sequences >= 10
    assert {a.request: Said.of(a) for a in answers} == alone


def test_in_odd_chunks(model, requests, alone):
    core = engine(model, prefix_caching=False, chunk_tokens=ODD_CHUNKS, max_num_batched_tokens=333, max_num_seqs=5)
    answers, _, chunks = widest(core, requests)
    assert chunks >= 8
    assert {a.request: Said.of(a) for a in answers} == alone


def test_hit_with_snapshot(model, requests, alone):
    core = engine(model)
    assert {a.request: Said.of(a) for a in collect(core, requests)} == alone
    for answer in collect(core, requests):
        n = len(answer.prompt_ids)
        assert answer.cached_tokens == (n - 1) // 128 * 128
        assert answer.snapshot_hit == (n > 128) and answer.replay_rows == 0
        assert Said.of(answer) == alone[answer.request]


@pytest.mark.parametrize("chunk_tokens", [(), ODD_CHUNKS])
def test_hit_with_replay(model, requests, alone, chunk_tokens):
    core = engine(model, snapshot_bytes=0, chunk_tokens=chunk_tokens)
    collect(core, requests)
    for answer in collect(core, requests):
        n = len(answer.prompt_ids)
        assert answer.cached_tokens == (n - 1) // 128 * 128 and not answer.snapshot_hit
        assert answer.replay_rows == (model.spec.replay_rows if n > 128 else 0) == (120 if n > 128 else 0)
        assert Said.of(answer) == alone[answer.request]


def test_preempted(model, requests, alone):
    """Prompts fill the pool, so that growing outputs push the last ones out to host memory and back."""
    long = [r for r in requests if len(r.ids) in (127, 128, 256, 391, 512)]
    core = engine(model, num_blocks=12, prefix_caching=False)
    core.ledger.room = lambda blocks: core.pool.available >= blocks  # no room kept for growth
    answers = collect(core, long)
    stats = core.stats()
    assert stats["preemptions"] > 0 and stats["resumptions"] == stats["preemptions"]
    assert {a.request: Said.of(a) for a in answers} == {r.request: alone[r.request] for r in long}


@pytest.mark.parametrize("cached", [False, True])
def test_split_over_prefill_and_decode(model, requests, alone, cached):
    """State packed by one engine, unpacked by another; blocks copied; the first token sampled by the second."""
    prefill = engine(model, "prefill", chunk_tokens=(300, 77))
    decode = engine(model, "decode", num_blocks=80, max_num_seqs=12)
    said = {}
    for _ in range(1 + cached):
        said = {r.request: Said([], [], "") for r in requests}
        by_name = {r.request: r for r in requests}
        for r in requests:
            r.hashes = prefill.ledger.hasher(b"").hashes(r.ids)
            prefill.submit(r)
        done = []
        while prefill.has_work() or done or decode.has_work():
            done += [e for e in (prefill.step() or () if prefill.has_work() else ()) if isinstance(e, api.PrefillDone)]
            while done and hand_over(prefill, decode, by_name[done[0].request], done[0]):
                hit = done.pop(0)
            for e in decode.step() or () if decode.has_work() else ():
                if isinstance(e, api.Tokens):
                    said[e.request].ids += e.ids
                    said[e.request].logprobs += e.logprobs
                    said[e.request].finish = e.finish
            prefill.pool.check(prefill.owners())
            decode.pool.check(decode.owners())
    assert said == alone
    assert hit.computed_rows == (len(hit.handoff.ids) - 1) % 128 + 1 if cached else hit.computed_rows > 0
    assert prefill.stats()["snapshot_hits"] >= sum(n > 128 for n in LENGTHS) * cached
    assert decode.stats()["computed_rows"] == 0


def hand_over(prefill, decode, request, done) -> bool:
    reservation = decode.reserve(request.request, request.hashes, len(request.ids))
    if reservation is None:
        return False
    for block, source in zip(reservation.blocks, done.block_table[reservation.have :], strict=True):
        decode.runner.kv.data[block] = prefill.runner.kv.data[source]
    decode.admit(reservation, done.handoff, request)
    prefill.release(request.request)
    return True


def test_choices_do_not_depend_on_each_other(model, requests, alone):
    r = next(r for r in requests if len(r.ids) == 391)
    three = api.EngineRequest("three", r.ids, [], api.SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=6, logprobs=2))
    one = api.EngineRequest("one", r.ids, [], api.SamplingParams(temperature=1.0, seed=4, max_tokens=6, logprobs=2))
    together, single = collect(engine(model), [three])[0], collect(engine(model), [one])[0]
    assert together.choices[0] == single.choices[0]
    assert len({tuple(c.ids) for c in together.choices}) == 3


def test_bounded_cold_prompts_do_not_depend_on_the_way(checkpoint, requests):
    """The decoder's floor is absolute: other cuts, a batch or a preemption change no bit in class `bounded` either."""
    model = load_model(checkpoint, numerics="bounded", batch_invariant=True)
    some = [r for r in requests if len(r.ids) in (127, 128, 256, 391, 512)]
    plain = engine(model, prefix_caching=False)
    reference = {r.request: Said.of(collect(plain, [r])[0]) for r in some}
    for config in ({"chunk_tokens": ODD_CHUNKS, "max_num_batched_tokens": 100}, {"num_blocks": 12}):
        core = engine(model, prefix_caching=False, **config)
        core.ledger.room = lambda blocks, core=core: core.pool.available >= blocks
        assert {a.request: Said.of(a) for a in collect(core, some)} == reference
        assert (core.stats()["preemptions"] > 0) == ("num_blocks" in config)


def test_bounded_hits_with_a_snapshot_are_exact_and_those_with_replay_are_near(checkpoint, requests):
    """Class `bounded` is an approximation where it says so: compare log-probabilities of the same first token."""
    model = load_model(checkpoint, numerics="bounded", batch_invariant=True)
    assert model.spec.keep_rows == model.spec.replay_rows == 28
    greedy = api.SamplingParams(temperature=0, max_tokens=3, logprobs=0)
    prompts = [api.EngineRequest(r.request, r.ids, [], greedy) for r in requests]
    for snapshot_bytes in (1 << 26, 0):
        core = engine(model, snapshot_bytes=snapshot_bytes, chunk_tokens=(61,))
        cold, again = ({a.request: a for a in collect(core, prompts)} for _ in range(2))
        for name, hit in again.items():
            n = len(hit.prompt_ids)
            assert hit.cached_tokens == (n - 1) // 128 * 128
            first, second = cold[name].choices[0].logprobs, hit.choices[0].logprobs
            if n >= 128 + 28 or not hit.cached_tokens:
                assert hit.snapshot_hit == (hit.cached_tokens > 0 and snapshot_bytes > 0)
            if hit.snapshot_hit and n >= 128 + 28 or not hit.cached_tokens:
                assert first == second
            else:
                assert abs(first[0][1] - second[0][1]) < 1.0
