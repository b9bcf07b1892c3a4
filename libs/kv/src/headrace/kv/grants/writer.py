"""Prefill's side of a ticket: when it may write, when it must stop, and the words it owes the owner.

Phases. BOUND: the ticket is here, nothing was written. WRITING: at least one operation was started. COMMITTED:
everything is placed, the commit is being asked about. FAILED, EXPIRED, CANCELLED: no operation will be started any
more; those in flight end, then `WriterDone` is sent until it is acknowledged. RELEASED: over.

The writer stops by its own clock: `expires` is the owner's time to live counted from when the bind was *sent*, less a
guard. A process that was paused past it starts nothing more. Its own blocks stay pinned while anything is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headrace.kv.grants import effects as fx
from headrace.kv.grants import events as ev

BOUND, WRITING, COMMITTED, RELEASED = "bound", "writing", "committed", "released"
FAILED, EXPIRED, CANCELLED = "failed", "expired", "cancelled"
STOPPED = (FAILED, EXPIRED, CANCELLED)
PHASES = (BOUND, WRITING, COMMITTED, *STOPPED, RELEASED)

RETRY = 0.25  # seconds between two sendings of an unanswered commit or writer_done
GIVE_UP = 30.0  # seconds after which an unacknowledged writer_done is left to the owner's own questions
GUARD = 0.2  # of the time to live: the writer stops this much earlier


@dataclass(frozen=True, slots=True)
class Ticket:
    """Times: the writer's clock, seconds."""

    generation: int
    expires: float  # no operation starts after this
    deadline: float  # of the request
    phase: str = BOUND
    outcome: str = ""  # admitted | stale | unknown | mismatch | failed | expired | cancelled
    in_flight: int = 0
    pinned: bool = True  # own blocks
    send: float = 0.0  # when to send commit or writer_done (again)
    give_up: float = 0.0


Step = tuple[Ticket, list[fx.Effect]]


def bound(generation: int, ttl: float, sent: float, deadline: float) -> Step:
    """The owner answered a bind that was sent at `sent`."""
    return Ticket(generation, expires_at(ttl, sent), deadline), []


def expires_at(ttl: float, sent: float) -> float:
    """For `Renewed` too."""
    return sent + ttl * (1 - GUARD)


def over(ticket: Ticket) -> bool:
    return ticket.phase == RELEASED


def status(ticket: Ticket | None) -> str:
    """Answer to the owner's question: "committed" (send the record), "writing", or "done": this process will not
    write any more. None stands for a ticket that it does not know: it must then leave a tombstone (`Tombstones`), so
    that it never writes for it should the answer to its bind still be under way."""
    if ticket is None:
        return "done"
    if ticket.phase == COMMITTED or ticket.outcome == "admitted":
        return "committed"
    stopped = ticket.phase in (*STOPPED, RELEASED)
    return "done" if stopped and not ticket.in_flight else "writing"


def step(ticket: Ticket, event: Any, now: float) -> Step:
    match event:
        case ev.WriteBegins():
            return _begin(ticket, now)
        case ev.WriteEnded(error):
            return _ended(ticket, error, now)
    match ticket.phase:
        case "bound" | "writing":
            return _open(ticket, event, now)
        case "committed":
            return _committed(ticket, event, now)
        case "released":
            return ticket, []
        case _:
            return _stopped(ticket, event)


def tick(ticket: Ticket, now: float) -> Step:
    if ticket.phase in (BOUND, WRITING) and now >= min(ticket.expires, ticket.deadline):
        return _stop(ticket, EXPIRED, now, "expired", "the ticket ran out before everything was written")
    if ticket.phase == COMMITTED and now >= ticket.deadline:
        return _stop(ticket, EXPIRED, now, "deadline", "the decode instance gave no verdict before the deadline")
    if ticket.phase == COMMITTED and now >= ticket.send:
        return replace(ticket, send=now + RETRY), [fx.SendCommit()]
    if ticket.phase in STOPPED and not ticket.in_flight and now >= ticket.give_up:
        return replace(ticket, phase=RELEASED), []
    if ticket.phase in STOPPED and not ticket.in_flight and now >= ticket.send:
        return replace(ticket, send=now + RETRY), [fx.SendDone()]
    return ticket, []


# ---------------------------------------------------------------- by event and phase


def _begin(ticket: Ticket, now: float) -> Step:
    if ticket.phase not in (BOUND, WRITING):
        return ticket, [fx.No(f"the ticket is {ticket.phase}")]
    if now >= min(ticket.expires, ticket.deadline):
        after, effects = tick(ticket, now)
        return after, [*effects, fx.No("the ticket has expired")]
    return replace(ticket, phase=WRITING, in_flight=ticket.in_flight + 1), [fx.Go()]


def _ended(ticket: Ticket, error: str, now: float) -> Step:
    if not ticket.in_flight:
        return ticket, []
    ticket = replace(ticket, in_flight=ticket.in_flight - 1)
    if error and ticket.phase == WRITING:
        return _stop(ticket, FAILED, now, "transfer", error)
    if ticket.phase in STOPPED and not ticket.in_flight:
        return _quiet(ticket, now)
    return ticket, []


def _open(ticket: Ticket, event: Any, now: float) -> Step:
    match event:
        case ev.Renewed(expires):
            return replace(ticket, expires=max(ticket.expires, expires)), []
        case ev.Placed() if not ticket.in_flight:
            return replace(ticket, phase=COMMITTED, send=now + RETRY), [fx.SendCommit()]
        case ev.Cancelled(reason):
            return _stop(ticket, CANCELLED, now, "", reason)
        case ev.LegFailed(code, message):
            return _stop(ticket, FAILED, now, code, message)
        case ev.OwnerLost():
            return _owner_lost(ticket, now)
    return ticket, []


def _committed(ticket: Ticket, event: Any, now: float) -> Step:
    """The commit is out: it can't be taken back, so a cancel does nothing (the owner has its own)."""
    match event:
        case ev.CommitAnswered("pending"):
            return ticket, []
        case ev.CommitAnswered(verdict):
            after = replace(ticket, phase=RELEASED, outcome=verdict, pinned=False)
            problems = {
                "unknown": "the decode instance does not know the ticket",
                "mismatch": "the decode instance expected another number of bytes",
            }
            report = [fx.Report(verdict, problems[verdict])] if verdict in problems else []
            return after, [fx.ReleaseSource(), *report]
        case ev.OwnerLost():
            return _owner_lost(ticket, now)
    return ticket, []


def _stopped(ticket: Ticket, event: Any) -> Step:
    match event:
        case ev.DoneAnswered() if not ticket.in_flight:
            return replace(ticket, phase=RELEASED), []
        case ev.OwnerLost():
            if ticket.in_flight:
                return replace(ticket, give_up=0.0), []  # over as soon as the last operation has ended
            return replace(ticket, phase=RELEASED), []
    return ticket, []


# ---------------------------------------------------------------- moves


def _stop(ticket: Ticket, outcome: str, now: float, code: str, message: str) -> Step:
    """Start nothing more. The owner hears of a failure at once; of the end of writing when nothing is in flight."""
    committed = ticket.phase == COMMITTED
    after = replace(ticket, phase=outcome, outcome=outcome, give_up=now + GIVE_UP)
    effects: list[fx.Effect] = [] if outcome == CANCELLED or committed else [fx.SendFail(code, message)]
    if outcome != CANCELLED:
        effects.append(fx.Report(code, message))
    if after.in_flight:
        return after, [*effects, fx.StopTransfers()]
    after, more = _quiet(after, now)
    return after, [*effects, *more]


def _quiet(ticket: Ticket, now: float) -> Step:
    """Stopped, and nothing is in flight: tell the owner, and let go of our own blocks."""
    if ticket.give_up == 0.0:  # there is no owner any more
        return replace(ticket, phase=RELEASED, pinned=False), [fx.ReleaseSource()]
    return replace(ticket, pinned=False, send=now + RETRY), [fx.ReleaseSource(), fx.SendDone()]


def _owner_lost(ticket: Ticket, now: float) -> Step:
    report = fx.Report("lost", "the decode instance is gone")
    after = replace(ticket, phase=FAILED, outcome=FAILED, give_up=0.0)
    if after.in_flight:
        return after, [report, fx.StopTransfers()]
    after, effects = _quiet(after, now)
    return after, [report, *effects]
