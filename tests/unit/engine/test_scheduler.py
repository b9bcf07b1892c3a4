"""The scheduler under random arrivals, cancels, preemptions and tiny pools, on a toy model that notices every lost byte."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import api
from headrace.engine.core import EngineCore
from headrace.engine.llm import collect
from headrace.engine.toy import ToyModel

BLOCK = 8
PROFILE = settings(deadline=None, max_examples=40)
MODELS = {numerics: ToyModel(numerics, block_tokens=BLOCK) for numerics in ("exact", "bounded")}


def engine(numerics="exact", **config) -> EngineCore:
    sizes = {"num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16} | config
    return EngineCore(MODELS[numerics], api.EngineConfig(**sizes))


def request(name, ids, **sampling) -> api.EngineRequest:
    defaults = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    return api.EngineRequest(name, ids, [], api.SamplingParams(**defaults | sampling))


def alone(numerics, r: api.EngineRequest) -> list[tuple]:
    """The reference: nothing else in the engine, one chunk, no cache."""
    core = engine(numerics, num_blocks=128, max_num_batched_tokens=512, prefix_caching=False)
    return [(c.ids, c.finish) for c in collect(core, [api.EngineRequest("alone", r.ids, [], r.sampling)])[0].choices]


PREFIX = random.Random(7).choices(range(2, 97), k=80)


@st.composite
def prompts(draw):
    """Shared prefixes of any length and a tail of its own."""
    shared = draw(st.integers(0, 44))
    tail = draw(st.lists(st.integers(2, 96), min_size=0 if shared else 1, max_size=20))
    return PREFIX[:shared] + tail


@st.composite
def requests(draw):
    out = []
    for i, ids in enumerate(draw(st.lists(prompts(), min_size=1, max_size=6))):
        sampling = api.SamplingParams(
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=draw(st.integers(0, 3)),
            max_tokens=draw(st.integers(1, 36)),
            n=draw(st.sampled_from([1, 1, 1, 3])),
            ignore_eos=draw(st.booleans()),
        )
        out.append(api.EngineRequest(f"r{i}", ids, [], sampling, priority=draw(st.integers(0, 2))))
    return out


@st.composite
def configs(draw):
    return {
        "num_blocks": draw(st.integers(13, 24)),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.integers(12, 40)),
        "chunk_tokens": draw(st.sampled_from([(), (3,), (5, 1, 7)])),
        "snapshot_bytes": draw(st.sampled_from([0, 500, 1 << 20])),
    }


def check(core: EngineCore) -> None:
    core.pool.check(core.owners())
    slots = [s.slot for s in core.ledger.running]
    assert sorted(slots + core.ledger.free_slots) == list(range(core.config.max_num_seqs))
    assert all(len(s.block_table) * BLOCK >= s.computed for s in core.ledger.running)


@PROFILE
@given(requests(), configs(), st.randoms(use_true_random=False))
def test_whatever_happens_every_request_ends_once_with_the_answer_it_gets_alone(todo, config, chance):
    core = engine("exact", **config)
    ended: dict[tuple[str, int], str] = {}
    ids: dict[tuple[str, int], list[int]] = {}
    usage: dict[str, api.PromptDone] = {}
    waiting, cancelled = list(todo), set()
    for _ in range(3000):
        while waiting and chance.random() < 0.5:
            core.submit(waiting.pop(0))
        plan = core.plan()
        check(core)
        victims = [r.request for r in todo if r not in waiting and r.request not in cancelled]
        if victims and chance.random() < 0.01:  # while the step runs
            name = chance.choice(victims)
            gone = all((name, c) in ended for c in range(next(r for r in todo if r.request == name).sampling.n))
            assert core.cancel(name) != gone
            cancelled.add(name)
        if plan is None:
            assert not core.ledger.running, "something is running, and nothing can"
            if not waiting and not core.has_work():
                break
            continue
        for event in core.apply(plan, core.execute(plan)):
            assert event.request not in cancelled
            if isinstance(event, api.Tokens):
                key = (event.request, event.choice)
                assert key not in ended and event.index == len(ids.setdefault(key, []))
                ids[key] += event.ids
                if event.finish:
                    ended[key] = event.finish
            elif isinstance(event, api.PromptDone):
                usage[event.request] = event
            else:
                assert not isinstance(event, api.Failed), event
        check(core)
    else:
        pytest.fail("no end in sight")
    assert core.pool.used == 0 and not core.ledger.live and not core.owners()
    for r in todo:
        if r.request in cancelled:
            continue
        got = [(ids[r.request, c], ended[r.request, c]) for c in range(r.sampling.n)]
        assert got == alone("exact", r)
        done = usage[r.request]
        assert done.cached_tokens + done.computed_rows == len(r.ids) and done.computed_rows > 0
        assert done.cached_tokens % BLOCK == 0


@PROFILE
@given(requests(), configs())
def test_bounded_prompts_keep_their_last_rows_together(todo, config):
    """Every cold prompt gives the tokens it gets alone, however it is cut; hits may differ, for replay is an approximation."""
    core = engine("bounded", **config | {"prefix_caching": False})
    for r in todo:
        core.submit(r)
    ids = {}
    while core.has_work():
        plan = core.plan()
        for row in plan.rows:
            s = row.sequence
            assert row.segment.decoder_floor == max(0, s.prompt_len - 6)
            if row.segment.start < s.prompt_len:
                tail = max(0, s.prompt_len - 6)
                whole = row.segment.stop == s.prompt_len and row.segment.start <= tail
                assert row.segment.stop <= tail or whole, "the last keep_rows rows are one chunk"
        for event in core.apply(plan, core.execute(plan)):
            if isinstance(event, api.Tokens):
                ids.setdefault((event.request, event.choice), []).extend(event.ids)
        check(core)
    for r in todo:
        assert [ids[r.request, c] for c in range(r.sampling.n)] == [choice for choice, _ in alone("bounded", r)]


@pytest.mark.parametrize("numerics", ["exact", "bounded"])
def test_a_chunk_ends_where_the_snapshot_is_taken(numerics):
    core = engine(numerics, max_num_batched_tokens=64, chunk_tokens=(7,))
    core.submit(request("r", PREFIX[:45]))
    stops, snapshots = [], []
    while core.has_work():
        plan = core.plan()
        stops += [row.segment.stop for row in plan.rows if row.segment.start < 45]
        snapshots += [e.position for e in core.apply(plan, core.execute(plan)) if isinstance(e, api.SnapshotTaken)]
    if numerics == "exact":
        assert stops == [7, 14, 21, 28, 35, 40, 45] and snapshots[0] == 40
    else:  # the last 6 rows are one chunk: the boundary below them
        assert stops == [7, 14, 21, 28, 32, 39, 45] and snapshots[0] == 32
    assert snapshots[1:] == [64], "the newest boundary of the output, when it ends"


def test_decode_rows_come_first_and_prompts_share_what_is_left():
    core = engine(max_num_batched_tokens=10)
    core.submit(request("first", PREFIX[:4], max_tokens=30))
    core.step()
    core.submit(request("long", PREFIX[:60]))
    core.submit(request("behind", PREFIX[:20]))
    plan = core.plan()
    assert [(row.sequence.name, len(row.segment.ids)) for row in plan.rows] == [("first", 1), ("long", 9)]
    core.apply(plan, core.execute(plan))


def test_lower_priority_numbers_go_first_and_are_preempted_last():
    core = engine(num_blocks=8, max_num_batched_tokens=64, prefix_caching=False)
    for name, priority in (("late", 2), ("soon", 0), ("middle", 1)):
        sampling = api.SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
        core.submit(api.EngineRequest(name, PREFIX[:16], [], sampling, priority=priority))
    order, preempted = [], []
    while core.has_work():
        plan = core.plan()
        preempted += [s.name for s in plan.preempt]
        order += [e.request for e in core.apply(plan, core.execute(plan)) if isinstance(e, api.Tokens) and e.finish]
        check(core)
    assert order == ["soon", "middle", "late"]
    assert preempted and "soon" not in preempted


def test_preemption_resumes_exactly_there_and_reuses_resident_blocks():
    core = engine(num_blocks=12, max_num_batched_tokens=64)
    todo = [request(f"r{i}", PREFIX[:8] + [i + 2] * 20, max_tokens=40, temperature=1.0, seed=i) for i in range(3)]
    answers = collect(core, todo)
    stats = core.stats()
    assert stats["preemptions"] >= 1 and stats["resumptions"] == stats["preemptions"] and stats["swapped_bytes"] == 0
    for r, answer in zip(todo, answers, strict=True):
        assert [(c.ids, c.finish) for c in answer.choices] == alone("exact", r)
        assert answer.cached_tokens + answer.computed_rows == 28


def test_full_swap_memory_ends_the_last_request_with_an_error_and_no_other():
    core = engine(num_blocks=12, max_num_batched_tokens=64, swap_bytes=10)
    todo = [request(f"r{i}", [i + 2] * 28, max_tokens=40) for i in range(3)]
    answers = collect(core, todo)
    failed = [a for a in answers if a.error]
    assert failed and all(a.error.startswith("overloaded") and "swap_bytes" in a.error for a in failed)
    assert not answers[0].error and answers[0].choices[0].ids == alone("exact", todo[0])[0][0]
    assert core.pool.used == 0


def test_choices_of_one_request_share_the_prompt_and_differ_by_their_noise():
    core = engine(num_blocks=20, max_num_seqs=2)
    r = request("r", PREFIX[:21], temperature=1.0, n=5, seed=3)
    answer = collect(core, [r])[0]
    assert [(c.ids, c.finish) for c in answer.choices] == alone("exact", r)
    assert len({tuple(c.ids) for c in answer.choices}) == 5
    one = collect(core, [request("one", PREFIX[:21], temperature=1.0, seed=3)])[0]
    assert one.choices[0].ids == answer.choices[0].ids


def test_deadlines_end_waiting_and_running_requests():
    now = [100.0]
    core = EngineCore(MODELS["exact"], api.EngineConfig(max_num_seqs=1, max_num_batched_tokens=16), clock=lambda: now[0])
    for name, deadline in (("running", 101.0), ("waiting", 102.0), ("patient", None)):
        core.submit(api.EngineRequest(name, PREFIX[:5], [], api.SamplingParams(max_tokens=8, temperature=0), deadline=deadline))
    core.step()
    now[0] = 103.0
    failed = [e for e in core.step() if isinstance(e, api.Failed)]
    assert {e.request for e in failed} == {"running", "waiting"} and {e.code for e in failed} == {"deadline"}
    rest = []
    while core.has_work():
        rest += core.step()
    assert {e.request for e in rest} == {"patient"}
    check(core)


def test_deadlines_of_requests_that_ended_are_forgotten():
    core = engine()
    for i in range(3000):
        sampling = api.SamplingParams(max_tokens=8, temperature=0)
        core.submit(api.EngineRequest(f"r{i}", PREFIX[:5], [], sampling, deadline=1e12))
        assert core.cancel(f"r{i}")
    assert len(core.ledger._deadlines) <= 1024 + 2 and not core.has_work()


def test_blocks_get_their_identity_only_when_their_last_token_is_committed():
    core = engine(chunk_tokens=(3, 7))
    core.submit(request("r", PREFIX[:29], max_tokens=12, temperature=1.0))
    while core.has_work():
        before = core.ledger.running[0].computed if core.ledger.running else 0
        plan = core.plan()
        assert len(core.pool.resident()) == before // BLOCK
        tokens = []
        for event in core.apply(plan, core.execute(plan)):
            if isinstance(event, api.BlocksFilled):
                tokens += event.blocks
        for digest, block, parent in tokens:
            assert core.pool.match([digest]) == [block] and len(parent) == 16
            core.pool.release([block])
    answer = alone("exact", request("r", PREFIX[:29], max_tokens=12, temperature=1.0))[0][0]
    assert core.pool.resident() == core.ledger.hasher(b"").hashes(PREFIX[:29] + answer)
