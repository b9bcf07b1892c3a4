"""The vision service on the bus: identify and encode, and what travels out of band for them.

Reads in the order of an image's life: deposit, identify, encode, delivery; then cancels and sweeps. Both verbs are idempotent
and asked again until they have a result; a question that has none yet is answered `Working` after a moment, so silence means
that this process is gone. Nothing is decoded, hashed or computed on the loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable
from typing import Any
from zlib import crc32

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from headrace.bus import BusError, Service, StartError
from headrace.bus import messages as m
from headrace.kv.grants import Writing
from headrace.recipe.images import ImageError, ImageFetcher, ImageRules, public_address
from headrace.transfer import Links, Memory, TransferError
from headrace.worker.staging import Room, Staging, StagingError
from headrace.worker.visionclient import ask_grant

from .encoding import Encoding, PixelsGone, rows_of
from .identity import Identifier, Identity
from .settings import VisionSettings
from .threads import background_pool

TICK_SECONDS = 0.02
POLL_SECONDS = 0.4  # a question without a result is answered after this long
KEEP_SECONDS = 30.0  # a result can be asked for again
KEEP_RESULTS = 8192
GUARD_SECONDS = 0.5  # writing stops so long before the grant's end
LINK_SECONDS = 2.0


class VisionService(Service):
    role = "vision"
    description = "Images to identities (digest, token count) and to the embeddings of their tokens."
    Settings = VisionSettings
    settings: VisionSettings

    def __init__(self, settings: VisionSettings) -> None:
        super().__init__(settings)
        self.memory: Memory = None  # type: ignore[assignment]  # set by start()
        self.links: Links = None  # type: ignore[assignment]
        self.staging: Staging = None  # type: ignore[assignment]
        self.identifier: Identifier = None  # type: ignore[assignment]
        self.encoding: Encoding = None  # type: ignore[assignment]
        self.fetcher: ImageFetcher = None  # type: ignore[assignment]
        self.checkpoint = self.model_name = ""
        self.writing = Writing()
        self.identifying = Jobs()
        self.delivering = Jobs()
        self.counters = dict.fromkeys(("refused_busy", "delivered", "delivered_bytes", "failed", "cancelled"), 0)
        self.worst_lag = 0.0
        self._address = b""
        self._rooms: dict[str, Room] = {}  # deposits that are not taken yet
        self._held = 0  # bytes of deposits that were taken and are not decoded yet
        self._fetches = asyncio.Semaphore(settings.fetches)  # images by URL from their download to their pixels
        self._asking: set[asyncio.Task] = set()
        self._pools: list[Any] = []

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        await super().start()
        settings = self.settings
        try:
            self.memory = Memory(
                self.instance,
                shm_dir=settings.shm_dir,
                kinds=settings.transports,
                tcp_host=settings.tcp_host or _reachable(settings.host),
                tcp_port=settings.tcp_port,
                tcp_bind=settings.host,
            )
            await self.memory.start()
            ask = ask_grant(self.bus, "gateway", lambda: self.staging, self._asking)
            self.staging = Staging(self.memory, "intake", settings.intake_bytes, ask)
            decode = background_pool(settings.decoders, "decode", settings.nice)
            encode = background_pool(1, "encode", settings.nice)
            self._pools = [decode, encode]
            encoder = await asyncio.get_running_loop().run_in_executor(encode, _load, settings)
        except (ValueError, OSError, RuntimeError, TransferError) as error:
            raise StartError(str(error)) from error
        self.links = Links(self.memory.incarnation, settings.transports, settings.shm_dir)
        self.checkpoint, self.model_name = encoder.checkpoint_digest, os.path.basename(os.path.abspath(settings.model))
        c = encoder.config
        rules = ImageRules(c.patch_size, c.downsample_ratio, c.min_pixels, c.max_image_tokens, c.max_wh_ratio)
        allows = (lambda host, address: True) if settings.allow_private_addresses else public_address
        self.fetcher = ImageFetcher(destination_filter=allows, timeout=settings.fetch_seconds)
        self.identifier = Identifier(
            rules, self.fetcher, decode, settings.pixel_bytes, lambda key: key in self.encoding.cache
        )
        self.encoding = Encoding(
            encoder, encode, self.identifier.pixels.get, self.identifier.pixels.drop, settings.embedding_bytes,
            settings.batch_patches,
        )  # fmt: skip
        self._address = self.memory.address()
        self.metrics.register(_Collector(self))
        self.background(self._ticking())
        self.set_state("ready")

    async def drain(self) -> None:
        """New images are refused; what is being identified or delivered may end."""
        while self.identifying.running or self.delivering.running:  # noqa: ASYNC110  bounded outside
            await asyncio.sleep(TICK_SECONDS)

    async def stop(self) -> None:
        for task in [*self.identifying.tasks(), *self.delivering.tasks(), *self._asking]:
            task.cancel()
        await super().stop()
        for part in (self.fetcher, self.links, self.memory):
            if part is not None:
                await part.close()
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)

    def verbs(self) -> dict[str, Any]:
        return {
            "deposit": self.deposit, "identify": self.identify, "encode": self.encode, "cancel": self.cancel,
            "grant": self.grant_status, "audit": self.audit,
        }  # fmt: skip

    def load(self) -> m.Load:
        if self.encoding is None:
            return m.Load()
        return m.Load(running=self.identifier.decoding + self.encoding.pending, waiting=self.identifying.running)

    def progress(self) -> int:
        """What came through the threads: images, and blocks of the tower."""
        if self.encoding is None:
            return 0
        return self.identifier.counters["decoded"] + self.identifier.counters["known"] + self.encoding.steps

    def describe(self) -> dict[str, Any]:
        return {
            "model": self.model_name, "engine": "vision", "checkpoint": self.checkpoint, "memory": self._address, "sees": True,
        }  # fmt: skip

    def _not_ready(self) -> m.Refused | None:
        if self.state in ("ready", "stalled"):
            return None
        code = "draining" if self.state == "draining" else "busy"
        return m.Refused(code, f"{self.instance} is {self.state}", self.load(), 1.0)

    # ------------------------------------------------------------ deposit

    def deposit(self, message: m.Deposit) -> m.Message:
        """Room for the bytes of one image. What waits to be decoded counts against the intake too: it is in memory."""
        if (refusal := self._not_ready()) is not None:
            return refusal
        if self._held and self._held + message.nbytes > self.settings.intake_bytes:
            self.counters["refused_busy"] += 1
            return m.Refused("full", f"{self._held:,} bytes of images wait to be decoded", self.load(), 0.05)
        try:
            ttl = min(max(message.ttl, 0.0), KEEP_SECONDS)
            room = self.staging.grant(message.writer, message.sender, [message.nbytes], ttl, time.monotonic())
        except ValueError as error:
            return m.Refused("invalid", f"{error} (--intake-bytes of the vision service)")
        if room is None:
            self.counters["refused_busy"] += 1
            free = self.staging.bytes_by_place()["free"]
            return m.Refused("full", f"{message.nbytes:,} bytes are to land; {free:,} are free", self.load(), 0.05)
        self._rooms[room.grant] = room
        self.trace.event(message.request, "vision.granted", bytes=message.nbytes)
        return m.Deposited(room.grant, room.generation, room.offsets[0], self._address)

    # ------------------------------------------------------------ identify

    def identify(self, message: m.Identify) -> Any:
        """Begin, or look how far it is."""
        key = f"{message.request}/{message.round}/{message.image}/{message.grant}"  # a new deposit is a new question
        job = self.identifying.get(key)
        if job is None:
            if (refusal := self._not_ready()) is not None:
                return refusal
            if not message.url and message.grant not in self._rooms:
                return m.Refused("unknown", f"deposit {message.grant!r} is not here (any more); deposit the image again")
            if self.identifying.running >= self.settings.max_images:
                self.counters["refused_busy"] += 1
                return m.Refused("busy", f"{self.identifying.running} images are being identified", self.load(), 1.0)
            job = self.identifying.start(key, self._identify(message))
        return _poll(job)

    async def _identify(self, message: m.Identify) -> m.Message:
        began = time.monotonic()
        try:
            async with asyncio.timeout(message.deadline):
                found, nbytes, fetched = await (self._identify_url(message) if message.url else self._identify_deposit(message))
        except ImageError as error:
            self.trace.event(message.request, "vision.refused", kind=error.kind, image=message.image)
            return m.ImageRefused(error.kind, error.message, error.retryable)
        except StagingError as error:
            return m.Refused("unknown", f"{error}; deposit the image again")
        except TimeoutError:
            return m.ImageRefused("Deadline", f"not identified within {message.deadline:.1f} s", True)
        self.trace.event(
            message.request, "vision.identified", ms=(time.monotonic() - began) * 1e3, image=message.image, bytes=nbytes,
            fetch_ms=round((fetched - began) * 1e3, 3), tokens=found.tokens, client_id=message.client_id,
        )  # fmt: skip
        return m.Identified(found.digest, found.tokens, found.width, found.height, nbytes)

    async def _identify_url(self, message: m.Identify) -> tuple[Identity, int, float]:
        """-> (what it is, bytes as they came, when they were here)."""
        async with self._fetches:
            data = await self.identifier.fetch(message.url, message.max_bytes)
            fetched = time.monotonic()
            return await self.identifier.identify(message.namespace, data, message.detail), len(data), fetched

    async def _identify_deposit(self, message: m.Identify) -> tuple[Identity, int, float]:
        room = self._rooms.pop(message.grant)
        nbytes = room.sizes[0]
        self._held += nbytes
        try:
            data = (await asyncio.shield(self.staging.take(room, [message.checksum], time.monotonic)))[0]
            fetched = time.monotonic()
            return await self.identifier.identify(message.namespace, data, message.detail), nbytes, fetched
        finally:
            self._held -= nbytes

    # ------------------------------------------------------------ encode

    def encode(self, message: m.Encode) -> Any:
        """Begin a delivery, or look how far it is."""
        job = self.delivering.get(message.grant)
        if job is None:
            if (refusal := self._not_ready()) is not None:
                return refusal
            if not self.writing.begin(message.grant):
                return m.Refused("stale", f"grant {message.grant} is over")
            self.trace.event(message.request, "vision.encoding", images=len(message.digests))
            job = self.delivering.start(message.grant, self._deliver(message))
            # Not within the job: one that is cancelled before its first step never runs any of its code.
            job.add_done_callback(lambda _: self.writing.end(message.grant, time.monotonic()))
        return _poll(job)

    async def _deliver(self, message: m.Encode) -> m.Message:
        began = time.monotonic()
        deadline = began + min(message.ttl, message.deadline) - GUARD_SECONDS
        try:
            async with asyncio.timeout(deadline - began):
                keys = [(message.namespace, digest) for digest in message.digests]
                spans, patches, cached = await self.encoding.spans(keys)
                rows, sums = await asyncio.to_thread(_pack, spans, message.dtype)
                wrong = [len(r) for r, n in zip(rows, message.tokens, strict=True) if len(r) != n * message.row_bytes]
                if wrong:
                    return m.Refused("mismatch", f"an image has {wrong[0]} bytes of embeddings here; other checkpoints?")
                peer = await self.links.get(message.memory, LINK_SECONDS)
                pieces = list(zip(message.offsets, rows, strict=True))
                await peer.write("images", pieces, message.generation, deadline)
                await peer.flush(deadline, message.generation)
        except PixelsGone as error:
            return m.Refused("unknown", f"image {error} is not known here (any more); identify it again")
        except (TransferError, BusError, TimeoutError, RuntimeError) as error:
            self.counters["failed"] += 1
            self.trace.event(message.request, "vision.failed", message=str(error) or type(error).__name__)
            return m.Refused("failed", f"no delivery: {error or type(error).__name__}")
        nbytes = sum(map(len, rows))
        self.counters["delivered"] += len(rows)
        self.counters["delivered_bytes"] += nbytes
        self.trace.event(
            message.request, "vision.encoded", ms=(time.monotonic() - began) * 1e3, images=len(rows), cached=cached,
            patches=patches, bytes=nbytes, by=peer.kind, client_id=message.client_id,
        )  # fmt: skip
        return m.Encoded(sums, patches, cached)

    async def cancel(self, message: m.EncodeCancel) -> m.Message:
        """Answered when nothing of the delivery is in flight."""
        job = self.delivering.get(message.grant)
        if job is not None and not job.done():
            job.cancel()
            self.counters["cancelled"] += 1
            await asyncio.wait({job}, timeout=POLL_SECONDS)
        if self.writing.status(message.grant, time.monotonic()) == "writing":
            return m.Working()
        return m.Done("done")

    def grant_status(self, message: m.TicketStatus) -> m.Done:
        """Prefill holds room in quarantine: do we still write there?"""
        return m.Done(self.writing.status(message.ticket, time.monotonic()))

    # ------------------------------------------------------------ sweeps, audit

    async def _ticking(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + TICK_SECONDS
        while True:
            await asyncio.sleep(max(0.0, due - loop.time()))
            self.worst_lag = max(self.worst_lag, loop.time() - due)
            due = loop.time() + TICK_SECONDS
            now = time.monotonic()
            self.staging.tick(now)
            for grant in [g for g, room in self._rooms.items() if not self.staging.holds(room)]:
                del self._rooms[grant]
            self.identifying.tick(now)
            self.delivering.tick(now)

    def audit(self, message: m.Message) -> m.Done:
        """Everything that must be 0 when nothing is going on, and whether the books of the intake hold. -> Done(JSON)"""
        report: dict[str, Any] = {
            "ok": True, "error": "", "live": self.identifying.running + self.delivering.running, "deposits": len(self.staging),
            "writing": len(self.writing), "queue": self.encoding.pending, **self.staging.bytes_by_place(),
        }  # fmt: skip
        try:
            self.staging.check()
        except AssertionError as error:
            report |= {"ok": False, "error": str(error)}
        return m.Done(json.dumps(report))


class Jobs:
    """Tasks by key; results are kept for a while, for questions whose answers were lost."""

    def __init__(self) -> None:
        self._live: dict[str, asyncio.Task[m.Message]] = {}
        self._over: OrderedDict[str, tuple[asyncio.Task[m.Message], float]] = OrderedDict()

    def start(self, key: str, work: Awaitable[m.Message]) -> asyncio.Task[m.Message]:
        task = self._live[key] = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._ended(key))
        return task

    def get(self, key: str) -> asyncio.Task[m.Message] | None:
        task = self._live.get(key)
        if task is None and key in self._over:
            task = self._over[key][0]
        return task

    @property
    def running(self) -> int:
        return len(self._live)

    def tasks(self) -> list[asyncio.Task[m.Message]]:
        return list(self._live.values())

    def tick(self, now: float) -> None:
        while self._over and next(iter(self._over.values()))[1] <= now:
            self._over.popitem(last=False)

    def _ended(self, key: str) -> None:
        self._over[key] = (self._live.pop(key), time.monotonic() + KEEP_SECONDS)
        while len(self._over) > KEEP_RESULTS:
            self._over.popitem(last=False)


async def _poll(job: asyncio.Task[m.Message]) -> m.Message:
    """The job's result, or `Working` if it has none soon."""
    await asyncio.wait({job}, timeout=POLL_SECONDS)
    if not job.done():
        return m.Working()
    if job.cancelled():
        return m.Refused("stale", "it was cancelled")
    return job.result()


def _pack(spans: list[Any], dtype: str) -> tuple[list[Any], list[int]]:
    rows = [rows_of(span, dtype) for span in spans]
    return rows, [crc32(r) for r in rows]


def _load(settings: VisionSettings) -> Any:
    """In the thread that will run it: torch's own threads inherit its place behind others."""
    os.environ.setdefault("OMP_NUM_THREADS", str(settings.compute_threads))
    import torch

    from headrace.engine.models.vision.loader import load_encoder

    torch.set_num_threads(settings.compute_threads)
    return load_encoder(settings.model, device=settings.device)


def _reachable(host: str) -> str:
    """What others connect to when we listen on `host`: every address means this machine's own."""
    return socket.gethostbyname(socket.gethostname()) if host in ("0.0.0.0", "::", "") else host


class _Collector:
    """Prometheus: read when somebody asks."""

    def __init__(self, service: VisionService) -> None:
        self._service = service

    def describe(self) -> list:
        return []

    def collect(self) -> Any:
        s = self._service
        for part in (s.counters, s.identifier.counters, s.encoding.counters):
            for name, value in part.items():
                yield CounterMetricFamily(f"headrace_vision_{name}", f"vision: {name.replace('_', ' ')}", value=float(value))
        for name, value in {**s.identifier.seconds, **s.encoding.seconds}.items():
            yield CounterMetricFamily(f"headrace_vision_{name}_seconds", f"vision: seconds spent to {name}", value=value)
        for name, cache in (("pixel", s.identifier.pixels), ("embedding", s.encoding.cache)):
            yield GaugeMetricFamily(f"headrace_vision_{name}_cache_bytes", f"vision: {name}s kept", value=float(cache.bytes))
            yield CounterMetricFamily(
                f"headrace_vision_{name}_cache_evicted", f"vision: {name}s dropped for others", value=float(cache.evicted)
            )
        yield GaugeMetricFamily("headrace_vision_queue", "images in or before the encoder", value=s.encoding.pending)
        yield GaugeMetricFamily("headrace_loop_lag_worst_seconds", "how late a tick ever was", value=s.worst_lag)
        places = GaugeMetricFamily("headrace_vision_intake_bytes", "room for images from gateways", labels=["place"])
        for place, value in s.staging.bytes_by_place().items():
            places.add_metric([place], value)
        yield places


