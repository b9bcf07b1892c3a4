"""The engine's host: steps in another thread, contained errors, sweeps when idle."""

from __future__ import annotations

import asyncio
import threading
import time
from array import array

import pytest

from headrace.engine import api
from headrace.engine.core import EngineCore
from headrace.engine.llm import collect
from headrace.engine.toy import ToyModel
from headrace.kv.hashing import BlockHasher
from headrace.worker.engines import _warm_up
from headrace.worker.host import EngineHost
from headrace.worker.service import WorkerService
from headrace.worker.settings import WorkerSettings
from headrace.worker.sim import SimConfig, SimEngine

SMALL = dict(num_blocks=32, block_bytes=64, state_bytes=64, max_num_seqs=8)


class Recorder:
    def __init__(self, engine, **options) -> None:
        self.engine, self.events, self.ticks = engine, [], 0
        self.host = EngineHost(engine, self.events.extend, self._tick, **options)

    def _tick(self) -> None:
        self.ticks += 1

    def submit(self, name: str, size: int = 5, **sampling) -> None:
        ids = array("I", range(size))
        hashes = BlockHasher(self.engine.info.layout_id, b"").hashes(ids)
        self.engine.submit(api.EngineRequest(name, ids, hashes, api.SamplingParams(**sampling)))
        self.host.wake()

    async def ended(self, *names: str, timeout: float = 30.0) -> None:
        """Wait until each request has its last event."""
        end = time.monotonic() + timeout
        while not set(names) <= {
            e.request for e in self.events if isinstance(e, api.Failed) or (isinstance(e, api.Tokens) and e.finish)
        }:
            assert time.monotonic() < end, self.events
            await asyncio.sleep(0.005)

    async def reached(self, name: str, tokens: int) -> int:
        """Wait for output; -> how often the loop came by meanwhile."""
        turns = 0
        while self.tokens(name) < tokens:
            await asyncio.sleep(0.001)
            turns += 1
        return turns

    def tokens(self, name: str) -> int:
        return sum(len(e.ids) for e in self.events if isinstance(e, api.Tokens) and e.request == name)


@pytest.fixture
async def hosted():
    made = []

    def make(engine, **options) -> Recorder:
        recorder = Recorder(engine, **options)
        recorder.host.start()
        made.append(recorder)
        return recorder

    yield make
    for recorder in made:
        await recorder.host.stop()


async def test_steps_without_time_run_inline(hosted):
    recorder = hosted(SimEngine(SimConfig(**SMALL)))
    recorder.submit("r", max_tokens=40)
    await recorder.ended("r")
    assert recorder.tokens("r") == 40 and recorder.host.steps == 41
    assert threading.active_count() == 1 or not any(t.name.startswith("model") for t in threading.enumerate())


async def test_simulated_time_passes_without_blocking_the_loop(hosted):
    recorder = hosted(SimEngine(SimConfig(**SMALL, decode_step_seconds=0.05)))
    recorder.submit("r", max_tokens=4)
    started = time.monotonic()
    assert await recorder.reached("r", 4) > 10
    assert time.monotonic() - started >= 0.2


class Threaded(SimEngine):
    """Executes as a real engine does: for a while, in the model's thread."""

    def __init__(self, config, poison: str = "") -> None:
        super().__init__(config)
        self.info.kind, self.poison, self.threads = "threaded", poison, set()

    def execute(self, plan) -> None:
        self.threads.add(threading.current_thread().name)
        time.sleep(0.005)
        if any(s.request.request == self.poison for s, _, _ in plan.prefill):
            raise ArithmeticError("a bad row")
        super().execute(plan)


async def test_a_real_engine_executes_in_one_thread_and_is_cancelled_safely(hosted):
    engine = Threaded(SimConfig(**SMALL))
    recorder = hosted(engine)
    recorder.submit("gone", 300, max_tokens=1000)
    recorder.submit("r", 300, max_tokens=20)
    await recorder.reached("gone", 3)
    assert engine.cancel("gone")  # while a step runs
    await recorder.ended("r")
    assert len(engine.threads) == 1 and engine.threads.pop().startswith("model")
    assert recorder.tokens("r") == 20 and recorder.tokens("gone") < 20
    engine.pool.check(engine.owners())
    assert engine.pool.used == 0


async def test_tokens_are_published_while_the_next_step_runs_and_all_else_before_it_is_planned(hosted):
    engine, order = Threaded(SimConfig(**SMALL)), []
    recorder = hosted(engine)
    planned, executed = engine.plan, engine.execute
    engine.plan = lambda: order.append("plan") or planned()
    engine.execute = lambda plan: order.append("execute") or executed(plan)

    def publish(events):
        order.append("tokens" if any(isinstance(e, api.Tokens) for e in events) else "others")
        assert len({isinstance(e, api.Tokens) for e in events}) == 1
        time.sleep(0.001)
        recorder.events.extend(events)

    recorder.host._on_events = publish
    recorder.submit("r", 300, max_tokens=30)
    await recorder.ended("r")
    assert recorder.tokens("r") == 30
    indices = [e.index for e in recorder.events if isinstance(e, api.Tokens)]
    assert indices == sorted(indices)
    inside = [order[i - 1] for i, what in enumerate(order) if what == "tokens"][:-1]
    assert all(what in ("plan", "execute") for what in inside), "the next step was planned before these were published"
    assert all(order[i + 1] == "plan" for i, what in enumerate(order[:-1]) if what == "others")
    assert recorder.host.beside >= 0.001 * (len(inside) - 1) and recorder.host.between > 0


async def test_a_wake_from_an_event_does_not_plan_twice(hosted):
    engine = Threaded(SimConfig(**SMALL))
    recorder = hosted(engine)

    def publish(events):
        recorder.events.extend(events)
        recorder.host.wake()

    recorder.host._on_events = publish
    recorder.submit("a", 300, max_tokens=20)
    recorder.submit("b", 300, max_tokens=20)
    await recorder.ended("a", "b")
    assert recorder.tokens("a") == recorder.tokens("b") == 20
    assert not any(isinstance(e, api.Failed) for e in recorder.events)


class SlowToy(ToyModel):
    """Steps long enough that the next one can be planned meanwhile. Token 13 breaks them."""

    def __init__(self, seconds: float) -> None:
        super().__init__("exact", block_tokens=8)
        self.seconds = seconds

    def forward(self, segments, kv, states):
        time.sleep(self.seconds)
        if any(13 in segment.ids[:2] and segment.start == 0 for segment in segments):
            raise ArithmeticError("a bad row")
        return super().forward(segments, kv, states)


@pytest.mark.parametrize("seconds", [0.001, 0.006], ids=["at once", "by a timer"])
async def test_a_step_is_planned_while_another_runs_and_says_what_it_would_say_after_it(hosted, seconds):
    engine = EngineCore(SlowToy(seconds), api.EngineConfig(num_blocks=64, max_num_seqs=4))
    ahead, planned = [], engine.plan

    def plan():
        out = planned()
        ahead.append(out is not None and out.after is not None)
        return out

    engine.plan = plan
    recorder = hosted(engine)
    sampling = [dict(max_tokens=20 + i, seed=i, stop_token_ids=range(2, 90, 17)) for i in range(4)]
    for i, params in enumerate(sampling):
        recorder.submit(f"r{i}", 9 + i, **params)
    await recorder.reached("r0", 2)
    recorder.submit("broken", 3)
    assert engine.cancel("broken")
    await recorder.ended(*(f"r{i}" for i in range(4)), timeout=20.0)
    assert sum(ahead) >= 4, "most steps are planned ahead"
    todo = [api.EngineRequest(f"r{i}", range(9 + i), [], api.SamplingParams(**p)) for i, p in enumerate(sampling)]
    for answer in collect(EngineCore(SlowToy(0.0)), todo):
        said = [e for e in recorder.events if isinstance(e, api.Tokens) and e.request == answer.request]
        assert [i for e in said for i in e.ids] == answer.choices[0].ids and said[-1].finish == answer.choices[0].finish
    await recorder.host.stop()
    await asyncio.sleep(0)  # what was under way is applied
    engine.pool.check(engine.owners())
    assert engine.pool.used == 0


async def test_what_was_planned_behind_a_failing_step_goes_on_without_its_requests(hosted):
    engine = EngineCore(SlowToy(0.003), api.EngineConfig(num_blocks=64, max_num_seqs=4))
    recorder = hosted(engine)
    engine.submit(api.EngineRequest("bad", [13] * 9, [], api.SamplingParams(max_tokens=5)))
    recorder.host.wake()
    await asyncio.sleep(0)  # planned, and the step behind it
    recorder.submit("good", max_tokens=5)
    await recorder.ended("bad", "good")
    assert [e.request for e in recorder.events if isinstance(e, api.Failed)] == ["bad"]
    assert recorder.tokens("good") == 5 and engine.pool.used == 0


async def test_a_failing_step_ends_its_requests_and_nothing_else(hosted):
    engine = Threaded(SimConfig(**SMALL), poison="bad")
    recorder = hosted(engine)
    recorder.submit("good", max_tokens=200)
    await recorder.reached("good", 3)
    recorder.submit("bad", 200)
    await recorder.ended("bad", "good")
    failed = [e for e in recorder.events if isinstance(e, api.Failed)]
    # `good` decoded in the same step as `bad` began: one batch, one fate. Whoever comes later is served.
    assert {e.request for e in failed} == {"bad", "good"} and "a bad row" in failed[0].message
    recorder.submit("later", max_tokens=5)
    await recorder.ended("later")
    assert recorder.tokens("later") == 5
    engine.pool.check(engine.owners())


async def test_chunks_that_take_longer_and_longer_are_no_stall(hosted):
    """As those of a very long prompt do; one that never ends is."""
    service = WorkerService(WorkerSettings(engine="sim", stall_seconds=0.9))
    # Each with half a second to spare: a busy machine adds some of that.
    engine, seconds, go = Threaded(SimConfig(**SMALL, max_num_batched_tokens=128)), [0.4, 1.0, 1.6, 1.6], threading.Event()
    chunk = engine.execute
    engine.execute = lambda plan: (time.sleep(seconds.pop(0)) if seconds else go.wait(20.0), chunk(plan))
    recorder = hosted(engine)
    service.engine, service.host, service.state = engine, recorder.host, "ready"
    recorder.submit("long", 128 * 6, max_tokens=1)
    while recorder.host.steps < 4:
        service._watch_progress()
        assert service.state == "ready", recorder.host.steps
        await asyncio.sleep(0.01)
    assert recorder.host.longest >= 1.6
    end = time.monotonic() + 20.0
    while service.state == "ready" and time.monotonic() < end:
        service._watch_progress()
        await asyncio.sleep(0.01)
    assert service.state == "stalled" and not go.is_set()
    go.set()
    await recorder.ended("long")
    service._watch_progress()
    assert service.state == "ready"


class ByTheRow(ToyModel):
    """Each row takes `seconds`; `stuck` holds a step for good."""

    seconds, stuck = 0.004, None

    def forward(self, segments, kv, states):
        if self.stuck is not None:
            self.stuck.wait(20.0)
        time.sleep(self.seconds * sum(len(segment.ids) for segment in segments))
        return super().forward(segments, kv, states)


async def test_a_first_chunk_is_no_stall_for_as_long_as_its_rows_need_at_the_speed_of_the_warm_up(hosted):
    """It is many times as long as anything that was measured."""
    model = ByTheRow("exact", block_tokens=8)
    engine = EngineCore(model, api.EngineConfig(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=128))
    _warm_up(engine)
    service = WorkerService(WorkerSettings(engine="sim", stall_seconds=0.2))
    recorder = hosted(engine)
    service.engine, service.host, service.state = engine, recorder.host, "ready"
    began = time.monotonic()
    recorder.submit("long", 96, max_tokens=1)
    while not recorder.host.steps:
        service._watch_progress()
        assert service.state == "ready"
        await asyncio.sleep(0.01)
    assert time.monotonic() - began > 0.2
    await recorder.ended("long")
    model.stuck = threading.Event()
    recorder.submit("stuck", 4, max_tokens=1)
    end = time.monotonic() + 20.0
    while service.state == "ready" and time.monotonic() < end:
        service._watch_progress()
        await asyncio.sleep(0.01)
    assert service.state == "stalled" and not model.stuck.is_set()
    model.stuck.set()
    await recorder.ended("stuck")


async def test_a_failing_plan_or_owner_does_not_stop_the_host(hosted):
    engine = SimEngine(SimConfig(**SMALL))
    recorder = hosted(engine)
    planned, engine.plan = engine.plan, lambda: 1 / 0
    recorder.submit("r")
    await recorder.ended("r")
    engine.plan = planned
    recorder.host._on_events = lambda events: 1 / 0
    recorder.submit("unseen", max_tokens=3)
    for _ in range(4000):
        if not engine.has_work():
            break
        await asyncio.sleep(0.005)
    assert not engine.has_work()
    recorder.host._on_events = recorder.events.extend
    recorder.submit("seen", max_tokens=3)
    await recorder.ended("seen")


async def test_the_sweep_runs_without_work_and_finds_memory_that_came_back(hosted):
    engine = SimEngine(SimConfig(**SMALL))
    recorder = hosted(engine, tick=0.01)
    taken = engine.pool.allocate(32)
    recorder.submit("r", 300, max_tokens=2)  # no memory: nothing can be planned
    await asyncio.sleep(0.05)
    assert recorder.ticks >= 2 and not recorder.events
    engine.pool.release(taken)  # nobody wakes the host
    await recorder.ended("r")
    before = recorder.ticks
    await asyncio.sleep(0.05)
    assert recorder.ticks > before


@pytest.mark.parametrize("kind", [SimEngine, Threaded])
async def test_a_prompt_has_begun_when_it_has_memory_and_that_is_told_before_its_step_ends(hosted, kind):
    engine, told = kind(SimConfig(**SMALL)), []
    begun = engine.begun
    recorder = hosted(engine, on_begin=lambda: told.append((begun("first"), begun("second"), len(recorder.events))))
    taken = engine.pool.allocate(29)
    recorder.submit("first", 300, max_tokens=2)  # three blocks: all that is left
    recorder.submit("second", 300, max_tokens=2)
    assert not engine.begun("first") and not engine.begun("nobody")
    await recorder.ended("first")
    assert told[0] == (True, False, 0)
    assert not engine.begun("first")
    await recorder.ended("second")
    assert any(second for _, second, _ in told)
    engine.pool.release(taken)
