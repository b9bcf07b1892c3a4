"""Memory that prefill workers write into: slots, tickets on the wire, and the effects of the grant machine on real memory.

Knows the regions `kv`, `slab` and `mailbox` and how `headrace.kv.grants.owner` (which decides) meets the block pool, the
engine's reservations and the transport's fence. Does not know requests or output: those effects go to `tell`.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.bus import messages as m
from headrace.bus import nuid
from headrace.engine import api
from headrace.kv.grants import Ledger, effects, events, owner
from headrace.transfer import Memory
from headrace.worker import slab

MAILBOX_BYTES = 8
_U64 = struct.Struct("<Q")


@dataclass(slots=True, eq=False)
class Landed:
    """What one ticket stands for here, until its slots are free again."""

    wire: m.Ticket
    prefill: str  # instance
    reservation: api.Reservation
    slot: int
    request: Any  # whose hand-off it is
    checked: bool = False  # the content binding was compared


class Landing:
    """All tickets of this decode instance. `tell(landed, effect)` gets Admit, Verify, FailRequest and AskStatus, which are
    not about memory."""

    def __init__(
        self,
        memory: Memory,
        kv: memoryview,
        engine: api.Engine,
        slots: int,
        ttl: float,
        tell: Callable[[Landed, Any], None],
    ) -> None:
        info = engine.info
        self.memory, self.kv, self.engine, self.ttl, self._tell = memory, kv, engine, ttl, tell
        self.pool, self.block_bytes, self.slot_bytes = engine.pool, info.block_bytes, slab.slot_bytes(info)
        self.slab = memory.register("slab", slots * self.slot_bytes)
        self.mailbox = memory.register("mailbox", slots * MAILBOX_BYTES)
        self.slots = slots
        self.free_slots = list(range(slots))
        self.ledger: Ledger[owner.Ticket] = Ledger(owner.step, owner.tick, owner.over)
        self.landed: dict[str, Landed] = {}  # by ticket, while it holds slots
        self.quarantines = 0  # ever

    # ------------------------------------------------------------ life of a ticket

    def mint(self, bind: m.Bind, reservation: api.Reservation, request: Any, verify: bool, now: float) -> Landed | None:
        """A ticket for memory that was just reserved; None when no slot is free. Never the same generation twice.
        `verify`: `tell` gets Verify before Admit."""
        if not self.free_slots:
            return None
        slot, blocks, generation = self.free_slots.pop(), reservation.blocks, self.ledger.next_generation()
        _U64.pack_into(self.mailbox, slot * MAILBOX_BYTES, 0)
        wire = m.Ticket(
            ticket=nuid(),
            request=bind.request,
            attempt=bind.attempt,
            reader=self.memory.incarnation,
            writer=bind.writer,
            generation=generation,
            first_block=reservation.have,
            blocks=array("I", blocks).tobytes(),
            block_bytes=self.block_bytes,
            slab_offset=slot * self.slot_bytes,
            slab_bytes=self.slot_bytes,
            mailbox=slot * MAILBOX_BYTES,
            ttl=self.ttl,
            content=bind.content,
        )
        landed = self.landed[wire.ticket] = Landed(wire, bind.prefill, reservation, slot, request)
        nbytes = len(blocks) * self.block_bytes
        made = owner.bind(generation, bind.writer, tuple(blocks), nbytes, self.ttl, now, verify)
        self._carry(landed, self.ledger.add(wire.ticket, *made), now)
        return landed

    def feed(self, ticket: str, event: Any, now: float) -> str:
        """One event of a ticket. -> the verdict, if the event was a commit."""
        effects_ = self.ledger.feed(ticket, event, now)
        return self._carry(self.landed.get(ticket), effects_, now)

    def tick(self, now: float) -> None:
        """Late flags, ends of leases, questions that are due."""
        for ticket, state in self.ledger:
            if not state.flag and state.phase in (owner.BOUND, owner.COMMITTED):
                self.look(ticket, now)
        due = self.ledger.tick(now)
        landed = {ticket: self.landed.get(ticket) for ticket, _ in due}  # of a ticket that frees its slot before it tells
        for ticket, effect in due:
            self._carry(landed[ticket], [effect], now)

    def look(self, ticket: str, now: float) -> None:
        """Is the flag there?"""
        landed = self.landed[ticket]
        (value,) = _U64.unpack_from(self.mailbox, landed.wire.mailbox)
        if value:
            self.feed(ticket, events.FlagSeen(value), now)

    def check_writers(self, now: float) -> None:
        """Writers that are proven dead need not be waited for."""
        dead: dict[str, bool] = {}
        for ticket, state in self.ledger:
            if state.phase == owner.BOUND:
                if state.writer not in dead:
                    dead[state.writer] = self.memory.is_dead(state.writer)
                if dead[state.writer]:
                    self.feed(ticket, events.WriterLost(), now)

    def _carry(self, landed: Landed | None, list_: list[Any], now: float) -> str:
        """Do what the machine wants, in its order."""
        verdict = ""
        for effect in list_:
            match effect:
                case effects.Answer(answer):
                    verdict = answer
                case effects.Unknown():
                    verdict = "unknown"
                case effects.Arm(generation):
                    self._arm(landed, generation)
                case effects.Disarm(generation):
                    self.memory.disarm(generation)
                case effects.Abandon():
                    self.engine.abandon(landed.reservation)
                case effects.FreeBlocks(blocks):
                    self.pool.release(blocks)
                case effects.Quarantine(blocks):
                    self.quarantines += 1
                    self.pool.quarantine(blocks, landed.wire.ticket)
                case effects.Unquarantine():
                    self.pool.unquarantine(landed.wire.ticket)
                case effects.FreeSlots():
                    del self.landed[landed.wire.ticket]
                    self.free_slots.append(landed.slot)
                case effects.CheckFence(writer):
                    if self.memory.fenced(writer):
                        self.feed(landed.wire.ticket, events.Fenced(), now)
                case _:
                    self._tell(landed, effect)
        return verdict

    def _arm(self, landed: Landed, generation: int) -> None:
        wire, size = landed.wire, self.block_bytes
        self.memory.arm(
            generation,
            {
                "kv": [(block * size, size) for block in landed.reservation.blocks],
                "slab": [(wire.slab_offset, wire.slab_bytes)],
                "mailbox": [(wire.mailbox, MAILBOX_BYTES)],
            },
        )

    # ------------------------------------------------------------ the bytes

    def slab_of(self, landed: Landed, nbytes: int) -> memoryview:
        start = landed.wire.slab_offset
        return self.slab[start : start + nbytes]

    def blocks_of(self, landed: Landed) -> list[memoryview]:
        """The written blocks, in logical order."""
        size = self.block_bytes
        return [self.kv[block * size : (block + 1) * size] for block in landed.reservation.blocks]
