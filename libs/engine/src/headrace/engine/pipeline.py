"""Runs an engine's steps in a thread of their own, the next one planned while one runs. For benchmarks and tests: services have
`headrace.worker.host`, which does the same on an event loop.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from . import api


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
            self.step(more=False)
        self._thread.shutdown()

    @property
    def running(self) -> int:
        """Steps under way."""
        return len(self._running)

    def step(self, more: bool = True) -> list[api.Event] | None:
        """The events of the oldest step under way, once it is over. None when there is none and none can be planned, or is to
        be: without `more` none is begun."""
        if more:
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
