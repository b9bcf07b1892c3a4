"""Event loops on simulated time, one per simulated process.

Knows: a process's callbacks and timers run when the world says so, so a process can be stopped (nothing of it runs, all of
it is kept), resumed (everything that came due meanwhile runs then) and killed (nothing of it ever runs again). Does not know
messages, memory or services.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

EPOCH = 1_700_000_000.0  # what `time.time` says when the simulated clock says 0


class _NoSelector:
    """There are no sockets, and waiting is the world's business."""

    @staticmethod
    def select(timeout: float | None) -> list:
        return []


class ProcessLoop(asyncio.BaseEventLoop):
    """`world` has the time, the random numbers and the listeners."""

    def __init__(self, world: Any, process: Any) -> None:
        super().__init__()
        self.world, self.process = world, process
        self._selector = _NoSelector()
        self.set_exception_handler(lambda _, context: world.on_exception(process, context))

    def time(self) -> float:
        return self.world.now

    def next_time(self) -> float:
        """When it has something to do; infinity: never, by itself."""
        if self._ready:
            return self.world.now
        return self._scheduled[0]._when if self._scheduled else float("inf")

    def turn(self) -> None:
        """One turn: what is ready, and the timers that are due."""
        asyncio._set_running_loop(self)
        try:
            self._run_once()
        finally:
            asyncio._set_running_loop(None)

    def run_in_executor(self, executor: Any, func: Callable, *args: Any) -> asyncio.Future:
        """A thread: what it does happens some time later, also when nobody waits any more."""
        future = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(self.world.rng.uniform(0.0002, 0.004), work)
        return future

    async def create_server(self, factory: Callable, host: str, port: int) -> Any:
        return self.world.network.listen(self.process, factory)

    async def create_connection(self, factory: Callable, host: str, port: int) -> tuple[Any, Any]:
        await asyncio.sleep(self.world.rng.uniform(0.0002, 0.002))
        return self.world.network.connect(self.process, factory, port)

    def _process_events(self, events: list) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def discard(self) -> None:
        """After the schedule: end what is suspended, so that nothing of it is heard of again."""
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False
            with contextlib.suppress(Exception, asyncio.CancelledError):  # its finally blocks meet a world that is over
                task.get_coro().close()
        self._ready.clear()
        self._scheduled.clear()
        self.close()
