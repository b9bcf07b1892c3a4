"""One attempt at a prompt on the prefill side: its place in the engine, its ticket, how far its bytes have got.

Knows what is computed and what is written. Does not know what follows from that: `attempt.py` and `headrace.kv.grants.writer`
decide, and `PrefillService` acts.
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field

from headrace.bus import messages as m
from headrace.engine import api

from .attempt import Attempt


class Abort(Exception):
    """This leg ends. `code` "" means: those whom it concerns know already (a cancel), so nobody is told."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


@dataclass(slots=True, eq=False)
class Job:
    """Times are time.monotonic() seconds; positions are prompt tokens; blocks are logical."""

    key: str
    run: m.Run
    ids: array
    hashes: list[bytes]
    deadline: float
    began: float
    state: Attempt = field(default_factory=Attempt)
    task: asyncio.Task | None = None  # what is done for it now, where that takes time

    content: bytes = b""  # binding of the prompt
    images: list[api.ImageSpan] = field(default_factory=list)
    pins: list[int] = field(default_factory=list)  # resident prefix
    own: int = 0  # blocks of it that were here already
    fetched: int = 0  # blocks from the kvstore
    submitted: float = 0.0
    asked: float = 0.0  # when it began to ask for memory
    patience: float = 0.005  # until it asks again
    timer: asyncio.TimerHandle | None = None  # of that
    released: bool = False  # engine and pins were given back

    position: int = 0  # computed up to here
    table: list[int] = field(default_factory=list)
    chunk_at: float = 0.0
    done: api.PrefillDone | None = None
    computed: float = 0.0
    waiter: asyncio.Future | None = None

    ticket: m.Ticket | None = None
    memory: bytes = b""
    renewed: float = 0.0
    written: int = 0  # blocks below this are in the owner's memory
    nbytes: int = 0
    by: str = ""  # how the bytes went: shm | tcp
    lookup_seconds: float = 0.0
    write_seconds: float = 0.0
    record: m.Commit | None = None  # the commit, once everything is placed
    placed: float = 0.0
    reported: bool = False

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
