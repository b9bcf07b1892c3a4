"""Runs an engine on the owner's event loop: plan on the loop, execute elsewhere, apply on the loop.

Knows when to step and where. A real engine executes in one dedicated thread; the simulated one says how long its step takes
(`plan.seconds`), so it is executed inline after that long on a timer: no thread, no hand-over, which matters where a
request may cost less than a millisecond of CPU in all processes together.

While a step runs in the thread, the tokens of the one before it are published: they are all that can wait. What the owner must
see before memory changes hands again (filled blocks, computed prompts, failures) is delivered before the next step is planned.

Where the engine can (`depth` 2), that next step is planned and handed to the thread while one runs, shortly before that one
ends: early enough that the model does not wait for it, and as late as that, so that who arrives meanwhile is in it.

An error in a step ends the requests of that step and nothing else. The sweep runs on every tick whether or not anything is
scheduled (a sweep that only runs with new work never frees what keeps new work out). `steps` only grows: liveness is that
number.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import structlog

from headrace.engine import api

log = structlog.get_logger()

AHEAD = 0.0025  # seconds before a step's expected end that the next one is planned; a timer may be a millisecond late
FADES = 0.98  # of `longest`, each step: short prompts run between the chunks of a long one
BURST = 0.0002  # seconds: steps that take no time run back to back for this long before the loop gets its turn


class EngineHost:
    """`on_events(events)` after each step, `on_tick()` every `tick` seconds, `on_begin()` when a step has begun (the prompts
    that are new in it have their memory); all on the loop, none must block."""

    def __init__(
        self,
        engine: api.Engine,
        on_events: Callable[[list[api.Event]], None],
        on_tick: Callable[[], None] = lambda: None,
        tick: float = 0.02,
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.steps = 0
        self.lag = self.worst_lag = 0.0  # seconds that a tick came too late: the loop was busy
        # Seconds of host work in all: between two steps, where the model waits for it, and beside one, where it does not.
        self.between = self.beside = 0.0
        self._longest = 0.0  # seconds of the longest step lately
        self._executed_at = 0.0
        self._held: list[api.Event] = []  # tokens of the last step, until the next one runs
        self._on_events, self._on_tick, self._tick, self._due = on_events, on_tick, tick, 0.0
        self._on_begin = on_begin
        self._threaded = engine.info.kind != "sim"
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="model") if self._threaded else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False  # a call of _step is queued
        self._under_way: deque[Any] = deque()  # plans that are neither applied nor failed; the first one runs
        self._ahead: asyncio.TimerHandle | None = None  # plans the step after the one that runs
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = True

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = False
        self._due = self._loop.time() + self._tick
        self._timer = self._loop.call_later(self._tick, self._ticked)

    async def stop(self) -> None:
        """No further step begins; one that runs is waited for (a model step ends by itself)."""
        self._stopped = True
        for timer in (self._timer, self._ahead):
            if timer is not None:
                timer.cancel()
        if self._pool is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._pool.shutdown)

    def wake(self) -> None:
        """There may be work: call after submit, admit, cancel and whatever frees memory."""
        if not (self._scheduled or self._under_way or self._stopped):
            self._scheduled = True
            self._loop.call_soon(self._step)

    @property
    def longest(self) -> float:
        """Seconds of the longest step lately, or of one under way as the engine expects it: the first chunk of a worker's life
        may be far longer than all that it was warmed up with, and by their rows it is known how long."""
        return max(self._longest, *(plan.seconds for plan in self._under_way), 0.0)

    # ------------------------------------------------------------ the step

    def _step(self) -> None:
        self._scheduled = False
        began = time.monotonic()
        while not (self._stopped or self._under_way):
            plan = self._plan()
            if plan is None:
                return
            self._under_way.append(plan)
            if self._threaded:
                self._submit(plan)
                return self._look_ahead(plan)
            self._on_begin()
            seconds, plan.seconds = plan.seconds, 0.0
            self._takes(seconds)
            if seconds > 0:
                self._loop.call_later(seconds, self._timed, plan)
                return
            self._inline(plan)
            if not self.engine.has_work():
                return
            if time.monotonic() - began > BURST:
                return self.wake()

    def _plan(self) -> Any | None:
        plan = None
        try:
            plan = self.engine.plan()
        except Exception as error:  # a bug of the scheduler: nothing of this step can be trusted
            self._fail(None, error)
        return plan  # None: idle, or waiting for memory that a peer holds; the tick looks again

    def _takes(self, seconds: float) -> None:
        self._longest = max(seconds, self._longest * FADES)

    def _submit(self, plan: Any) -> None:
        self._pool.submit(self._execute, plan).add_done_callback(lambda f: self._executed(plan, f))
        self._on_begin()

    def _look_ahead(self, running: Any) -> None:
        """Plan the step behind `running`, which has just begun, when that nears its end."""
        if self.engine.depth > 1:
            wait = running.seconds - AHEAD
            if wait > 0.001:
                self._ahead = self._loop.call_later(wait, self._plan_ahead)
            else:
                self._plan_ahead()

    def _plan_ahead(self) -> None:
        if self._stopped or len(self._under_way) != 1:
            return
        plan = self._plan()
        if plan is not None:
            self._under_way.append(plan)
            self._submit(plan)

    def _timed(self, plan: Any) -> None:
        self._inline(plan)
        if self.engine.has_work():
            self.wake()

    def _inline(self, plan: Any) -> None:
        try:
            result = self.engine.execute(plan)
        except Exception as error:
            self._finish(plan, None, error)
        else:
            self._finish(plan, result, None)

    def _execute(self, plan: Any) -> Any:  # in the model thread
        began = time.perf_counter()
        if self._executed_at:
            self.between += began - self._executed_at
        try:
            return self.engine.execute(plan)
        finally:
            self._executed_at = time.perf_counter()
            self._takes(self._executed_at - began)

    def _executed(self, plan: Any, future: Future) -> None:  # in the model thread
        error = future.exception()
        result = None if error is not None else future.result()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._joined, plan, result, error)

    def _joined(self, plan: Any, result: Any, error: BaseException | None) -> None:
        """The step's result is here: apply it, see to the next one, then publish what this one said."""
        if self._ahead is not None:
            self._ahead.cancel()
        events = self._apply(plan, result, error)
        if any(type(event) is api.Failed for event in events):  # rare: in the order in which it happened
            self._deliver(events)
        else:
            self._deliver([event for event in events if type(event) is not api.Tokens])
            self._held = [event for event in events if type(event) is api.Tokens]
        if self._under_way:
            self._look_ahead(self._under_way[0])
        elif self.engine.has_work():
            self._step()
        if not self._under_way:
            self._executed_at = 0.0  # idle: the model does not wait for the host
        began = time.perf_counter()
        self._deliver([])
        self.beside += (time.perf_counter() - began) * bool(self._under_way)

    def _finish(self, plan: Any, result: Any, error: BaseException | None) -> None:
        self._deliver(self._apply(plan, result, error))

    def _apply(self, plan: Any, result: Any, error: BaseException | None) -> list[api.Event]:
        self._under_way.popleft()
        self.steps += 1
        if error is None:
            try:
                return self.engine.apply(plan, result)
            except Exception as failure:
                error = failure
        return self._failed(plan, error)

    def _deliver(self, events: list[api.Event]) -> None:
        events, self._held = [*self._held, *events], []
        if events:
            try:
                self._on_events(events)
            except Exception:  # the owner's bug must not stop the other requests' steps
                log.exception("step events failed", events=len(events))

    def _fail(self, plan: Any, error: BaseException) -> None:
        self._deliver(self._failed(plan, error))

    def _failed(self, plan: Any, error: BaseException) -> list[api.Event]:
        log.error("engine step failed", error=repr(error), exc_info=error)
        return self.engine.fail(plan, error)

    def _ticked(self) -> None:
        if self._stopped:
            return
        now = self._loop.time()
        self.lag = max(0.0, now - self._due)
        self.worst_lag = max(self.worst_lag, self.lag)
        self._due = now + self._tick
        self._timer = self._loop.call_later(self._tick, self._ticked)
        try:
            self._on_tick()
        except Exception:
            log.exception("tick failed")
        if self.engine.has_work():
            self.wake()
