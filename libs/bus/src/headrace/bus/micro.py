"""NATS service discovery: answers `$SRV.PING`, `$SRV.INFO` and `$SRV.STATS`, for `nats micro ls|info|stats`.

The answers are nats-py's own types; counting is ours, because commands are dispatched synchronously (see `connection.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from nats.micro.service import EndpointInfo, EndpointStats, ServiceInfo, ServicePing, ServiceStats

from .connection import Bus, Subscription


@dataclass(slots=True)
class VerbStats:
    """Counters of one verb; `nanoseconds` is time spent in its handler."""

    subject: str
    requests: int = 0
    errors: int = 0
    nanoseconds: int = 0
    last_error: str = ""


class MicroService:
    """One per process. `verbs` is shared with the dispatcher, which counts."""

    def __init__(self, bus: Bus, name: str, instance: str, version: str, description: str, metadata: dict[str, str],
                 verbs: dict[str, VerbStats]):  # fmt: skip
        self._bus, self._verbs = bus, verbs
        self._identity = {"id": instance, "name": name, "version": version, "metadata": metadata}
        self._description = description
        self._started = datetime.now(UTC).replace(tzinfo=None)
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        for verb, answer in (("PING", self._ping), ("INFO", self._info), ("STATS", self._stats)):
            name = f"$SRV.{verb}.{self._identity['name']}"
            for subject in (f"$SRV.{verb}", name, f"{name}.{self._identity['id']}"):
                self._subscriptions.append(await self._bus.subscribe_bytes(subject, self._answering(answer)))

    async def stop(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()

    def _answering(self, answer: Callable[[], dict[str, Any]]) -> Callable[[bytes, str, str], None]:
        def callback(data: bytes, subject: str, reply: str) -> None:
            if reply:
                self._bus.publish_bytes(reply, json.dumps(answer()).encode())

        return callback

    def _ping(self) -> dict[str, Any]:
        return ServicePing(**self._identity).to_dict()

    def _info(self) -> dict[str, Any]:
        endpoints = [EndpointInfo(name=verb, subject=s.subject, queue_group="", metadata={}) for verb, s in self._verbs.items()]
        return ServiceInfo(**self._identity, description=self._description, endpoints=endpoints).to_dict()

    def _stats(self) -> dict[str, Any]:
        endpoints = [
            EndpointStats(
                name=verb, subject=s.subject, queue_group="", num_requests=s.requests, num_errors=s.errors,
                processing_time=s.nanoseconds, average_processing_time=s.nanoseconds // s.requests if s.requests else 0,
                last_error=s.last_error or None,
            )
            for verb, s in self._verbs.items()
        ]  # fmt: skip
        return ServiceStats(**self._identity, started=self._started, endpoints=endpoints).to_dict()
