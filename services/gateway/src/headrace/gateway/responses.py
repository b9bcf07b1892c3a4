"""Responses that stay after they were answered: `store`, retrieval, cancelling, `previous_response_id`.

Knows: what is kept here, for whom and for how long; how to ask another gateway for what is kept there. A response lives in
the memory of the gateway that made it, whose name is part of the response's id; nothing of it outlives that process. Does
not know: HTTP, what is in a response.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.bus import Bus, BusError, BusTimeout, Disconnected, NoResponder, TooLarge
from headrace.bus import messages as m
from headrace.recipe.jsontext import compact, loads

from . import errors

ID = re.compile(r"resp_([A-Za-z0-9]{22})_([A-Za-z0-9]{22})")  # request, owner: safe in a subject
ASK_SECONDS = 5.0


def response_id(request: str, gateway: str) -> str:
    """`gateway` is the instance that keeps it."""
    return f"resp_{request}_{gateway.removeprefix('gateway-')}"


@dataclass(slots=True)
class Kept:
    """One response. While it is made `progress` shows it and `cancel` ends it; then `body` is its JSON."""

    tenant: bytes
    input: bytes
    progress: Callable[[], dict[str, Any]] | None
    cancel: Callable[[], None]
    status: str = "in_progress"
    body: bytes = b""
    until: float = 0.0  # monotonic

    @property
    def nbytes(self) -> int:
        return 512 + len(self.input) + len(self.body)


class ResponseStore:
    """Responses of one gateway: those in the making, and those that are over, oldest dropped first."""

    def __init__(self, max_bytes: int, seconds: float):
        self.max_bytes, self.seconds = max_bytes, seconds
        self.bytes = 0  # of those that are over
        self._making: dict[str, Kept] = {}
        self._over: OrderedDict[str, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._over)

    def begin(self, name: str, kept: Kept) -> None:
        """A response is being made."""
        self._making[name] = kept

    def end(self, name: str, body: dict[str, Any] | None) -> None:
        """It is over; None: it is not to be kept. Also after `delete`, which wins."""
        self._expire()
        kept = self._making.pop(name, None)
        if kept is None or body is None:
            return
        kept.status, kept.body, kept.progress = body["status"], compact(body).encode(), None
        kept.cancel = _nothing
        kept.until = time.monotonic() + self.seconds
        if kept.nbytes > self.max_bytes:
            return
        self._over[name] = kept
        self.bytes += kept.nbytes
        while self.bytes > self.max_bytes:
            self._drop(next(iter(self._over)))

    def answer(self, ask: m.ResponseAsk) -> m.ResponseKept | m.Refused:
        """Carry out what a client of `ask.tenant` wants. What belongs to others does not exist."""
        self._expire()
        kept = self._making.get(ask.id) or self._over.get(ask.id)
        if kept is None or kept.tenant != ask.tenant:
            return m.Refused("unknown", f"there is no response `{ask.id}`; responses are kept in memory for {self.seconds:g} s")
        if ask.what == "cancel" and kept.status != "cancelled":  # twice is as good as once
            if kept.progress is None:
                return m.Refused(
                    "invalid", f"response `{ask.id}` is over ({kept.status}); only one in progress can be cancelled"
                )
            progress = kept.progress
            kept.cancel()
            return m.ResponseKept("cancelled", compact(progress()).encode())
        if ask.what == "delete":
            if ask.id in self._over:
                self._drop(ask.id)
            else:
                del self._making[ask.id]
                kept.cancel()
            return m.ResponseKept("deleted", compact({"id": ask.id, "object": "response", "deleted": True}).encode())
        if kept.progress is not None:
            return m.ResponseKept(kept.status, compact(kept.progress()).encode())
        return m.ResponseKept(kept.status, kept.body, kept.input)

    def _expire(self) -> None:
        now = time.monotonic()
        while self._over and (oldest := next(iter(self._over.items())))[1].until <= now:
            self._drop(oldest[0])

    def _drop(self, name: str) -> None:
        self.bytes -= self._over.pop(name).nbytes


class Responses:
    """What this gateway keeps, and the way to what others keep."""

    def __init__(self, bus: Bus, instance: str, store: ResponseStore):
        self._bus, self._instance, self.store = bus, instance, store

    async def ask(self, name: str, tenant: bytes, what: str = "get") -> m.ResponseKept:
        """Raises GatewayError: 404 unknown, 400 not possible, 503 the owner does not answer."""
        found = ID.fullmatch(name)
        if found is None:
            raise errors.no_response(f"there is no response `{name[:100]}`: that is no id of a response")
        owner = f"gateway-{found[2]}"
        message = m.ResponseAsk(name, tenant, what)
        answer = self.store.answer(message) if owner == self._instance else await self._elsewhere(owner, message)
        if isinstance(answer, m.ResponseKept):
            return answer
        text = answer.message if isinstance(answer, m.Refused) else "the gateway that keeps it gave no sensible answer"
        raise errors.invalid(text) if getattr(answer, "code", "") == "invalid" else errors.no_response(text)

    async def _elsewhere(self, owner: str, message: m.ResponseAsk) -> m.Message:
        try:
            return await self._bus.request("gateway", owner, "response", message, ASK_SECONDS)
        except NoResponder:
            raise errors.no_response(f"there is no response `{message.id}`: the gateway that kept it is gone") from None
        except (BusTimeout, Disconnected):
            raise errors.owner_silent(message.id) from None
        except (TooLarge, BusError) as error:
            raise errors.no_response(f"response `{message.id}` can't be brought here: {error}") from None

    async def continued(self, body: dict[str, Any], tenant: bytes) -> None:
        """Put the turns before `previous_response_id` in front of the input. Raises GatewayError."""
        name = body.get("previous_response_id")
        if not isinstance(name, str):
            if name is not None:
                raise errors.invalid("`previous_response_id` must be a string", "previous_response_id")
            return
        before = await self.ask(name, tenant)
        if before.status not in ("completed", "incomplete"):
            raise errors.invalid(f"response `{name}` is {before.status}; it can't be continued", "previous_response_id")
        items, own = loads(before.input) + loads(before.body)["output"], input_items(body)
        if own is not None:  # of another type: the parser says so
            body["input"] = items + own


def input_items(body: dict[str, Any]) -> list[Any] | None:
    """The input of a request as a list of items; None when it is neither text nor a list."""
    given = body.get("input")
    if given is None:
        return []
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given if isinstance(given, list) else None


def _nothing() -> None:
    pass
