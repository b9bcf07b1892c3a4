"""Compiles grammars beside the event loop, a few at a time, with a bound on the wait.

Knows what to answer when a grammar is wrong, too slow or one too many. Does not know what a grammar is: that is
`headrace.engine.grammar`'s.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.bus import messages as m
from headrace.engine import api

THREADS = 2  # llguidance compiles without the interpreter's lock
WAITING = 32  # grammars that may be in line or being compiled


class Compiling:
    """`grammars`: the engine's, None where no output follows one. `seconds`: longest wait in line, and longest for the
    compiler."""

    def __init__(self, grammars: Any | None, seconds: float) -> None:
        self._grammars, self._seconds = grammars, seconds
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="compile")
        self._running: dict[tuple[str, str], _Job] = {}

    def refuses(self, grammar: api.Grammar) -> m.Refused | None:
        """What can be said at once against any grammar here."""
        if self._grammars is None:
            return m.Refused("invalid", "this deployment's engine does not enforce structured output: its decode workers run a "
                             "simulated engine")  # fmt: skip
        return None

    def knows(self, grammar: api.Grammar) -> bool:
        """Whether it is compiled."""
        return self._grammars is not None and self._grammars.knows(grammar)

    async def compile(self, grammar: api.Grammar) -> m.Refused | None:
        """None when the grammar is ready. A grammar that is being compiled for another request is waited for, not made again.
        Who gives up waiting leaves the work to end by itself: its size is bounded."""
        key = (grammar.kind, grammar.text)
        job = self._running.get(key)
        if job is None:
            if len(self._running) >= WAITING:
                return m.Refused("busy", f"{WAITING} grammars are being compiled", None, self._seconds)
            job = self._running[key] = _Job(self._pool, self._grammars, grammar)
            job.done.add_done_callback(lambda _: self._running.pop(key, None))
        if not await _within(job.begun, self._seconds):
            return m.Refused("busy", f"other grammars have been compiled for {self._seconds:g} s", None, self._seconds)
        if not await _within(job.done, self._seconds):
            return m.Refused("invalid", f"the grammar was not compiled within {self._seconds:g} s; make it smaller")
        error = job.done.exception()
        if error is None:
            return None
        if isinstance(error, ValueError):
            return m.Refused("invalid", str(error))
        raise error

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Job:
    """One grammar in a thread. `begun` and `done` are futures of the loop."""

    def __init__(self, pool: ThreadPoolExecutor, grammars: Any, grammar: api.Grammar) -> None:
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()

        def work() -> None:
            loop.call_soon_threadsafe(self._begin)
            grammars.compile(grammar)

        self.done = asyncio.ensure_future(loop.run_in_executor(pool, work))
        self.done.add_done_callback(lambda future: future.cancelled() or future.exception())

    def _begin(self) -> None:
        if not self.begun.done():
            self.begun.set_result(None)


async def _within(future: asyncio.Future, seconds: float) -> bool:
    done, _ = await asyncio.wait({future}, timeout=seconds)
    return bool(done)
