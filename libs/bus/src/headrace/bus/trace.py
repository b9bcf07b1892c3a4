"""The life of a request as events: kept in a ring, published as JSON.

Knows: `headrace.trace.<request>.<event>`, one JSON object per event: ts (unix seconds), request, event, instance, ms (a
duration that ends at ts), and whatever the caller adds. `nats sub 'headrace.trace.>'` is the tracing tool; `gather` asks every
instance for what it remembers, so a trace can be had afterwards too.
Does not know: what events mean.

An event costs no system call of its own while there is traffic: it travels with the next message that this process sends, or
after 10 ms. So on the wire events of different processes may swap places within that time; `ts` has their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from . import messages as m
from .connection import Bus
from .errors import BusError
from .subjects import PREFIX

RING = 16_384  # events remembered per process
PATIENCE = 0.01  # seconds until an event is published without company

_encode = msgspec.json.Encoder(enc_hook=str).encode


class Trace:
    """`event()` costs a tuple and two appends; encoding happens when it is sent."""

    def __init__(self, bus: Bus | None, instance: str, capacity: int = RING, publish: bool = True):
        self._bus, self._instance = bus, instance
        self._ring: deque[tuple[float, str, str, float | None, dict[str, Any]]] = deque(maxlen=capacity)
        self._unsent: list[tuple[float, str, str, float | None, dict[str, Any]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        if bus is not None and publish:
            self._loop = asyncio.get_running_loop()
            bus.ride(self._flush)

    def event(self, request: str, event: str, ms: float | None = None, **data: Any) -> None:
        """`request`: the server's id. `event`: "<role>.<what>". `ms`: a duration in milliseconds that ends now."""
        entry = (time.time(), request, event, ms, data)
        self._ring.append(entry)
        if self._loop is not None:
            self._unsent.append(entry)
            if self._timer is None:
                self._timer = self._loop.call_later(PATIENCE, self._on_timer)

    def remembered(self, request: str) -> list[dict[str, Any]]:
        """Events of one request, by the server's id or by the client's where an event carries `client_id`."""
        ids = {request} | {entry[1] for entry in self._ring if entry[4].get("client_id") == request}
        return [self._as_dict(entry) for entry in self._ring if entry[1] in ids]

    def _as_dict(self, entry: tuple[float, str, str, float | None, dict[str, Any]]) -> dict[str, Any]:
        ts, request, event, ms, data = entry
        out: dict[str, Any] = {"ts": ts, "request": request, "event": event, "instance": self._instance}
        if ms is not None:
            out["ms"] = round(ms, 3)
        return out | data

    def _on_timer(self) -> None:
        """The timer runs on while events come, so that it is not armed and cancelled for each."""
        self._timer = self._loop.call_later(PATIENCE, self._on_timer) if self._unsent else None  # type: ignore[union-attr]
        self._flush()

    def _flush(self) -> None:
        if not self._unsent:
            return
        unsent, self._unsent = self._unsent, []
        bus = self._bus
        assert bus is not None
        with contextlib.suppress(BusError):  # the ring still has them
            for entry in unsent:
                bus.publish_bytes(f"{PREFIX}.trace.{entry[1]}.{entry[2]}", _encode(self._as_dict(entry)))


async def gather(bus: Bus, instances: Iterable[tuple[str, str]], request: str, timeout: float = 1.0) -> list[dict[str, Any]]:
    """Ask (role, instance) pairs what they remember; -> events by time. Instances that don't answer are left out.

    A client's id is first resolved by the gateways, which alone know it, then asked for everywhere."""
    instances = list(instances)

    async def ask(name: str) -> list[dict[str, Any]]:
        answers = await asyncio.gather(
            *(bus.request(role, instance, "trace", m.TraceGet(name), timeout) for role, instance in instances),
            return_exceptions=True,
        )
        return [event for answer in answers if isinstance(answer, m.TraceEvents) for event in answer.events]

    events = await ask(request)
    for name in {event["request"] for event in events} - {request}:
        events += await ask(name)
    unique = {(e["ts"], e["instance"], e["event"], e["request"]): e for e in events}
    return sorted(unique.values(), key=lambda e: e["ts"])
