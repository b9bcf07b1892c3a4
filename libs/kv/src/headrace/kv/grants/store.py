"""The owner's side of a write grant: room for some objects that one worker may fill. The kvstore's arena, and the staging
regions where images and their embeddings land.

Phases. OPEN: out at the worker. CHECKING: committed, so the worker let go; checksums are being compared. EXPIRED: time is
up, the worker may still be writing: quarantine. RELEASED: over.

Nothing is visible before its checksum fitted. A grant that was committed too late is not published: its worker was told
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headrace.kv.grants import effects as fx
from headrace.kv.grants import events as ev

OPEN, CHECKING, EXPIRED, RELEASED = "open", "checking", "expired", "released"
PHASES = (OPEN, CHECKING, EXPIRED, RELEASED)
POLL = 0.25  # seconds between two questions about an expired grant's worker


@dataclass(frozen=True, slots=True)
class Grant:
    generation: int
    writer: str  # incarnation
    objects: int  # how many it has room for
    expires: float
    phase: str = OPEN
    stored: int = 0
    rejected: int = 0
    outcome: str = ""  # stored | expired | abandoned
    poll: float = 0.0


Step = tuple[Grant, list[fx.Effect]]


def reserve(generation: int, writer: str, objects: int, ttl: float, now: float) -> Step:
    return Grant(generation, writer, objects, now + ttl), [fx.Arm(generation)]


def over(grant: Grant) -> bool:
    return grant.phase == RELEASED


def step(grant: Grant, event: Any, now: float) -> Step:
    match event:
        case ev.Committed(generation) if generation != grant.generation:
            return grant, [fx.Stale(f"generation {generation} is not this grant's")]
    match grant.phase, event:
        case "open", ev.Committed(_, _, record):
            return replace(grant, phase=CHECKING), [fx.Disarm(grant.generation), fx.Verify(record)]
        case "open", ev.Released() | ev.WriterDone():
            return _free(replace(grant, outcome="abandoned"), [fx.Disarm(grant.generation)])
        case "open", ev.Cancelled():  # nobody wants it any more; the writer may still be at it
            return replace(grant, phase=EXPIRED, outcome="abandoned", poll=now + POLL), _expiry(grant)
        case "checking", ev.Checked(good):
            assert len(good) == grant.objects
            whole = tuple(index for index, fits in enumerate(good) if fits)
            broken = tuple(index for index, fits in enumerate(good) if not fits)
            after = replace(grant, phase=RELEASED, outcome="stored", stored=len(whole), rejected=len(broken))
            return after, [fx.Publish(whole), fx.FreeRoom(broken), fx.Stored(len(whole), len(broken))]
        case "expired", ev.Committed():
            return _free(grant, [], fx.Stale("the grant expired before its commit"))
        case "expired", ev.Released() | ev.WriterDone() | ev.WriterStatus("done") | ev.Fenced():
            return _free(grant, [])
        case "released", ev.Committed():
            if grant.outcome == "stored":
                return grant, [fx.Stored(grant.stored, grant.rejected)]
            return grant, [fx.Stale(f"the grant is {grant.outcome}")]
    return grant, []  # a commit in CHECKING waits for the answer of the first


def tick(grant: Grant, now: float) -> Step:
    if grant.phase == OPEN and now >= grant.expires:
        after = replace(grant, phase=EXPIRED, outcome="expired", poll=now + POLL)
        return after, _expiry(grant)
    if grant.phase == EXPIRED and now >= grant.poll:
        return replace(grant, poll=now + POLL), [fx.AskStatus(), fx.CheckFence(grant.writer)]
    return grant, []


def _expiry(grant: Grant) -> list[fx.Effect]:
    return [fx.Disarm(grant.generation), fx.CheckFence(grant.writer)]


def _free(grant: Grant, before: list[fx.Effect], *after: fx.Effect) -> Step:
    return replace(grant, phase=RELEASED), [*before, fx.FreeRoom(tuple(range(grant.objects))), *after]
