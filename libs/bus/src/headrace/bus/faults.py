"""Fault points: what a test or `headrace drill` may do to a living process, at a named moment.

Knows: which moments there are, and how to die, stop, lose, repeat and delay there. Does not know what follows from it.
Off by default, and then without cost: nothing is hooked in, and `hold` returns at once. Armed only by the setting
`test_faults`, a comma separated list:

    kill=EVENT[:n]            SIGKILL to this process where it traces that event for the nth time (names: docs/tracing.md)
    stop=EVENT[:n]            SIGSTOP there
    lose=MESSAGE[:which]      these messages are not sent
    repeat=MESSAGE[:which]    they are sent again, REPEAT_SECONDS later
    delay=MESSAGE:s[:which]   they are sent s seconds later
    hold=PLACE:s[:which]      wait s seconds in front of a `flush` or a `write` of a hand-off
    freeze=PLACE:s[:which]    the whole process does nothing for s seconds there
    remote                    nothing now; the command `arm` on the bus arms faults while the process runs

MESSAGE: a verb (`bind`, `cancel` ...), a role and its verb (`decode.commit`), `out`, or the class of an answer (`Bound` ...).
`which`: `3` the third one, `3+` all from the third on, `5%` each with this probability; without: each (kill, stop: the first).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import BusError

REPEAT_SECONDS = 0.05
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
MESSAGES = ("lose", "repeat", "delay")
PLACES = ("flush", "write")
HOLDS = ("hold", "freeze")
TIMED = ("delay", *HOLDS)
USAGE = (
    "write kill=EVENT, stop=EVENT, lose=MESSAGE, repeat=MESSAGE, delay=MESSAGE:SECONDS, hold=flush|write:SECONDS, "
    "freeze=flush|write:SECONDS or remote"
)


@dataclass
class Point:
    """One fault. `due()` counts an occasion and says whether the fault happens at it."""

    kind: str
    name: str
    seconds: float = 0.0
    first: int = 1
    last: int = 1 << 62
    share: float = 1.0
    seen: int = 0

    def due(self) -> bool:
        self.seen += 1
        return self.first <= self.seen <= self.last and (self.share >= 1 or random.random() < self.share)


def parse(text: str) -> list[Point]:
    """The points of a setting. ValueError quotes the part that is none, and says what would be one."""
    points = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part != "remote":
            points.append(_point(part))
    return points


def _point(part: str) -> Point:
    kind, _, rest = part.partition("=")
    name, *more = rest.split(":")
    wrong = ValueError(f"{part!r} is no fault point; {USAGE}")
    if not name or kind not in (*SIGNALS, *MESSAGES, *HOLDS) or (kind in HOLDS and name not in PLACES):
        raise wrong
    try:
        point = Point(kind, name, float(more.pop(0)) if kind in TIMED else 0.0)
        if kind in SIGNALS:
            point.last = 1
        if more:
            _choose(point, more.pop(0))
    except (ValueError, IndexError):
        raise wrong from None
    if more:
        raise wrong
    return point


def _choose(point: Point, which: str) -> None:
    if which.endswith("%"):
        point.share = float(which[:-1]) / 100
    elif which.endswith("+"):
        point.first = int(which[:-1])
    else:
        point.first = point.last = int(which)


class Faults:
    """The fault points of one process."""

    def __init__(self, text: str = "") -> None:
        self.remote = "remote" in (part.strip() for part in text.split(","))
        self.points = parse(text)
        self._hooked = False

    def hook(self, bus: Any, trace: Any) -> None:
        """Put the points between the service and its bus and trace. Does nothing where there are and will be none."""
        if self._hooked or not (self.points or self.remote):
            return
        self._hooked = True
        traced, send = trace.event, bus.send

        def event(request: str, event: str, *args: Any, **data: Any) -> None:
            self.at(event)
            traced(request, event, *args, **data)

        def disturbed(subject: bytes, data: bytes, reply: bytes, headers: bytes, message: Any) -> None:
            self.sends(message_names(subject, message), lambda: send(subject, data, reply, headers, message))

        trace.event, bus.send = event, disturbed

    def arm(self, text: str) -> None:
        """Replace all points. ValueError as of `parse`."""
        self.points = parse(text)

    def at(self, event: str) -> None:
        """This event is about to be traced."""
        for point in self.points:
            if point.kind in SIGNALS and point.name == event and point.due():
                os.kill(os.getpid(), SIGNALS[point.kind])

    def sends(self, names: tuple[str, ...], send: Callable[[], None]) -> None:
        """Send a message that is called so, or not, or twice, or later."""
        for point in self.points:
            if point.name not in names or point.kind not in MESSAGES or not point.due():
                continue
            if point.kind == "lose":
                return
            loop = asyncio.get_running_loop()
            loop.call_later(point.seconds or REPEAT_SECONDS, _quietly, send)
            if point.kind == "delay":
                return
        send()

    async def hold(self, place: str) -> float:
        """Wait at a place in a hand-off, if a point says so. -> seconds waited"""
        waited = 0.0
        for point in self.points:
            if point.kind in HOLDS and point.name == place and point.due():
                if point.kind == "freeze":
                    time.sleep(point.seconds)  # noqa: ASYNC251  on purpose
                else:
                    await asyncio.sleep(point.seconds)
                waited += point.seconds
        return waited


def _quietly(send: Callable[[], None]) -> None:
    with contextlib.suppress(BusError):  # off the bus by now: lost, as any message may be
        send()


def message_names(subject: bytes, message: Any) -> tuple[str, ...]:
    """`bind` and `decode.bind` of headrace.decode.X.bind, `out` of headrace.out.X, the class of an answer."""
    parts = subject.decode().split(".")
    if parts[0] != "headrace":
        return (type(message).__name__,)
    return (parts[3], f"{parts[1]}.{parts[3]}") if len(parts) == 4 else (parts[1],)
