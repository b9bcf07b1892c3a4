"""What the system itself says while it is disturbed: its trace events, as they come.

Knows: which worker served which request, and when somebody first reacted to a fault. Does not know what the fault was.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.bus import Bus, subjects
from headrace.bus.connection import Subscription

REMEMBERED = 20_000  # events, and requests

# Events by which a service shows that it noticed something: another attempt, an error, a leg that ended early.
REACTIONS = frozenset({"gateway.retry", "gateway.failed", "gateway.migrate", "gateway.vision_lost", "prefill.failed"})
ENDS_BADLY = ("gateway_died", "handoff_", "prefill_", "deadline")  # reasons of decode.finished


@dataclass(frozen=True)
class Event:
    """`ts`: Unix seconds, by the clock of this machine."""

    ts: float
    request: str
    name: str
    instance: str
    data: dict[str, Any]

    @property
    def reacts(self) -> bool:
        if self.name == "decode.finished":
            return str(self.data.get("why", "")).startswith(ENDS_BADLY)
        return self.name in REACTIONS

    @property
    def asks_another(self) -> bool:
        """A later attempt: a worker was full, or gave no answer."""
        return self.name == "gateway.admitted" and self.data.get("attempt", 1) > 1


class Watch:
    """`await watch.start(bus)`; then `events` fills, newest last."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque(maxlen=REMEMBERED)
        self.on_event: Callable[[Event], None] = lambda event: None
        self._served: OrderedDict[str, set[str]] = OrderedDict()  # request -> instances that had a leg of it
        self._subscription: Subscription | None = None

    async def start(self, bus: Bus) -> None:
        self._subscription = await bus.subscribe_bytes(subjects.TRACE, self._on_event)

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.close()

    def _on_event(self, payload: bytes, subject: str, reply: str) -> None:
        value = json.loads(payload)
        event = Event(value.pop("ts"), value.pop("request"), value.pop("event"), value.pop("instance"), value)
        self.events.append(event)
        self.on_event(event)
        leg = event.data.get("decode") if event.name == "gateway.admitted" else None
        leg = event.data.get("prefill") if event.name == "gateway.accepted" else leg
        if leg:
            self._served.setdefault(event.request, set()).add(leg)
            if len(self._served) > REMEMBERED:
                self._served.popitem(last=False)

    def served_by(self, request: str) -> set[str]:
        """Instances of workers that had a leg of this request."""
        return self._served.get(request, set())

    def first_reaction(self, since: float, quiet: bool = False) -> Event | None:
        """The earliest reaction after `since` (Unix seconds). Where nobody says anything and `quiet` is allowed: the first time
        that a gateway asked another worker."""
        late = [e for e in self.events if e.ts >= since]
        found = [e for e in late if e.reacts] or [e for e in late if quiet and e.asks_another]
        return min(found, key=lambda e: e.ts, default=None)


def to_unix(monotonic: float) -> float:
    """A time of time.monotonic() as Unix time."""
    return time.time() - time.monotonic() + monotonic
