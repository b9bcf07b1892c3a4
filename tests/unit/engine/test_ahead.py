"""Steps that are planned while the one before them runs: the same answers, whatever ends, breaks or leaves meanwhile."""

from __future__ import annotations

import json
import random
import time
from collections import Counter, deque

import pytest

from headrace.engine import api
from headrace.engine.core import EngineCore
from headrace.engine.llm import Answer, Choice, _note, collect
from headrace.engine.loader import load_model
from headrace.engine.make_checkpoint import make_checkpoint
from headrace.engine.pipeline import OneThread, Pipeline
from headrace.engine.toy import ToyModel

from .grammars import SCHEMAS, small_grammars

BLOCK = 8
CONTROL: dict[str, int] = {}
PREFIX = random.Random(7).choices(range(2, 250), k=80)
NAMES = ["closed", "enum", "integer range", "any of", "pattern"]
TIGHT = {"num_blocks": 12, "max_num_seqs": 6, "max_num_batched_tokens": 48, "chunk_tokens": (15, 1, 7)}


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    return small_grammars(tmp_path_factory.mktemp("tokenizer"), CONTROL)


def engine(grammars, model=ToyModel, **config) -> EngineCore:
    sizes = {"num_blocks": 96, "max_num_seqs": 6, "max_num_batched_tokens": 48} | config
    toy = model("exact", block_tokens=BLOCK, vocab_size=grammars.vocab_size, draft_block=4)
    return EngineCore(toy, api.EngineConfig(**sizes), grammars=grammars)


def requests(chance: random.Random) -> list[api.EngineRequest]:
    out = []
    for i in range(chance.randint(2, 8)):
        grammar = chance.choice([None, None, *NAMES])
        sampling = api.SamplingParams(
            temperature=chance.choice([0.0, 1.0]),
            seed=chance.randint(0, 3),
            max_tokens=chance.randint(1, 30),
            min_tokens=chance.choice([0, 0, 1]),
            n=chance.choice([1, 1, 1, 3]),
            stop_token_ids=chance.choice([(), tuple(range(0, 250, 9))]),
            presence_penalty=chance.choice([0.0, 1.5]),
            repetition_penalty=chance.choice([1.0, 1.3]),
            logprobs=chance.choice([-1, 2]),
            prompt_logprobs=chance.choice([-1, -1, 0]),
            grammar=grammar and api.Grammar("json_schema", json.dumps(SCHEMAS[grammar])),
        )
        ids = PREFIX[: chance.randint(0, 40)] + chance.choices(range(2, 250), k=chance.randint(1, 12))
        out.append(api.EngineRequest(f"r{i}", ids, [], sampling, priority=chance.randint(0, 2)))
    return out


def check(core: EngineCore) -> None:
    core.pool.check(core.owners())
    slots = [s.slot for s in core.ledger.running]
    assert sorted(slots + core.ledger.free_slots) == list(range(core.config.max_num_seqs))


def run_in_any_order(core: EngineCore, todo: list[api.EngineRequest], chance: random.Random):
    """Plan, execute, apply, submit and cancel in any order that the contract allows: (answers, who was cancelled, steps that
    were planned ahead)."""
    answers = {r.request: Answer(r.request, list(r.ids), [Choice() for _ in range(r.sampling.n)]) for r in todo}
    waiting, cancelled, flight, ahead, blocked = list(todo), set(), deque(), 0, False
    for _ in range(20_000):
        moves = ["submit"] * bool(waiting) + ["plan"] * (len(flight) < core.depth and not blocked)
        moves += ["execute"] * any(result is None for _, result in flight)
        moves += ["apply"] * bool(flight and flight[0][1]) + ["cancel"] * (chance.random() < 0.02)
        if not moves:
            if not core.has_work():
                break
            assert not blocked, "nothing is under way, and nothing can be planned"
        match chance.choice(moves) if moves else "plan":
            case "submit":
                core.submit(waiting.pop(0))
                blocked = False
            case "plan":
                plan = core.plan()
                ahead += bool(flight and plan)
                blocked = plan is None
                flight.extend([[plan, None]] if plan else [])
            case "execute":
                step = next(step for step in flight if step[1] is None)
                step[1] = core.execute(step[0])
            case "apply":
                for event in core.apply(*flight.popleft()):
                    assert event.request not in cancelled and not isinstance(event, api.Failed), event
                    if isinstance(event, api.Tokens):
                        choice = answers[event.request].choices[event.choice]
                        assert not choice.finish and event.index == len(choice.ids)
                    _note(answers[event.request], event)
                blocked = False
            case "cancel" if alive := [r.request for r in todo if r not in waiting and r.request in core.ledger.live]:
                cancelled.add(chance.choice(alive))
                assert core.cancel(max(cancelled, key=lambda name: name in core.ledger.live))
                blocked = False
        check(core)
    else:
        pytest.fail("no end in sight")
    assert core.pool.used == 0 and not core.ledger.live and not core.owners() and not waiting
    return list(answers.values()), cancelled, ahead


def same(got: Answer, wanted: Answer) -> None:
    assert got.choices == wanted.choices and got.prompt_logprobs == wanted.prompt_logprobs
    assert got.cached_tokens + got.computed_rows == len(got.prompt_ids)


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
def test_answers_are_those_of_steps_that_wait_for_each_other(grammars, tight, drafts):
    chance, seen = random.Random(11 + 2 * tight + drafts), Counter()
    for _ in range(25):
        seen += compare(grammars, tight, drafts, chance)
    assert (seen["preemptions"] > 0) == tight and seen["ahead"] > 150 and seen["stop"] > 20 and seen["cancelled"] > 2
    assert (seen["accepted"] > 50) == drafts


def compare(grammars, tight: bool, drafts: bool, chance: random.Random) -> Counter:
    """Random requests, once in any order and once with steps that wait. Returns what came to pass."""
    todo = requests(chance)
    speculation = {"speculative": "dspark", "draft_budget": chance.choice([1, 6, 100])} if drafts else {}
    core = engine(grammars, **(TIGHT if tight else {}), **speculation)
    got, cancelled, ahead = run_in_any_order(core, todo, chance)
    waiting = engine(grammars, async_scheduling=False)
    wanted = collect(waiting, todo)
    for mine, theirs in zip(got, wanted, strict=True):
        if mine.request not in cancelled:
            same(mine, theirs)
    if not (tight or cancelled):
        assert set(core.pool.resident()) == set(waiting.pool.resident()), "what overran left no block behind"
        counts = [
            {name: c.ledger.counters[name] for name in ("generated_tokens", "finished", "prompt_tokens", "failed")}
            for c in (core, waiting)
        ]
        assert counts[0] == counts[1]
    ends = Counter(choice.finish for answer in got for choice in answer.choices)
    counts = Counter(ahead=ahead, cancelled=len(cancelled), preemptions=core.ledger.counters["preemptions"])
    if core.speculator:
        counts["accepted"] = sum(core.speculator.counts["accepted"])
    return ends + counts


def plain(name: str, ids, **sampling) -> api.EngineRequest:
    return api.EngineRequest(name, ids, [], api.SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | sampling))


def test_most_steps_of_a_busy_engine_are_planned_ahead(grammars):
    """... and none is in vain, for `max_tokens` is foreseen: two for the prompts, 23 for the longest output's other tokens."""
    todo = [plain(f"r{i}", PREFIX[i : i + 20], max_tokens=20 + i) for i in range(4)]
    core, steps, ahead = engine(grammars), 0, 0
    for r in todo:
        core.submit(r)
    flight = deque([core.plan()])
    while flight:
        result = core.execute(flight[0])
        plan = core.plan() if not steps % 7 else None  # now and then before the result is known
        core.apply(flight.popleft(), result)
        steps += 1
        ahead += plan is not None
        flight.extend(p for p in [plan or core.plan()] if p)
    assert steps == 25 and ahead >= 3


def test_what_ended_in_the_step_before_is_not_run(grammars):
    core = engine(grammars)
    said = collect(engine(grammars), [plain("r", PREFIX[:20], max_tokens=3)])[0].choices[0].ids
    stop = said[2]
    assert stop not in said[:2]
    core.submit(plain("r", PREFIX[:20], max_tokens=30, stop_token_ids=[stop]))
    core.submit(plain("other", PREFIX[30:40], max_tokens=30))
    events, plans, rows = [], deque([core.plan()]), []
    for _ in range(6):
        plans.append(core.plan())
        rows.append([row.sequence.name for row in plans[0].rows])
        result = core.execute(plans[0])
        assert len(result.tokens) == len(plans[0].samples)
        events += core.apply(plans.popleft(), result)
    assert rows[4] == ["r", "other"] and rows[5] == ["other"], "planned before the stop was known, and after"
    said = [e for e in events if isinstance(e, api.Tokens) and e.request == "r"]
    assert [e.finish for e in said] == ["", "", "stop"] and core.stats()["free_slots"] == 5
    assert core.runner.states.next[core.ledger.running[0].slot] == 10 + 4
    assert sorted(core.runner.states.next)[-1] == 20 + 2, "its row behind the stop never ran"


class Breaking(ToyModel):
    """Raises when a segment holds token 13."""

    def forward(self, segments, kv, states):
        if any(13 in segment.ids for segment in segments):
            raise RuntimeError("unlucky")
        return super().forward(segments, kv, states)


def test_a_step_that_breaks_takes_its_requests_along_and_none_of_the_next_step(grammars):
    core = engine(grammars, Breaking, max_num_batched_tokens=8)
    clean = [i for i in PREFIX if i != 13]
    for r in (plain("bad", [*clean[:7], 13, 14]), plain("next", clean[:9])):
        core.submit(r)
    first, second = core.plan(), core.plan()
    assert {s.name for s in second.members} == {"bad", "next"} and {s.name for s in first.members} == {"bad"}
    with pytest.raises(RuntimeError, match="unlucky") as error:
        core.execute(first)
    result = core.execute(second)
    assert {e.request for e in core.fail(first, error.value)} == {"bad"}
    check(core)
    events = core.apply(second, result)
    assert not any(isinstance(e, api.Failed) for e in events)
    while core.has_work():
        events += core.step()
    alone = collect(engine(grammars, Breaking), [plain("next", clean[:9])])[0]
    assert [i for e in events if isinstance(e, api.Tokens) for i in e.ids] == alone.choices[0].ids
    assert core.pool.used == 0
    check(core)


def test_a_state_that_cannot_be_restored_takes_back_what_was_planned_behind_it(grammars):
    core = engine(grammars)
    wanted = collect(core, [plain("a", PREFIX[:50], max_tokens=9)])[0]
    key = core.ledger.hasher(b"").hashes(PREFIX[:50])[5]
    good = core.ledger.snapshots.get(key)
    core.ledger.snapshots.discard(key)
    record = bytearray(core.ledger.hasher and good.state)
    record[-1] ^= 1
    core.ledger.snapshots.add(key, _record(good.position, good.decoder_floor, bytes(record)))
    core.submit(plain("b", PREFIX[:50], max_tokens=9))
    answer, flight = Answer("b", [], [Choice()]), deque([core.plan()])
    assert flight[0].restore[0].snapshot
    while flight:
        flight.extend(p for p in [core.plan()] if p and len(flight) < 2)
        for event in core.apply(flight[0], core.execute(flight.popleft())) if len(flight) > 0 else ():
            _note(answer, event)
        if not flight and core.has_work():
            flight.append(core.plan())
        check(core)
    assert answer.choices == wanted.choices and core.ledger.counters["snapshots_rejected"] == 1


def _record(position: int, floor: int, state: bytes) -> bytes:
    from headrace.engine.snapshots import encode

    return encode(position, floor, state)


STEPPERS = {"a thread of its own": Pipeline, "one thread": OneThread}
either = pytest.mark.parametrize("steppers", STEPPERS.values(), ids=STEPPERS)


class Slow(ToyModel):
    """Gives the other thread time in the middle of a step."""

    def forward(self, segments, kv, states):
        time.sleep(0.0003)
        out = super().forward(segments, kv, states)
        time.sleep(0.0003)
        return out


@either
@pytest.mark.parametrize("speculation", [{}, {"speculative": "dspark", "draft_budget": 9}], ids=["plain", "drafts"])
def test_the_owner_submits_and_cancels_while_steps_run(grammars, speculation, steppers):
    """And reads what they say."""
    todo = []
    for i in range(24):
        grammar = api.Grammar("json_schema", json.dumps(SCHEMAS["closed"])) if i % 5 == 0 else None
        stops = tuple(range(0, 250, 9)) if i % 2 else ()
        sampling = api.SamplingParams(
            seed=i, max_tokens=5 + i, stop_token_ids=stops, grammar=grammar, repetition_penalty=1.2, logprobs=1, n=1 + (i == 7)
        )
        todo.append(api.EngineRequest(f"r{i}", PREFIX[i : 2 * i + 3], [], sampling))
    wanted = collect(engine(grammars, async_scheduling=False), todo)
    core, waiting = engine(grammars, Slow, **TIGHT, **speculation), list(todo)
    answers = {r.request: Answer(r.request, list(r.ids), [Choice() for _ in range(r.sampling.n)]) for r in todo}
    with steppers(core) as pipeline:
        while waiting or core.has_work():
            if waiting:
                core.submit(waiting.pop(0))
            if len(waiting) == 12:
                assert core.cancel("r11")
            for event in pipeline.step() or ():
                _note(answers[event.request], event)
            check(core)
    for mine, theirs in zip(answers.values(), wanted, strict=True):
        assert not mine.error
        if mine.request != "r11":
            same(mine, theirs)


@pytest.mark.parametrize("planned", [False, True], ids=["later", "in the next step"])
@pytest.mark.parametrize("break_in", [1, 3, 6])
def test_in_one_thread_a_step_that_breaks_takes_its_requests_along_and_the_others_go_on(grammars, break_in, planned):
    """Also those that came while it ran, beside its own in the next step or later, and whatever the step before it has to tell
    is told."""
    core = engine(grammars, async_scheduling=True)
    steps, execute, calls = OneThread(core), core.runner.execute, []
    todo = [_plain(f"r{i}", 6 + i) for i in range(3)]
    wanted = {answer.request: answer for answer in collect(engine(grammars), todo)}

    def breaks(plan, gone, following):
        calls.append(plan)
        if len(calls) != break_in:
            return execute(plan, gone, following)
        if planned:
            core.submit(todo[2])
        execute(plan, gone, following)  # the next step is planned by then
        if not planned:
            core.submit(todo[2])
        raise RuntimeError("the device is gone")

    core.runner.execute = breaks
    for request in todo[:2]:
        core.submit(request)
    answers = {r.request: Answer(r.request, list(r.ids), [Choice()]) for r in todo}
    while core.has_work():
        for event in steps.step():
            _note(answers[event.request], event)
        check(core)
    for name, told in (("r0", break_in - 1), ("r1", max(0, break_in - 2))):  # the second prompt takes two steps
        assert "the device is gone" in answers[name].error
        assert answers[name].choices[0].ids == wanted[name].choices[0].ids[:told]
    same(answers["r2"], wanted["r2"])
    assert steps.step() is None and core.pool.used == 0


@pytest.mark.parametrize("part", ["apply", "plan"])
def test_in_one_thread_what_breaks_beside_a_step_is_not_that_steps_fault(grammars, part):
    """What cannot be applied takes its own requests along, a plan that cannot be made all; those that come go on."""
    core = engine(grammars)
    todo, broken, told = [_plain("first", 3), _plain("r", 9), _plain("later", 4)], [], []
    wanted = {answer.request: answer for answer in collect(engine(grammars), todo)}
    owner, name = (core.postprocessor, "commit") if part == "apply" else (core.scheduler, "_queue")
    inner = getattr(owner, name)

    def breaks(*args):
        running = core.ledger.running
        if not broken and len(running) == 2 and len(running[0].ids) == running[0].max_len - 1:  # "first" is only in this one
            broken.append(1)
            if part == "plan":  # when it has begun with somebody new
                core.submit(todo[2])
                inner(*args)
            raise RuntimeError("a fault")
        return inner(*args)

    setattr(owner, name, breaks)
    with OneThread(core) as steps:
        step = steps.step
        collect(core, todo[:2], step=lambda: told.append(step()) or told[-1])
        failed = {e.request: e.message for events in told for e in events if isinstance(e, api.Failed)}
        assert set(failed) == {request.request for request in todo[: 2 + (part == "plan")]}
        assert all("a fault" in message for message in failed.values())
        check(core)
        same(collect(core, todo[2:], step=steps.step)[0], wanted["later"])
    assert core.pool.used == 0


def test_one_thread_gives_up_what_is_under_way(grammars):
    core = engine(grammars)
    with pytest.raises(KeyError), OneThread(core) as steps:
        for request in (_plain("a", 9), _plain("b", 7)):
            core.submit(request)
        steps.step()
        assert len(core._plans) == 2
        raise KeyError
    for name in ("a", "b"):
        core.cancel(name)
    check(core)
    same(*(collect(c, [_plain("c", 5)])[0] for c in (core, engine(grammars))))
    assert core.pool.used == 0


def _plain(name: str, tokens: int) -> api.EngineRequest:
    return api.EngineRequest(name, PREFIX[: len(name) + tokens], [], api.SamplingParams(max_tokens=tokens, ignore_eos=True))


@either
@pytest.mark.parametrize("numerics", ["exact", "bounded"])
def test_real_arithmetic_gives_the_same_bits(tmp_path, numerics, steppers):
    """DeepSeek-V4.1, batch invariant: steps planned ahead, in other batches than those of steps that wait."""
    model = load_model(make_checkpoint("w16", 3, tmp_path / "model"), numerics=numerics, batch_invariant=True)
    chance, todo = random.Random(2), []
    for i in range(7):
        ids = chance.choices(range(3, model.vocab_size), k=chance.randint(1, 150))
        stops = tuple(chance.sample(range(3, model.vocab_size), 12))
        sampling = api.SamplingParams(
            seed=i,
            max_tokens=chance.randint(1, 14),
            stop_token_ids=stops,
            logprobs=2,
            n=1 + (i == 3),
            presence_penalty=0.5 * (i % 2),
        )
        todo.append(api.EngineRequest(f"r{i}", ids, [], sampling))
    sizes = {"num_blocks": 24, "max_num_seqs": 5, "max_num_batched_tokens": 5 + 160, "prefix_caching": False}
    wanted = collect(EngineCore(model, api.EngineConfig(**sizes, async_scheduling=False)), todo)
    core, waiting = EngineCore(model, api.EngineConfig(**sizes)), list(todo)
    answers = {r.request: Answer(r.request, list(r.ids), [Choice() for _ in range(r.sampling.n)]) for r in todo}
    with steppers(core) as pipeline:
        while waiting or core.has_work():
            if waiting:
                core.submit(waiting.pop(0))
            for event in pipeline.step() or ():
                _note(answers[event.request], event)
    for mine, theirs in zip(answers.values(), wanted, strict=True):
        assert not mine.error and not theirs.error
        same(mine, theirs)
