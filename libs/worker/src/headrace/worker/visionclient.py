"""The vision service as prefill sees it: embeddings of images, delivered into this worker's own memory.

Knows the verbs `encode` and `cancel`, when to ask again and when to give up. Does not know prompts. A delivery has one grant;
when it is given up before its end the room stays in quarantine until vision says that it is done, or is proven dead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from headrace.bus import BusError, BusTimeout, NoResponder
from headrace.bus import messages as m
from headrace.transfer import Address

from .staging import Room, Staging, StagingError

ASK_SECONDS = 1.0  # patience with one question; vision answers `Working` well before that
SILENCE_SECONDS = 3.0  # unanswered questions for this long: it is gone
GRANT_SECONDS = 30.0  # longest life of a grant


class VisionError(Exception):
    """No embeddings. `code`: vision_lost (gone or silent) | vision_unknown (the pixels are gone: identify again) |
    vision_busy | vision_failed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class VisionClient:
    """`find(instance)`: its presence, or None."""

    def __init__(
        self, bus: Any, instance: str, staging: Staging, address: Callable[[], bytes], find: Callable[[str], m.Presence | None],
        row_bytes: int, dtype: str,
    ) -> None:  # fmt: skip
        self.staging, self.row_bytes, self.dtype = staging, row_bytes, dtype
        self._bus, self._instance, self._address, self._find = bus, instance, address, find
        self._side: set[asyncio.Task] = set()
        self.counters = dict.fromkeys(("requests", "images", "bytes", "failures", "computed_patches"), 0)

    async def fetch(
        self, vision: str, request: str, namespace: bytes, images: Sequence[m.ImageSpan], deadline: float, client_id: str = ""
    ) -> tuple[dict[bytes, bytes], m.Encoded]:
        """digest -> rows [tokens, hidden], and vision's answer. `deadline`: monotonic seconds. Raises VisionError."""
        wanted = {image.digest: image.tokens for image in images}
        self.counters["requests"] += 1
        try:
            room = await self._room(vision, [tokens * self.row_bytes for tokens in wanted.values()], deadline)
            try:
                answer = await self._encode(vision, request, namespace, wanted, room, deadline, client_id)
                parts = await asyncio.shield(self.staging.take(room, answer.checksums, time.monotonic))
            except BaseException:
                self._give_up(vision, room)
                raise
        except StagingError as error:
            self.counters["failures"] += 1
            raise VisionError("vision_failed", f"the embeddings from {vision} were refused: {error}") from error
        except VisionError:
            self.counters["failures"] += 1
            raise
        self.counters["images"] += len(parts)
        self.counters["bytes"] += sum(map(len, parts))
        self.counters["computed_patches"] += answer.computed
        return dict(zip(wanted, parts, strict=True)), answer

    async def stop(self) -> None:
        for task in self._side:
            task.cancel()
        await asyncio.gather(*self._side, return_exceptions=True)

    # ------------------------------------------------------------ below

    async def _room(self, vision: str, sizes: list[int], deadline: float) -> Room:
        presence = self._find(vision)
        if presence is None or not presence.memory:
            raise VisionError("vision_lost", f"{vision}, which identified the images, is gone")
        writer = Address.decode(presence.memory).incarnation
        while True:
            now = time.monotonic()
            try:
                room = self.staging.grant(writer, vision, sizes, min(GRANT_SECONDS, deadline - now), now)
            except ValueError as error:
                raise VisionError("vision_failed", f"{error}; raise --image-bytes") from error
            if room is not None:
                return room
            await asyncio.sleep(0.02)  # others' deliveries are under way; the caller's deadline ends this

    async def _encode(
        self, vision: str, request: str, namespace: bytes, wanted: dict[bytes, int], room: Room, deadline: float, client_id: str
    ) -> m.Encoded:
        """Ask until there is a result. Vision says `Working` in between, so silence means that it is gone."""
        expires, heard = time.monotonic() + min(GRANT_SECONDS, deadline - time.monotonic()), time.monotonic()
        while True:
            now = time.monotonic()
            if now >= expires:
                raise VisionError("vision_busy", f"{vision} did not encode {len(wanted)} images within {GRANT_SECONDS:g} s")
            message = m.Encode(
                request, self._instance, namespace, list(wanted), list(wanted.values()), room.grant, room.generation,
                list(room.offsets), self.row_bytes, self.dtype, self._address(), expires - now, deadline - now, client_id,
            )  # fmt: skip
            try:
                answer = await self._bus.request("vision", vision, "encode", message, ASK_SECONDS)
            except NoResponder as error:
                raise VisionError("vision_lost", f"{vision} is gone: {error}") from error
            except BusTimeout as error:
                if now - heard > SILENCE_SECONDS:
                    raise VisionError("vision_lost", f"{vision} is silent: {error}") from error
                continue
            except BusError:
                await asyncio.sleep(0.05)  # our own connection is down: nothing can be said
                continue
            heard = time.monotonic()
            if isinstance(answer, m.Encoded):
                return answer
            if isinstance(answer, m.Refused):
                code = {"unknown": "vision_unknown", "busy": "vision_busy", "draining": "vision_lost"}.get(answer.code)
                raise VisionError(code or "vision_failed", f"{vision}: {answer.message}")

    def _give_up(self, vision: str, room: Room) -> None:
        """Nobody waits any more: fence the grant, and tell the writer."""
        self.staging.abandon(room, time.monotonic())
        task = asyncio.ensure_future(self._tell_cancel(vision, room.grant))
        self._side.add(task)
        task.add_done_callback(self._side.discard)

    async def _tell_cancel(self, vision: str, grant: str) -> None:
        try:
            answer = await self._bus.request("vision", vision, "cancel", m.EncodeCancel(grant), ASK_SECONDS)
        except BusError:
            return  # the staging's own questions go on
        if isinstance(answer, m.Done):
            self.staging.writer_says(grant, "done", time.monotonic())


def ask_grant(bus: Any, role: str, staging: Callable[[], Staging], side: set[asyncio.Task]) -> Callable[[str, str], None]:
    """How a `Staging` asks the writers of its expired grants: `headrace.<role>.<sender>.grant`."""

    async def ask(sender: str, grant: str) -> None:
        try:
            answer = await bus.request(role, sender, "grant", m.TicketStatus(grant), ASK_SECONDS)
        except BusError:
            return  # asked again in 0.25 s; a dead writer is proven by its lock or its connection
        if isinstance(answer, m.Done):
            staging().writer_says(grant, answer.state, time.monotonic())

    def start(sender: str, grant: str) -> None:
        task = asyncio.ensure_future(ask(sender, grant))
        side.add(task)
        task.add_done_callback(side.discard)

    return start


