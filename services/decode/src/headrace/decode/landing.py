"""Memory that prefill workers write into: tickets, their slots, and when a block may be used again.

Knows the regions `kv`, `slab` and `mailbox`, the two-phase gate, expiry and quarantine. Does not know requests or output.

A ticket that left this node gives its blocks two owners: the request and the writer. They are free again when both let go: the
writer by `commit`, by `writer_done`, by telling that it does not know the attempt (it then never will: it keeps a tombstone), or by
proven death. Time alone frees nothing: what expires is quarantined.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from enum import Enum
from typing import Any

from headrace.bus import messages as m
from headrace.bus import nuid
from headrace.engine import api
from headrace.transfer import Memory
from headrace.worker import slab

MAILBOX_BYTES = 8
SEQUENCE = 1  # the one commit of a ticket
REMEMBERED = 4096  # verdicts of tickets that are over
_U64 = struct.Struct("<Q")


class State(Enum):
    """Of a ticket. BOUND until the gate opens; ADMITTED and DONE are over; QUARANTINED: the request let go, the writer did not."""

    BOUND = "bound"
    ADMITTED = "admitted"
    QUARANTINED = "quarantined"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Ticket:
    """One permission to write, as its owner sees it."""

    wire: m.Ticket
    key: str  # of the request's attempt
    prefill: str
    blocks: list[int]
    slot: int
    expires: float
    state: State = State.BOUND
    record: m.Commit | None = None  # the commit, while its flag is missing
    flagged: float = 0.0  # when the flag was first seen without its record
    asked: float = 0.0  # when the writer was last asked
    checking: bool = False  # a thread of ours reads the memory
    let_go: bool = False  # the writer has, but `checking` has not
    owner: Any = None


class Landing:
    """All tickets of this decode instance."""

    def __init__(self, memory: Memory, kv: memoryview, engine: api.Engine, slots: int, ttl: float) -> None:
        info = engine.info
        self.memory, self.kv, self.ttl = memory, kv, ttl
        self.pool = engine.pool
        self.block_bytes, self.slot_bytes = info.block_bytes, slab.slot_bytes(info)
        self.slab = memory.register("slab", slots * self.slot_bytes)
        self.mailbox = memory.register("mailbox", slots * MAILBOX_BYTES)
        self.free_slots = list(range(slots))
        self.tickets: dict[str, Ticket] = {}  # BOUND and QUARANTINED, by ticket id
        self.verdicts: dict[str, str] = {}  # of the others
        self.quarantines = 0  # ever
        self._generation = 0

    # ------------------------------------------------------------ life of a ticket

    def mint(self, bind: m.Bind, key: str, have: int, blocks: list[int], now: float) -> Ticket | None:
        """A ticket for blocks that were just allocated; None when no slot is free. Never the same generation twice."""
        if not self.free_slots:
            return None
        slot = self.free_slots.pop()
        self._generation += 1
        assert self._generation < 1 << 32, "generations are used up; restart this instance"
        _U64.pack_into(self.mailbox, slot * MAILBOX_BYTES, 0)
        wire = m.Ticket(
            ticket=nuid(),
            request=bind.request,
            attempt=bind.attempt,
            reader=self.memory.incarnation,
            writer=bind.writer,
            generation=self._generation,
            first_block=have,
            blocks=array("I", blocks).tobytes(),
            block_bytes=self.block_bytes,
            slab_offset=slot * self.slot_bytes,
            slab_bytes=self.slot_bytes,
            mailbox=slot * MAILBOX_BYTES,
            ttl=self.ttl,
            content=bind.content,
        )
        self.memory.arm(
            wire.generation,
            {
                "kv": [(block * self.block_bytes, self.block_bytes) for block in blocks],
                "slab": [(wire.slab_offset, wire.slab_bytes)],
                "mailbox": [(wire.mailbox, MAILBOX_BYTES)],
            },
        )
        ticket = Ticket(wire, key, bind.prefill, blocks, slot, now + self.ttl)
        self.tickets[wire.ticket] = ticket
        return ticket

    def renew(self, ticket: Ticket, now: float) -> None:
        ticket.expires = now + self.ttl

    def flag(self, ticket: Ticket) -> bool:
        """The writer's 8 bytes are there, and they are this generation's."""
        (value,) = _U64.unpack_from(self.mailbox, ticket.wire.mailbox)
        return value == ticket.wire.generation << 32 | SEQUENCE

    def slab_of(self, ticket: Ticket) -> memoryview:
        return self.slab[ticket.wire.slab_offset : ticket.wire.slab_offset + ticket.wire.slab_bytes]

    def block(self, block: int) -> memoryview:
        return self.kv[block * self.block_bytes : (block + 1) * self.block_bytes]

    def admitted(self, ticket: Ticket) -> None:
        """The writer let go by its commit, and the request took the blocks."""
        self._over(ticket, State.ADMITTED, "admitted")

    def failed_commit(self, ticket: Ticket) -> None:
        """Committed, so the writer is done, but what it wrote is no good: the blocks are free."""
        self.pool.release(ticket.blocks)
        self._over(ticket, State.DONE, "stale")

    def let_go(self, ticket: Ticket) -> None:
        """The request let go; the writer may still be writing. Free at once only where the transport proves that it can't."""
        assert ticket.state is State.BOUND
        ticket.state, ticket.owner, ticket.record = State.QUARANTINED, None, None
        self.memory.disarm(ticket.wire.generation)
        self.pool.quarantine(ticket.blocks, ticket.wire.ticket)
        self.quarantines += 1
        if ticket.checking or self.memory.fenced(ticket.wire.writer):  # checked: its commit is here, so the writer is done
            self.writer_let_go(ticket)

    def writer_let_go(self, ticket: Ticket) -> None:
        """`writer_done`, or proven death. A bound ticket's request must have been ended before (`quarantine`)."""
        assert ticket.state is State.QUARANTINED
        if ticket.checking:
            ticket.let_go = True
            return
        self.pool.unquarantine(ticket.wire.ticket)
        self._over(ticket, State.DONE, "stale")

    def checked(self, ticket: Ticket) -> bool:
        """Our thread has read; True when the ticket is still bound."""
        ticket.checking = False
        if ticket.state is State.QUARANTINED and ticket.let_go:
            self.writer_let_go(ticket)
        return ticket.state is State.BOUND

    def _over(self, ticket: Ticket, state: State, verdict: str) -> None:
        ticket.state, ticket.owner, ticket.record = state, None, None
        self.memory.disarm(ticket.wire.generation)
        self.free_slots.append(ticket.slot)
        del self.tickets[ticket.wire.ticket]
        self.verdicts[ticket.wire.ticket] = verdict
        if len(self.verdicts) > REMEMBERED:
            del self.verdicts[next(iter(self.verdicts))]
