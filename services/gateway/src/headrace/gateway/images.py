"""Images of a request: handed to a vision worker, which says how many tokens each takes and what it is.

Knows the verbs `deposit` and `identify`, which worker to ask and when to ask again, and how placeholders become spans. Does not
know pixels or prompts' texts. All images of a request go to one worker: it holds their pixels until prefill wants embeddings.
The bytes of an image go there out of band under a grant; of an image by URL the URL is sent, and the worker fetches it.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from zlib import crc32

import structlog

from headrace.bus import Bus, BusError, BusTimeout, Disconnected, NoResponder, Peers, Prober, Trace
from headrace.bus import messages as m
from headrace.bus.presence import answers
from headrace.kv.grants import Writing
from headrace.recipe import ImageSource
from headrace.recipe.images import MAX_IMAGE_BYTES, MAX_IMAGES, MAX_REQUEST_BYTES, MAX_URL, ImageError, decode_data_url
from headrace.transfer import Links, Memory, TransferError

from . import errors
from .errors import GatewayError
from .routing import Group

AT_ONCE = 8  # images of one request that are under way
DEPOSIT_SECONDS = 10.0  # life of a deposit's grant
SILENCE_SECONDS = 3.0  # a worker that answers nothing for so long is gone
ROUNDS = 4  # workers tried for one request

log = structlog.get_logger("headrace.gateway")


class Lost(Exception):
    """The vision worker is gone: another one may do."""


@dataclass(slots=True, eq=False)
class Seen:
    """The images of one request, identified. `vision`: the worker that holds their pixels."""

    request: str
    sources: Sequence[ImageSource]
    namespace: bytes
    group: Group
    client_id: str
    deadline: float  # monotonic seconds
    vision: str = ""
    found: list[m.Identified] = field(default_factory=list)
    spans: list[m.ImageSpan] = field(default_factory=list)
    round: int = 0
    failed: set[str] = field(default_factory=set)  # workers that were lost


class Images:
    """One per gateway."""

    def __init__(self, bus: Bus, peers: Peers, prober: Prober, instance: str, trace: Trace, settings: Any):
        self._prober = prober  # which makes the dead leave
        self._bus, self._peers, self._instance, self._trace, self._settings = bus, peers, instance, trace, settings
        self.writing = Writing()
        self.counters = dict.fromkeys(("images", "image_bytes", "image_refusals", "vision_losses"), 0)
        self._memory: Memory | None = None
        self._links: Links | None = None
        self._copies: set[asyncio.Task[int]] = set()  # of images' bytes; one may outlive the request that began it
        self._busy = 0  # requests whose images are being identified
        self._came = asyncio.Event()  # set whenever a vision worker speaks for the first time, or again
        self._gone: dict[str, asyncio.Future[None]] = {}  # worker -> set when it leaves
        peers.watch(self._on_presence)

    async def look(
        self, request: str, sources: Sequence[ImageSource], namespace: bytes, group: Group, deadline: float, client_id: str
    ) -> Seen:
        """Identify the images of a request. Raises GatewayError, which names the image's place."""
        if not group.sees:
            raise errors.invalid(f"the model `{group.model}` reads text only; send no images", sources[0].place or "messages")
        if len(sources) > MAX_IMAGES:
            raise self._refusal(sources, MAX_IMAGES, f"{len(sources)} images; a request may have {MAX_IMAGES}")
        if self._busy >= self._settings.image_requests:
            limit = self._settings.image_requests
            raise errors.busy(f"{self._busy} requests with images are being read here; the limit is {limit}")
        seen = Seen(request, sources, namespace, group, client_id, deadline)
        await self.again(seen)
        return seen

    async def again(self, seen: Seen) -> None:
        """Identify, or identify once more, because the pixels or their worker are gone. Raises GatewayError, at the request's
        deadline at the latest: no question, no worker that is looked for and no copy that takes its time keeps the client."""
        before = seen.found
        self._busy += 1
        try:
            async with asyncio.timeout(seen.deadline - time.monotonic()):
                await self._rounds(seen)
        except TimeoutError:
            raise errors.deadline(self._settings.request_seconds) from None
        finally:
            self._busy -= 1
        if before and [f.digest for f in before] != [f.digest for f in seen.found]:
            number = next(i for i, (a, b) in enumerate(zip(before, seen.found, strict=True)) if a.digest != b.digest)
            raise self._refusal(seen.sources, number, "the image behind this URL changed while the request ran; send it again")

    async def stop(self) -> None:
        if self._copies:
            await asyncio.wait([*self._copies])
        for part in (self._links, self._memory):
            if part is not None:
                await part.close()

    def grant_status(self, message: m.TicketStatus) -> m.Done:
        """A vision worker holds room in quarantine: do we still write there?"""
        return m.Done(self.writing.status(message.ticket, time.monotonic()))

    # ------------------------------------------------------------ one request

    async def _rounds(self, seen: Seen) -> None:
        for _ in range(ROUNDS):
            presence = await self._worker(seen)
            seen.round += 1
            began = time.monotonic()
            try:
                seen.found = await self._identify_all(seen, presence)
            except Lost as error:
                self.counters["vision_losses"] += 1
                log.warning("vision worker lost", vision=presence.instance, why=str(error))
                self._trace.event(seen.request, "gateway.vision_lost", None, vision=presence.instance, why=str(error))
                seen.failed.add(presence.instance)
                continue
            seen.vision = presence.instance
            self._trace.event(
                seen.request, "gateway.identified", (time.monotonic() - began) * 1e3, images=len(seen.found),
                vision=presence.instance, tokens=sum(found.tokens for found in seen.found),
            )  # fmt: skip
            return
        raise errors.no_vision(True)

    async def _worker(self, seen: Seen) -> m.Presence:
        """One that may be asked; where none is there (killed, restarting), whoever comes soon. Raises GatewayError."""
        began, patience = time.monotonic(), self._settings.worker_seconds
        while (presence := self._choose(seen)) is None:
            self._came.clear()
            left = min(began + patience, seen.deadline) - time.monotonic()
            try:
                async with asyncio.timeout(left):
                    await self._came.wait()
            except TimeoutError:
                raise errors.no_vision(bool(seen.failed), patience) from None
        return presence

    def _on_presence(self, kind: str, presence: m.Presence) -> None:
        if presence.role != "vision":
            return
        if kind in ("join", "state", "epoch"):
            self._came.set()
        elif kind == "leave" and (gone := self._gone.pop(presence.instance, None)) is not None:
            gone.set_result(None)

    def _choose(self, seen: Seen) -> m.Presence | None:
        """The worker that is likely to know the first image: in a conversation, images are added at the end. Those that were
        lost come last: one that speaks again was only silent."""
        first = seen.sources[0].value
        key = blake2b(first[:65536].encode() if isinstance(first, str) else first[:65536], digest_size=16).digest()
        there = [
            p for p in self._peers.by_role("vision")
            if p.checkpoint == seen.group.checkpoint and p.memory
        ]  # fmt: skip
        there = [p for p in there if p.instance not in seen.failed] or there
        return max(there, key=lambda p: blake2b(p.instance.encode(), key=key, digest_size=8).digest(), default=None)

    async def _identify_all(self, seen: Seen, presence: m.Presence) -> list[m.Identified]:
        budget = _Budget(MAX_REQUEST_BYTES)
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> m.Identified:
            async with gate:
                return await self._identify(seen, presence, number, budget)

        instance = presence.instance
        gone = self._gone.setdefault(instance, asyncio.get_running_loop().create_future())
        self._prober.watch("vision", instance)
        found = asyncio.gather(*(one(number) for number in range(len(seen.sources))))
        try:
            await asyncio.wait({found, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not found.done():
                raise Lost(f"{instance} is gone")
            return list(found.result())
        finally:
            if not gone.done():  # else the prober has let go of it
                self._prober.unwatch(instance)
            found.cancel()
            await asyncio.gather(found, return_exceptions=True)

    async def _identify(self, seen: Seen, presence: m.Presence, number: int, budget: _Budget) -> m.Identified:
        source = seen.sources[number]
        try:
            data = b"" if source.kind == "url" else await self._bytes_of(source)
            if source.kind == "url" and len(source.value) > MAX_URL:
                raise ImageError("UrlTooLong", f"the URL has {len(source.value):,} characters; at most {MAX_URL:,} are read")
            budget.take(len(data))
        except ImageError as error:
            raise self._refused(seen, number, error.kind, error.message) from None
        while True:
            answer = await self._ask(seen, presence, number, data, budget)
            if isinstance(answer, m.Identified):
                break
            if isinstance(answer, m.ImageRefused):
                raise self._refused(seen, number, answer.kind, answer.message)
            if answer.code == "draining":
                raise Lost(answer.message)
            if answer.code not in ("unknown", "busy", "full"):
                raise errors.from_refusal(answer, "vision")
            if time.monotonic() + answer.retry_after >= seen.deadline:
                raise errors.busy(f"vision: {answer.message}", answer.retry_after)
            await asyncio.sleep(max(answer.retry_after, 0.01))
        try:
            budget.take(answer.nbytes if source.kind == "url" else 0)
        except ImageError as error:
            raise self._refused(seen, number, error.kind, error.message) from None
        self.counters["images"] += 1
        self.counters["image_bytes"] += answer.nbytes
        return answer

    async def _ask(
        self, seen: Seen, presence: m.Presence, number: int, data: bytes, budget: _Budget
    ) -> m.Identified | m.ImageRefused | m.Refused:
        """Deposit, then ask until there is an answer. Raises Lost, GatewayError."""
        source, now = seen.sources[number], time.monotonic()
        message = m.Identify(
            seen.request, number, seen.namespace, max(0.0, seen.deadline - now), source.detail,
            max_bytes=min(MAX_IMAGE_BYTES, budget.left), round=seen.round, client_id=seen.client_id,
        )  # fmt: skip
        if source.kind == "url":
            message.url = str(source.value)
        else:
            placed = await self._deposit(seen, presence, data)
            if isinstance(placed, m.Refused):
                return placed
            message.grant, message.generation, message.checksum = placed
        while True:
            answer = await self._request(seen, presence, "identify", message)
            if not isinstance(answer, m.Working):
                return answer

    async def _deposit(self, seen: Seen, presence: m.Presence, data: bytes) -> tuple[str, int, int] | m.Refused:
        """Place the bytes in the worker's intake -> (grant, generation, crc32)."""
        links, memory = self._reach()
        ask = m.Deposit(seen.request, memory.incarnation, self._instance, len(data), DEPOSIT_SECONDS)
        began = time.monotonic()
        room = await self._request(seen, presence, "deposit", ask)
        if isinstance(room, m.Refused):
            return room
        if not self.writing.begin(room.grant):
            return m.Refused("unknown", "the worker asked for this deposit before we knew it")
        copy = asyncio.create_task(self._copy(links, room, data, min(began + DEPOSIT_SECONDS - 1.0, seen.deadline)))
        self._copies.add(copy)
        copy.add_done_callback(lambda _: self._copied(copy, room.grant))
        try:
            await asyncio.wait([copy])
        finally:
            copy.cancel()  # who can't wait any longer does not wait for bytes that are on their way
        try:
            checksum = copy.result()
        except TransferError as error:
            raise Lost(f"{presence.instance} does not take bytes: {error}") from error
        return room.grant, room.generation, checksum

    @staticmethod
    async def _copy(links: Links, room: m.Deposited, data: bytes, deadline: float) -> int:
        """Write the bytes of an image -> their crc32. Raises TransferError. Cancelled, it ends when no more bytes can land."""
        peer = await links.get(room.memory, max(0.0, min(2.0, deadline - time.monotonic())))
        await peer.write("intake", [(room.offset, data)], room.generation, deadline)
        await peer.flush(deadline, room.generation)
        return crc32(data) if len(data) <= 65536 else await asyncio.to_thread(crc32, data)

    def _copied(self, copy: asyncio.Task[int], grant: str) -> None:
        """Nothing is written under this grant any more."""
        self._copies.discard(copy)
        self.writing.end(grant, time.monotonic())
        if not copy.cancelled():
            copy.exception()  # was told to whoever still waited

    async def _request(self, seen: Seen, presence: m.Presence, verb: str, message: m.Message) -> Any:
        """The answer. Raises Lost when there is none, GatewayError at the deadline."""
        heard, off = time.monotonic(), 0.0
        while True:
            now = time.monotonic()
            if now >= seen.deadline:
                raise errors.deadline(self._settings.request_seconds)
            try:
                patience = min(self._settings.command_seconds, seen.deadline - now)
                return await self._bus.request("vision", presence.instance, verb, message, patience)
            except BusTimeout as error:
                if time.monotonic() >= seen.deadline:
                    continue
                if not await answers(self._bus):  # that says nothing about the worker
                    heard, off = time.monotonic(), off or now
                    if heard - off > self._settings.bus_grace_seconds:
                        raise errors.bus_down() from None
                    continue
                off = 0.0
                if now - heard > SILENCE_SECONDS:
                    self._peers.forget(presence.instance)
                    raise Lost(str(error)) from error
            except Disconnected:
                raise errors.bus_down() from None
            except NoResponder as error:
                self._peers.forget(presence.instance)
                raise Lost(str(error)) from error
            except BusError as error:
                raise Lost(str(error)) from error

    # ------------------------------------------------------------ below

    async def _bytes_of(self, source: ImageSource) -> bytes:
        """Raises ImageError."""
        value = str(source.value)
        if len(value) > MAX_IMAGE_BYTES * 4 // 3 + 128:
            raise ImageError("ImageTooLarge", f"image file size exceeds limit {MAX_IMAGE_BYTES >> 20} MB")
        data = decode_data_url(value) if len(value) <= 65536 else await asyncio.to_thread(decode_data_url, value)
        if not data:
            raise ImageError("EmptyImage", "the image has no bytes")
        if len(data) > MAX_IMAGE_BYTES:
            raise ImageError("ImageTooLarge", f"image file size exceeds limit {MAX_IMAGE_BYTES >> 20} MB")
        return data

    def _reach(self) -> tuple[Links, Memory]:
        """What proves to vision workers that we live, and links to them: made with the first image."""
        if self._memory is None:
            settings = self._settings
            try:
                self._memory = Memory(self._instance, settings.shm_dir, settings.transports)
            except (OSError, TransferError):  # no shared memory here: tcp reaches every worker
                self._memory = Memory(self._instance, settings.shm_dir, ["tcp"])
            self._links = Links(self._memory.incarnation, self._memory.kinds, settings.shm_dir)
        assert self._links is not None
        return self._links, self._memory

    def _refused(self, seen: Seen, number: int, kind: str, message: str) -> GatewayError:
        self.counters["image_refusals"] += 1
        return self._refusal(seen.sources, number, message, kind)

    def _refusal(self, sources: Sequence[ImageSource], number: int, message: str, kind: str = "") -> GatewayError:
        """The client's error, with the image's place in the request (in the referee's words in its dialect)."""
        source = sources[number]
        place = source.place or "messages"
        if self._settings.dialect == "official":
            earlier = sum(other.path == source.path for other in sources[:number])
            prefix = f"{source.path}: " if kind in ("InvalidUrl", "UrlTooLong") else f"{source.path}.image[{earlier}]: "
            return errors.invalid(prefix + message)
        return GatewayError(f"{place}: {message}", status=400, param=place, code="invalid_image")


class _Budget:
    """Bytes that the images of one request may still have."""

    def __init__(self, total: int) -> None:
        self.total = self.left = total

    def take(self, nbytes: int) -> None:
        """Raises ImageError."""
        self.left -= nbytes
        if self.left < 0:
            raise ImageError("TotalSizeTooLarge", f"the images of one request exceed {self.total >> 20} MB")


def expand(ids: array, image_token: int, found: Sequence[m.Identified]) -> tuple[array, list[m.ImageSpan]]:
    """One placeholder an image -> its tokens. ValueError: another number of placeholders than images."""
    if ids.count(image_token) != len(found):
        raise ValueError(f"the prompt has {ids.count(image_token)} placeholders for {len(found)} images")
    out, spans, at = array("I"), [], 0
    for image in found:
        place = ids.index(image_token, at)
        out += ids[at:place]
        spans.append(m.ImageSpan(len(out), image.tokens, image.digest))
        out += array("I", [image_token]) * image.tokens
        at = place + 1
    return out + ids[at:], spans
