"""Event loops on simulated time, one per simulated process.

Knows: a process's callbacks and timers run when the world says so, so a process can be stopped (nothing of it runs, all of
it is kept), resumed (everything that came due meanwhile runs then) and killed (nothing of it ever runs again). Does not know
messages, memory or services.

asyncio's tasks, futures and timeouts run on these loops as on any other. They are written anew, not derived from
`asyncio.BaseEventLoop`, because half of a schedule's time went into that: here all timers of a world are in one heap, which
has the order of everything, and a callback is one object with one call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

EPOCH = 1_700_000_000.0  # what `time.time` says when the simulated clock says 0
SPINS = 2000  # turns at one moment: somebody waits for something without letting time pass


class Handle:
    """A callback that will be called once, soon or at its time; as asyncio's `Handle` and `TimerHandle`."""

    __slots__ = ("args", "at", "call")

    def __init__(self, call: Callable, args: tuple, at: float = 0.0) -> None:
        self.call: Callable | None = call
        self.args, self.at = args, at

    def cancel(self) -> None:
        self.call, self.args = None, ()

    def cancelled(self) -> bool:
        return self.call is None

    def when(self) -> float:
        return self.at


class Schedule:
    """The order in which things happen: timers by time (those of one time in the order in which they were set), and the loops
    that have something to do now, in turn."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.turns = 0
        self.halted = False  # nothing more is to happen
        self.spins = 0  # turns since the clock last moved
        self._running: ProcessLoop | None = None
        self._heap: list[tuple[float, int, ProcessLoop | None, Any, tuple]] = []
        self._ties = 0
        self._runnable: deque[ProcessLoop] = deque()

    def at(self, when: float, what: Callable, *args: Any) -> None:
        """Something that happens outside of every process."""
        self._ties += 1
        heappush(self._heap, (when, self._ties, None, what, args))

    def timer(self, loop: ProcessLoop, handle: Handle) -> None:
        self._ties += 1
        heappush(self._heap, (handle.at, self._ties, loop, handle, ()))

    def runnable(self, loop: ProcessLoop) -> None:
        self._runnable.append(loop)

    def enter(self, loop: ProcessLoop | None) -> None:
        """Whose loop is asyncio's running one; it stays so until another's turn, for setting it is not cheap."""
        if loop is not self._running:
            self._running = loop
            asyncio._set_running_loop(loop)

    def run(self, until: float) -> None:
        """All that happens before `until`, or until it is halted."""
        heap, runnable = self._heap, self._runnable
        while not self.halted:
            if heap and (not runnable or heap[0][0] <= self.now):
                when = heap[0][0]
                if when > until:
                    break
                _, _, loop, what, args = heappop(heap)
                if when > self.now:
                    self.now, self.spins = when, 0
                if loop is None:
                    what(*args)
                elif what.call is not None:
                    loop.due(what)
            elif runnable:
                loop = runnable.popleft()
                if loop.turn():
                    self.turns += 1
                    self.spins += 1
                    loop.after_turn()
                    if self.spins > SPINS:
                        loop.world.spinning(loop.process, loop.names())
            else:
                break
        self.now = max(self.now, until)


class ProcessLoop(asyncio.AbstractEventLoop):
    """`world` has the order of things (`schedule`), the random numbers and the listeners. `after_turn` is called after each."""

    def __init__(self, world: Any, process: Any, after_turn: Callable[[], None]) -> None:
        self.world, self.process, self.after_turn = world, process, after_turn
        self.stopped = self.gone = False  # a stopped process; a dead one
        self._schedule: Schedule = world.schedule
        self._ready: deque[Handle] = deque()
        self._late: list[Handle] = []  # came due while it was stopped
        self._queued = False  # it is among those that have something to do
        self._tasks: list[asyncio.Task] = []

    # ------------------------------------------------------------ what asyncio asks for

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def time(self) -> float:
        return self._schedule.now

    def create_future(self) -> asyncio.Future:
        return asyncio.Future(loop=self)

    def create_task(self, coroutine: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task:
        task = asyncio.Task(coroutine, loop=self, name=name)
        self._tasks.append(task)
        return task

    def call_soon(self, call: Callable, *args: Any, context: Any = None) -> Handle:
        handle = Handle(call, args)
        self._ready.append(handle)
        if not self._queued and not self.stopped:
            self._queued = True
            self._schedule.runnable(self)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, call: Callable, *args: Any, context: Any = None) -> Handle:
        return self.call_at(self._schedule.now + delay, call, *args)

    def call_at(self, when: float, call: Callable, *args: Any, context: Any = None) -> Handle:
        handle = Handle(call, args, when)
        self._schedule.timer(self, handle)
        return handle

    def call_exception_handler(self, context: dict) -> None:
        self.world.on_exception(self.process, context)

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

    # ------------------------------------------------------------ what the world says

    def due(self, handle: Handle) -> None:
        """A timer's time has come. While the process is stopped it waits, and then comes after what was sent to it."""
        if self.stopped:
            self._late.append(handle)
        elif not self.gone:
            self._ready.append(handle)
            if not self._queued:
                self._queued = True
                self._schedule.runnable(self)

    def turn(self) -> bool:
        """One turn: what is ready now. False: nothing is, or it does not run."""
        self._queued = False
        if self.stopped or self.gone or not self._ready:
            return False
        ready = self._ready
        self._schedule.enter(self)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle.call is not None:
                try:
                    handle.call(*handle.args)
                except Exception as error:
                    self.world.on_exception(self.process, {"message": "a callback failed", "exception": error})
        if ready and not self._queued:
            self._queued = True
            self._schedule.runnable(self)
        return True

    def names(self) -> list[str]:
        """Of the tasks that have not ended, with the lines at which each waits, from outside to inside."""
        return [" > ".join(_waits(task.get_coro())) for task in self._tasks if not task.done()]

    def stop_running(self) -> None:
        """SIGSTOP"""
        self.stopped = True

    def go_on(self) -> None:
        """SIGCONT"""
        self.stopped = False
        self._ready.extend(self._late)
        self._late.clear()
        if self._ready and not self._queued:
            self._queued = True
            self._schedule.runnable(self)

    def die(self) -> None:
        """SIGKILL"""
        self.gone, self.stopped = True, False
        self._ready.clear()
        self._late.clear()

    def discard(self) -> None:
        """After the schedule: end what is suspended, so that nothing of it is heard of again."""
        self.gone = True
        for task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False
                with contextlib.suppress(Exception, asyncio.CancelledError):  # its finally blocks meet a world that is over
                    task.get_coro().close()
        self._tasks.clear()
        self._ready.clear()


def _waits(coroutine: Any) -> list[str]:
    out = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        if frame is None:
            break
        out.append(f"{coroutine.__qualname__}:{frame.f_lineno}")
        coroutine = coroutine.cr_await
    return out
