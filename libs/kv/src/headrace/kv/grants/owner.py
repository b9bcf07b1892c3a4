"""Decode's side of a ticket: one permission to write into blocks, a slab slot and a mailbox slot of this node.

Phases. BOUND: out at the writer. COMMITTED: the writer said that all is placed, and thereby let go; the flag or the
checksums are still to be seen. ADMITTED: the engine has it. FAILED, EXPIRED, CANCELLED: the request let go but the writer
has not, so the memory is in quarantine. RELEASED: over; `outcome` says how.

The gate: admitted iff the commit record fits (generation, byte count) AND the 8-byte flag in the mailbox is this
generation's AND, where checksums are on, they fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headrace.kv.grants import effects as fx
from headrace.kv.grants import events as ev

BOUND, COMMITTED, ADMITTED, RELEASED = "bound", "committed", "admitted", "released"
FAILED, EXPIRED, CANCELLED = "failed", "expired", "cancelled"
QUARANTINED = (FAILED, EXPIRED, CANCELLED)
PHASES = (BOUND, COMMITTED, ADMITTED, *QUARANTINED, RELEASED)

SEQUENCE = 1  # a ticket has one commit
POLL = 0.25  # seconds between two questions about a quarantined ticket
RECORD_GRACE = 0.1  # seconds that a commit may come after its flag before the writer is asked


@dataclass(frozen=True, slots=True)
class Ticket:
    """`nbytes`: what the writer must say that it placed into blocks (-1: not checked). Times: the owner's clock, seconds."""

    generation: int
    writer: str  # incarnation
    blocks: tuple[int, ...]
    nbytes: int
    expires: float
    verify: bool = False  # checksums are compared before admission
    phase: str = BOUND
    outcome: str = ""  # admitted | failed | expired | cancelled
    flag: bool = False
    record: Any = None
    poll: float = 0.0  # when to ask next

    @property
    def quarantined(self) -> bool:
        return self.phase in QUARANTINED


Step = tuple[Ticket, list[fx.Effect]]


def flag_value(generation: int) -> int:
    """The mailbox word of a committed ticket."""
    return generation << 32 | SEQUENCE


def bind(
    generation: int, writer: str, blocks: tuple[int, ...], nbytes: int, ttl: float, now: float, verify: bool = False
) -> Step:
    """A new ticket over blocks, a slab slot and a mailbox slot that were just taken, all or nothing."""
    return Ticket(generation, writer, tuple(blocks), nbytes, now + ttl, verify), [fx.Arm(generation)]


def over(ticket: Ticket) -> bool:
    return ticket.phase == RELEASED


def step(ticket: Ticket, event: Any, now: float) -> Step:
    match event:
        case ev.Committed(generation) if generation != ticket.generation:
            return ticket, [fx.Answer("stale")]
        case ev.WriterDone(generation) if generation != ticket.generation:
            return ticket, []
    match ticket.phase:
        case "bound":
            return _bound(ticket, event, now)
        case "committed":
            return _committed(ticket, event)
        case "admitted":
            return _admitted(ticket, event)
        case "released":
            return ticket, [fx.Answer(_verdict(ticket))] if isinstance(event, ev.Committed) else []
        case _:
            return _quarantined(ticket, event)


def tick(ticket: Ticket, now: float) -> Step:
    """Time passed. To be called on every turn of the loop: expiry, and questions that are due."""
    checking = ticket.phase == COMMITTED and ticket.flag  # a thread of ours compares checksums: it will end
    if ticket.phase in (BOUND, COMMITTED) and not checking and now >= ticket.expires:
        message = "the hand-off was not complete when its ticket expired"
        return _let_go(ticket, EXPIRED, now, fx.FailRequest("expired", message))
    if ticket.phase == BOUND and ticket.flag and now >= ticket.poll:
        return replace(ticket, poll=now + POLL), [fx.AskStatus()]
    if ticket.quarantined and now >= ticket.poll:
        return replace(ticket, poll=now + POLL), [fx.AskStatus(), fx.CheckFence(ticket.writer)]
    return ticket, []


# ---------------------------------------------------------------- by phase


def _bound(ticket: Ticket, event: Any, now: float) -> Step:
    match event:
        case ev.Renewed(expires):
            return replace(ticket, expires=max(ticket.expires, expires)), []
        case ev.FlagSeen(value) if value == flag_value(ticket.generation) and not ticket.flag:
            return replace(ticket, flag=True, poll=now + RECORD_GRACE), []
        case ev.Committed(_, nbytes, record):
            if ticket.nbytes not in (-1, nbytes):
                message = f"the writer placed {nbytes} bytes; the ticket is for {ticket.nbytes}"
                after, effects = _let_go(_done(ticket), FAILED, now, fx.FailRequest("mismatch", message))
                return after, [*effects, fx.Answer("mismatch")]
            return _gate(replace(ticket, phase=COMMITTED, record=record))
        case ev.WriterFailed(code, message):
            return _let_go(ticket, FAILED, now, fx.FailRequest(code, message))
        case ev.WriterLost():
            return _let_go(ticket, FAILED, now, fx.FailRequest("lost", "the prefill instance is gone"))
        case ev.WriterStatus("done"):
            return _let_go(_done(ticket), FAILED, now, fx.FailRequest("lost", "the prefill instance knows nothing of this"))
        case ev.WriterDone():
            return _let_go(_done(ticket), FAILED, now, fx.FailRequest("failed", "the prefill instance gave up"))
        case ev.Cancelled():
            return _let_go(ticket, CANCELLED, now)
    return ticket, []


def _committed(ticket: Ticket, event: Any) -> Step:
    """The writer let go. Only the flag or the checksums are missing."""
    match event:
        case ev.FlagSeen(value) if value == flag_value(ticket.generation) and not ticket.flag:
            after, effects = _gate(replace(ticket, flag=True))
            return after, [effect for effect in effects if not isinstance(effect, fx.Answer)]  # nobody has asked
        case ev.Committed():
            return ticket, [fx.Answer("pending")]
        case ev.Verified(good) if ticket.flag and ticket.verify:
            if good:
                return _admit(ticket)
            return _let_go(ticket, FAILED, 0.0, fx.FailRequest("corrupt", "a checksum of the hand-off does not fit"))
        case ev.Cancelled():
            return _let_go(ticket, CANCELLED, 0.0)
        case ev.WriterFailed(code, message):
            return _let_go(ticket, FAILED, 0.0, fx.FailRequest(code, message))
    return ticket, []


def _admitted(ticket: Ticket, event: Any) -> Step:
    """The engine owns the blocks; only the slab slot is still the ticket's."""
    match event:
        case ev.Committed():
            return ticket, [fx.Answer("admitted")]
        case ev.SlabTaken():
            return replace(ticket, phase=RELEASED, record=None), [fx.FreeSlots()]
    return ticket, []


def _quarantined(ticket: Ticket, event: Any) -> Step:
    """Only the writer's letting go counts any more; a late commit is that too."""
    match event:
        case ev.Committed():
            return _release(ticket, [fx.Answer("stale")])
        case ev.WriterDone() | ev.WriterStatus("done") | ev.Fenced():
            return _release(ticket, [])
    return ticket, []


# ---------------------------------------------------------------- moves


def _gate(ticket: Ticket) -> Step:
    """COMMITTED: admit if the flag is there too."""
    if not ticket.flag:
        return ticket, [fx.Answer("pending")]
    if ticket.verify:
        return ticket, [fx.Verify(ticket.record), fx.Answer("pending")]
    after, effects = _admit(ticket)
    return after, [*effects, fx.Answer("admitted")]


def _admit(ticket: Ticket) -> Step:
    after = replace(ticket, phase=ADMITTED, outcome="admitted")
    return after, [fx.Disarm(ticket.generation), fx.Admit(ticket.record)]


def _done(ticket: Ticket) -> Ticket:
    """The writer let go in the same breath."""
    return replace(ticket, phase=COMMITTED)


def _let_go(ticket: Ticket, outcome: str, now: float, *tell: fx.Effect) -> Step:
    """The request lets go. If the writer has as well (COMMITTED) the memory is free, else it goes into quarantine."""
    effects = [fx.Disarm(ticket.generation), fx.Abandon()]
    if ticket.phase == COMMITTED:
        after = replace(ticket, phase=RELEASED, outcome=outcome, record=None)
        return after, [*effects, fx.FreeBlocks(ticket.blocks), fx.FreeSlots(), *tell]
    after = replace(ticket, phase=outcome, outcome=outcome, record=None, poll=now + POLL)
    return after, [*effects, fx.Quarantine(ticket.blocks), *tell, fx.CheckFence(ticket.writer)]


def _release(ticket: Ticket, more: list[fx.Effect]) -> Step:
    return replace(ticket, phase=RELEASED), [fx.Unquarantine(), fx.FreeSlots(), *more]


def _verdict(ticket: Ticket) -> str:
    return "admitted" if ticket.outcome == "admitted" else "stale"
