"""Runs an engine's steps, the next one planned while one runs: `Pipeline` in a thread of their own, for benchmarks and tests
(services have `headrace.worker.host`, which does the same on an event loop); `OneThread` in the caller's thread, for a device
that works by itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from . import api
from .core import EngineCore


class Pipeline:
    """`waits`: seconds that the model's thread stood still before each step, waiting for this one; none before the first."""

    def __init__(self, engine: api.Engine) -> None:
        self.engine = engine
        self.waits: list[float] = []
        self._running: deque[tuple[Any, Future]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._ended = 0.0

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_) -> None:
        while self._running:
            self.step()
        self._thread.shutdown()

    def step(self) -> list[api.Event] | None:
        """The events of the oldest step under way, once it is over. None when there is none and none can be planned."""
        self._fill()
        if not self._running:
            return None
        plan, future = self._running[0]
        error = future.exception()
        self._running.popleft()
        return self.engine.fail(plan, error) if error else self.engine.apply(plan, future.result())

    def _fill(self) -> None:
        while len(self._running) < self.engine.depth:
            plan = self.engine.plan()
            if plan is None:
                if not self._running:
                    self._ended = 0.0  # idle: the model waits for nobody
                return
            self._running.append((plan, self._thread.submit(self._execute, plan)))

    def _execute(self, plan: Any) -> Any:  # in the model's thread
        if self._ended:
            self.waits.append(time.perf_counter() - self._ended)
        try:
            return self.engine.execute(plan)
        finally:
            self._ended = time.perf_counter()


class OneThread:
    """When a step has been told to the device, the one before it is applied and the next one planned: while the device works,
    and without another thread to wait for. Where nothing works by itself the order is the same, and nothing is saved.

    What breaks then is not the step under way: an applied step takes its own requests along, a plan that cannot be made all.
    Leaving its context, it gives up what is under way."""

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self._next: Any | None = None  # planned, not executed
        self._done: tuple[Any, Any] | None = None  # executed, not applied
        self._events: list[api.Event] | None = None  # of what was applied or failed, not told

    def __enter__(self) -> OneThread:
        return self

    def __exit__(self, *_) -> None:
        self._apply()
        if self._next is not None:
            plan, self._next = self._next, None
            self._fail(plan, RuntimeError("it was given up"))

    def step(self) -> list[api.Event] | None:
        """Execute a step. The events of the one before it; None when nothing can run and nothing is left to tell."""
        if self._next is None:
            self._plan()
        while self._next is not None and self._events is None:
            self._execute()
        if self._events is None:
            self._apply()
        events, self._events = self._events, None
        return events

    def _execute(self) -> None:
        plan, self._next = self._next, None

        def meanwhile(_: Callable[[], bool]) -> Any | None:
            self._apply()
            if self.engine.depth > 1:
                self._plan()
            return self._next

        try:
            result = self.engine.execute(plan, meanwhile)
        except BaseException as error:
            self._apply()
            self._fail(plan, error)
        else:
            self._apply()  # nobody called
            self._done = plan, result

    def _plan(self) -> None:
        try:
            self._next = self.engine.plan()
        except BaseException as error:
            self._fail(None, error)

    def _apply(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            try:
                self._tell(self.engine.apply(*done))
            except BaseException as error:
                self._fail(done[0], error)

    def _fail(self, plan: Any | None, error: BaseException) -> None:
        self._tell(self.engine.fail(plan, error))
        if not isinstance(error, Exception):  # interrupted by the user
            raise error

    def _tell(self, events: list[api.Event]) -> None:
        self._events = [*(self._events or ()), *events]
