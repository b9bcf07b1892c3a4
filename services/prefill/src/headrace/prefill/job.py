"""One attempt at a prompt on the prefill side: its place in the engine, its ticket, how far its bytes have got.

Knows what is computed, what is written and until when this process may write (`lease`: its own clock, a guard before the owner's).
Does not know the bus or the engine: `PrefillService` drives it.
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field

from headrace.bus import messages as m
from headrace.engine import api


class Abort(Exception):
    """This leg ends with an error that the client may see. `quiet`: the owner or the gateway ended it and needs no word of it."""

    def __init__(self, status: int, code: str, message: str, quiet: bool = False) -> None:
        super().__init__(message)
        self.problem, self.quiet = m.Problem(status, code, message), quiet


@dataclass(slots=True, eq=False)
class Job:
    """Times are time.monotonic() seconds; positions are prompt tokens; blocks are logical."""

    key: str
    run: m.Run
    ids: array
    hashes: list[bytes]
    deadline: float
    began: float
    task: asyncio.Task | None = None
    abort: Abort | None = None  # why `task` was cancelled

    pins: list[int] = field(default_factory=list)  # resident prefix, held until the end
    fetched: int = 0  # blocks from the kvstore
    submitted: float = 0.0
    may_bind: asyncio.Future | None = None  # until its compute is near
    binding: bool = False

    position: int = 0  # computed up to here
    table: list[int] = field(default_factory=list)
    chunk_at: float = 0.0
    first_chunk: float = 0.0
    done: api.PrefillDone | None = None
    computed: float = 0.0
    waiter: asyncio.Future | None = None

    ticket: m.Ticket | None = None
    memory: bytes = b""
    lease: float = 0.0
    renewed: float = 0.0
    written: int = 0  # blocks below this are in the owner's memory
    nbytes: int = 0
    lookup_seconds: float = 0.0
    write_seconds: float = 0.0
    record: m.Commit | None = None  # the commit, once everything is placed
    admitted: bool = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.ids)

    @property
    def remaining(self) -> int:
        """Tokens that the engine has still to go through (an upper bound: a hit skips some)."""
        return 0 if self.done is not None else len(self.ids) - self.position

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def changed(self) -> None:
        self.waiter = asyncio.get_running_loop().create_future()
        await self.waiter

    def stop(self, why: Abort) -> None:
        """End the task at its next await; the first reason counts."""
        if self.abort is None and self.task is not None and not self.task.done():
            self.abort = why
            self.task.cancel()
