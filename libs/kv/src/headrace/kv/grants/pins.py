"""Reading what the kvstore holds: pins on one side, a copy that may not be trusted too early on the other.

`held`: the store's side of a lookup's handle. PINNED -> RELEASED by its worker, EXPIRED by time, GONE with its worker.
Pinned objects are never evicted, so bytes that were read while the pins held are the stored ones.

`reading`: the worker's side. FOUND -> READING -> ASKING -> RELEASED. The data may be used iff the copy and its checksums
were good and the store then says that the pins held until after it; anything else is a miss, never an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headrace.kv.grants import effects as fx
from headrace.kv.grants import events as ev

# ---------------------------------------------------------------- the store's side

PINNED, EXPIRED, GONE, RELEASED = "pinned", "expired", "gone", "released"
HELD_PHASES = (PINNED, EXPIRED, GONE, RELEASED)


@dataclass(frozen=True, slots=True)
class Held:
    worker: str
    expires: float
    phase: str = PINNED


def hold(worker: str, ttl: float, now: float) -> tuple[Held, list[fx.Effect]]:
    return Held(worker, now + ttl), []


def held_over(held: Held) -> bool:
    return held.phase != PINNED


def held_step(held: Held, event: Any, now: float) -> tuple[Held, list[fx.Effect]]:
    match held.phase, event:
        case "pinned", ev.Released():
            if now >= held.expires:  # the sweep had not come by yet
                return replace(held, phase=EXPIRED), [fx.Unpin(), fx.Valid(False)]
            return replace(held, phase=RELEASED), [fx.Unpin(), fx.Valid(True)]
        case "pinned", ev.WorkerGone():
            return replace(held, phase=GONE), [fx.Unpin()]
        case phase, ev.Released():
            return held, [fx.Valid(phase == RELEASED)]  # the answer to the first one may have been lost
    return held, []


def held_tick(held: Held, now: float) -> tuple[Held, list[fx.Effect]]:
    if held.phase == PINNED and now >= held.expires:
        return replace(held, phase=EXPIRED), [fx.Unpin()]
    return held, []


# ---------------------------------------------------------------- the worker's side

FOUND, READING, ASKING = "found", "reading", "asking"
READING_PHASES = (FOUND, READING, ASKING, RELEASED)
RETRY = 0.25  # seconds between two sendings of a release


@dataclass(frozen=True, slots=True)
class Reading:
    expires: float  # the store's time to live counted from when the lookup was *sent*: no copy starts after it
    deadline: float  # when the request stops waiting and recomputes
    phase: str = FOUND
    good: bool = True
    decided: bool = False  # UseData or DiscardData was given, once
    send: float = 0.0


def found(ttl: float, sent: float, deadline: float) -> tuple[Reading, list[fx.Effect]]:
    return Reading(sent + ttl, deadline), []


def reading_over(reading: Reading) -> bool:
    return reading.phase == RELEASED


def reading_step(reading: Reading, event: Any, now: float) -> tuple[Reading, list[fx.Effect]]:
    match reading.phase, event:
        case "found", ev.ReadBegins():
            if now >= min(reading.expires, reading.deadline):
                after, effects = _ask(replace(reading, good=False), now)
                return after, [*effects, fx.No("the pins have expired")]
            return replace(reading, phase=READING), [fx.Go()]
        case _, ev.ReadBegins():
            return reading, [fx.No(f"the lookup is {reading.phase}")]
        case "reading", ev.ReadEnded(good):
            return _ask(replace(reading, good=reading.good and good), now)
        case "found", ev.Cancelled():
            return _ask(replace(reading, good=False), now)
        case "reading", ev.Cancelled() | ev.OwnerLost():
            return _stop(reading)
        case "asking", ev.Cancelled():
            return _discard(reading)
        case "asking", ev.ReleaseAnswered(valid):
            after, effects = _decide(reading, reading.good and valid)
            return replace(after, phase=RELEASED), effects
        case "found" | "asking", ev.OwnerLost():
            after, effects = _discard(reading)
            return replace(after, phase=RELEASED), effects
    return reading, []


def reading_tick(reading: Reading, now: float) -> tuple[Reading, list[fx.Effect]]:
    late = now >= reading.deadline
    if reading.phase == FOUND and (late or now >= reading.expires):
        return _ask(replace(reading, good=False), now)
    if reading.phase == READING and late:
        return _stop(reading)
    if reading.phase == ASKING and late and not reading.decided:
        return _discard(reading)
    if reading.phase == ASKING and now >= reading.expires:  # the pins are gone by themselves
        after, effects = _discard(reading)
        return replace(after, phase=RELEASED), effects
    if reading.phase == ASKING and now >= reading.send:
        return replace(reading, send=now + RETRY), [fx.SendRelease()]
    return reading, []


def _ask(reading: Reading, now: float) -> tuple[Reading, list[fx.Effect]]:
    """The copy has ended (or never began): let go, and if it was good learn whether the pins held."""
    after, effects = (reading, []) if reading.good else _discard(reading)
    return replace(after, phase=ASKING, send=now + RETRY), [*effects, fx.SendRelease()]


def _stop(reading: Reading) -> tuple[Reading, list[fx.Effect]]:
    """The copy is of no use any more; what it wrote to may be used again when it has ended."""
    return replace(reading, good=False), [fx.StopTransfers()] if reading.good else []


def _discard(reading: Reading) -> tuple[Reading, list[fx.Effect]]:
    return _decide(replace(reading, good=False), False)


def _decide(reading: Reading, use: bool) -> tuple[Reading, list[fx.Effect]]:
    if reading.decided:
        return reading, []
    return replace(reading, decided=True), [fx.UseData() if use else fx.DiscardData()]
