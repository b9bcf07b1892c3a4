"""The project's services inside the simulation: same classes, without HTTP, metrics and files.

Knows what is put in place of what (`installed`), and the engine whose answers say whose they are. Does not know faults,
checks or schedules.

A token says request, attempt, choice and position, so a stream that gets another request's token, or one of another attempt
after its own, is seen at once. A prompt's last id says which request it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from array import array
from collections.abc import Callable, Iterator
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import structlog
from clock import EPOCH
from memory import SHM, SimMemory, faulty_flags, watched_write
from network import SimBus
from table import MACHINES, Table

from headrace.bus import Peers, Service, subjects
from headrace.bus import service as bus_service
from headrace.gateway import images as gateway_images
from headrace.gateway.dispatch import Dispatcher
from headrace.gateway.images import Images
from headrace.gateway.output import Output
from headrace.gateway.routing import Router
from headrace.gateway.settings import GatewaySettings
from headrace.kv.arena import ALIGN
from headrace.kvstore import service as kvstore_service
from headrace.kvstore.service import KvStoreService
from headrace.transfer import peer as transfer_peer
from headrace.transfer import server as transfer_server
from headrace.worker import service as worker_service
from headrace.worker.host import EngineHost
from headrace.worker.sim import SimConfig, SimEngine

from headrace.decode.service import DecodeService  # isort: skip
from headrace.prefill.service import PrefillService  # isort: skip
from headrace.vision import encoding as vision_encoding  # isort: skip
from headrace.vision import identity as vision_identity  # isort: skip
from headrace.vision import service as vision_service  # isort: skip
from headrace.vision.service import VisionService  # isort: skip
from headrace.vision.settings import VisionSettings  # isort: skip

BLOCK_BYTES, STATE_BYTES = 64, 32
STORE_BYTES = 1 << 16  # the smallest that the kvstore takes
STORE_OBJECTS = STORE_BYTES // ALIGN
FIRST_TOKEN, REQUESTS, ATTEMPTS, CHOICES, POSITIONS = 1000, 30, 16, 4, 64
LAST_PROMPT_ID = 500  # + request number
IMAGE_TOKEN, HIDDEN_BYTES = 199, 16
PICTURES_KEPT = 700  # bytes of pixels, and of embeddings: of two pictures or so
WORKER_SECONDS = 3.0  # that requests wait for a worker to come


def token(request: int, attempt: int, choice: int, position: int) -> int:
    return FIRST_TOKEN + ((request * ATTEMPTS + attempt % ATTEMPTS) * CHOICES + choice) * POSITIONS + position


def meaning(token: int) -> tuple[int, int, int, int]:
    """-> request, attempt, choice, position"""
    rest, position = divmod(token - FIRST_TOKEN, POSITIONS)
    rest, choice = divmod(rest, CHOICES)
    request, attempt = divmod(rest, ATTEMPTS)
    return request, attempt, choice, position


def answer_length(request: int, choice: int) -> int:
    """Tokens before EOS."""
    return 2 + (request * 7 + choice * 5) % 23


class Broken(RuntimeError):
    """An engine's step fails because the schedule says so."""


class WatchedEngine(SimEngine):
    """Its answers name their request; what is admitted is looked at first. A step fails when the schedule wants it."""

    def execute(self, plan: Any) -> Any:
        process = asyncio.get_running_loop().process
        if process.breaks:
            process.breaks = False
            raise Broken("a step that fails")
        return super().execute(plan)

    def first_row(self, resident: int, prompt_tokens: int) -> int:
        """Rows that are computed read the embeddings of their images."""
        return resident * self.info.block_tokens

    def submit(self, request: Any) -> None:
        asyncio.get_running_loop().process.world.submitting(request)
        super().submit(request)

    def _script(self, sequence: Any) -> None:
        request, prompt = sequence.request, sequence.prompt - sequence.begun
        number, choice = sequence.tokens[prompt - 1] - LAST_PROMPT_ID, request.first_choice + sequence.choice
        for position, one in enumerate(sequence.tokens[prompt : sequence.prompt]):
            said = meaning(one)
            if (said[0], said[2], said[3]) != (number, choice, position):
                world = asyncio.get_running_loop().process.world
                world.violate(f"{request.request} goes on with {said}, not token {position} of choice {choice} of {number}")
        attempt = int(request.request.rpartition("/")[2])
        stream = [token(number, attempt, choice, i) for i in range(answer_length(number, choice))]
        sequence.stream, sequence.cyclic = stream, False

    def admit(self, reservation: Any, handoff: Any, request: Any) -> None:
        process = asyncio.get_running_loop().process
        process.world.admitting(process, reservation, request.request)
        super().admit(reservation, handoff, request)


def build(settings: Any, role: str, register: Any) -> WatchedEngine:
    config = SimConfig(
        num_blocks=settings.num_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        block_bytes=settings.sim_block_bytes,
        state_bytes=settings.sim_state_bytes,
        hidden_bytes=HIDDEN_BYTES,
        prefill_seconds_per_token=settings.sim_prefill_seconds,
        decode_step_seconds=settings.sim_step_seconds,
        max_snapshots=8,
    )
    engine = WatchedEngine(config, register("kv", config.num_blocks * config.block_bytes))
    if CLOCK.world.config.counts.get("vision"):
        engine.info.extra.update(image_token_id=IMAGE_TOKEN, image_dtype="float32")
    return engine


# ---------------------------------------------------------------- pictures: each row of an embedding is the picture's digest


def picture(number: int) -> bytes:
    """A file that a client sends."""
    return b"picture %d" % number


def _decode(data: bytes, detail: str, rules: Any) -> tuple[Any, Any]:
    digest, tokens = blake2b(data, digest_size=16).digest(), 1 + data[-1] % 2
    return vision_identity.Identity(digest, tokens, 1, tokens), vision_identity.Pixels(data, tokens, 1)


def _compute(encoder: Any, images: Any) -> list[memoryview]:
    return [memoryview(rows(blake2b(one.data, digest_size=16).digest(), one.width)) for one in images]


def rows(digest: bytes, tokens: int) -> bytes:
    return digest * (HIDDEN_BYTES // len(digest)) * tokens


def _load(settings: Any) -> Any:
    """An encoder by its sizes."""
    config = SimpleNamespace(patch_size=14, downsample_ratio=3, min_pixels=1, max_image_tokens=64, max_wh_ratio=None)
    return SimpleNamespace(
        checkpoint_digest="sim", config=config, vision=SimpleNamespace(steps=0),
        grid=lambda width, height: SimpleNamespace(patches=width * height),
    )  # fmt: skip


class _NoFetcher:
    def __init__(self, **_: Any) -> None:
        pass

    async def close(self) -> None:
        pass


class _Simulated:
    """No side door."""

    async def _start_http(self) -> None:
        self.http_url = ""


def _watching(service: Any, verbs: dict[str, Any]) -> dict[str, Any]:
    """Commands as the world sees them: a worker that acknowledged a cancel takes that attempt no more."""
    world, cancelled = service.process.world, service.cancelled

    def watched(verb: str, handler: Any) -> Any:
        def call(message: Any) -> Any:
            answer = handler(message)
            key = f"{message.request}/{message.attempt}"
            if verb == "cancel":
                cancelled[key] = world.now
            elif type(answer).__name__ in ("Admitted", "Accepted") and world.now - cancelled.get(key, -1e9) < 50.0:
                world.violate(f"{service.instance} took {key} after it had acknowledged its cancel")
            return answer

        return call

    return verbs | {verb: watched(verb, verbs[verb]) for verb in ("cancel", "admit", "run") if verb in verbs}


class SimDecode(_Simulated, DecodeService):
    def verbs(self) -> dict[str, Any]:
        return _watching(self, super().verbs())


class SimPrefill(_Simulated, PrefillService):
    def verbs(self) -> dict[str, Any]:
        return _watching(self, super().verbs())


class SimKvStore(_Simulated, KvStoreService):
    pass


class SimVision(_Simulated, VisionService):
    async def start(self) -> None:
        await super().start()
        self.encoding.cache.capacity = self.identifier.pixels.capacity = PICTURES_KEPT


class WatchedOutput(Output):
    """What is acted upon belongs to the attempt that runs."""

    def take(self, record: Any, entry: Any, instance: str) -> None:
        if entry.attempt != record.attempt:
            world = asyncio.get_running_loop().process.world
            what = "a problem" if entry.problem is not None else "output"
            world.violate(f"{what} of attempt {entry.attempt} of {record.request} was taken; {record.attempt} is running")
        super().take(record, entry, instance)


class SimGateway(_Simulated, Service):
    """The gateway without HTTP: presence, routing, dispatch. Joined as `gateway.service.Gateway` joins them."""

    role = "gateway"
    Settings = GatewaySettings

    def verbs(self) -> dict[str, Any]:
        return {"grant": lambda message: self.images.grant_status(message)}

    async def start(self) -> None:
        await super().start()
        self.peers = Peers(self.bus)
        self.router = Router(self.bus, self.peers, lambda: self.dispatcher.capacity(), self.settings.worker_seconds)
        self.dispatcher = Dispatcher(self.bus, self.peers, self.instance, self.epoch, self.router, self.trace, self.settings)
        self.dispatcher.output = WatchedOutput(self.dispatcher)
        self.images = Images(self.bus, self.peers, self.dispatcher.prober, self.instance, self.trace, self.settings)
        self.peers.watch(self._on_presence)
        await self.dispatcher.start()
        await self.router.residency.start()
        await self.peers.start()
        self.set_state("ready")

    async def drain(self) -> None:
        await self.dispatcher.idle()

    async def stop(self) -> None:
        await self.dispatcher.stop()
        await self.images.stop()
        await self.router.residency.stop()
        await self.peers.stop()
        await super().stop()

    def _on_presence(self, kind: str, presence: Any) -> None:
        if kind == "update" and presence.role in ("prefill", "decode"):
            self.dispatcher.output.sent_so_far(presence)
        elif kind == "leave":
            self.dispatcher.output.left(presence.instance)


CLASSES = {"decode": SimDecode, "prefill": SimPrefill, "kvstore": SimKvStore, "vision": SimVision, "gateway": SimGateway}


class _Micro:
    """Service discovery is nobody's business here."""

    def __init__(self, *_: Any) -> None:
        pass

    async def start(self) -> None:
        pass


def host(engine: Any, on_events: Any, on_tick: Any, on_begin: Any) -> EngineHost:
    """Ticks as often as the schedule says: a busy machine's come late too."""
    return EngineHost(engine, on_events, on_tick, CLOCK.world.config.tick_seconds, on_begin)


class _NoMetrics:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    register = observe = __init__


class _Clock:
    """The simulated time, as the modules see it: put in place of `time`'s functions while a world runs."""

    def __init__(self) -> None:
        self.world: Any = None
        self.schedule: Any = None

    def monotonic(self) -> float:
        return self.schedule.now

    def time(self) -> float:
        return EPOCH + self.schedule.now

    def time_ns(self) -> int:
        return int((EPOCH + self.schedule.now) * 1e9)


CLOCK = _Clock()


def _told(what: str) -> None:
    if TABLE.strict:
        CLOCK.world.violate(f"not as docs/handoff.md has it: {what}")


TABLE = Table(_told)


@contextlib.contextmanager
def lenient() -> Iterator[None]:
    """What no row of the tables says is no violation while this holds: a guard is taken away, and its absence must be seen by
    what happens to bytes and requests."""
    TABLE.strict = False
    try:
        yield
    finally:
        TABLE.strict = True


def forget() -> None:
    """Worlds that have ended are gone, while `begun` holds: some coroutines begin others when they are thrown away, and each of
    these would keep its world, a hundred megabytes of regions, for ever."""
    asyncio._set_running_loop(None)
    CLOCK.world, CLOCK.schedule = None, SimpleNamespace(now=CLOCK.schedule.now)
    gc.collect()


def begun(original: Callable[..., Any]) -> Callable[..., Any]:
    """`asyncio.ensure_future`. A coroutine that is thrown away with its world may still begin another one at its end.
    In no loop, for asyncio would take one that never runs."""

    def ensure_future(work: Any, **options: Any) -> Any:
        if asyncio._get_running_loop() is None and asyncio.iscoroutine(work):
            work.close()
            return SimpleNamespace(add_done_callback=lambda _: None)
        return original(work, **options)

    return ensure_future


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """While this holds, services that are made are simulated ones."""

    def heard(_: Any, __: str, event: dict) -> dict:
        if CLOCK.world is not None:
            CLOCK.world.on_log(event)
        raise structlog.DropEvent

    old_log = structlog.get_config()
    patches = [
        (asyncio, "ensure_future", begun(asyncio.ensure_future)),
        (time, "monotonic", CLOCK.monotonic),
        (time, "time", CLOCK.time),
        (time, "time_ns", CLOCK.time_ns),
        (bus_service, "Bus", SimBus),
        (bus_service, "MicroService", _Micro),
        *((bus_service, name, _NoMetrics) for name in
          ("CollectorRegistry", "ProcessCollector", "PlatformCollector", "GCCollector", "_ServiceCollector")),
        (worker_service, "Memory", SimMemory),
        (worker_service, "build", build),
        (worker_service, "EngineHost", host),
        (worker_service, "_WorkerCollector", _NoMetrics),
        (kvstore_service, "Memory", SimMemory),
        (kvstore_service, "TICK", kvstore_service.TICK),
        (kvstore_service, "Histogram", _NoMetrics),
        (kvstore_service, "_Collector", _NoMetrics),
        (gateway_images, "Memory", SimMemory),
        (gateway_images, "DEPOSIT_SECONDS", 3.0),
        (vision_service, "Memory", SimMemory),
        (vision_service, "TICK_SECONDS", vision_service.TICK_SECONDS),
        (vision_service, "_load", _load),
        (vision_service, "ImageFetcher", _NoFetcher),
        (vision_service, "_Collector", _NoMetrics),
        (vision_service, "rows_of", lambda span, dtype: span),
        (vision_encoding, "_compute", _compute),
        (vision_identity, "_decode", _decode),
        (transfer_peer, "shm", SHM),
        (transfer_server.Owned, "_write", watched_write(transfer_server.Owned._write)),
        (transfer_server.Owned, "received", faulty_flags(transfer_server.Owned.received)),
    ]  # fmt: skip
    for machine, module, *names in MACHINES:
        patches += [(module, name, TABLE.recorded(machine, getattr(module, name))) for name in names]
    saved = [(where, name, getattr(where, name)) for where, name, _ in patches]
    saved += [(subjects, name, getattr(subjects, name)) for name in ("_own", "_next")]  # `fresh` counts ids from the start
    structlog.configure(processors=[heard], wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        for where, name, value in patches:
            setattr(where, name, value)
        yield
    finally:
        asyncio._set_running_loop(None)  # of the last world: whatever runs next in this process has a loop of its own
        for where, name, value in saved:
            setattr(where, name, value)
        structlog.configure(**old_log)


def fresh(config: Any) -> None:
    """For a new world: ids are counted from the start, and what is of a module, not of a service, is as it says."""
    kvstore_service.TICK = vision_service.TICK_SECONDS = config.tick_seconds
    subjects._own, subjects._next = "simulated000", iter(range(1 << 40)).__next__


def settings(role: str, config: Any, name: str) -> Any:
    """Small and quick: leases of seconds, pools that fill."""
    if role == "gateway":
        return GatewaySettings(
            name=name, trace=False, queue_seconds=config.queue_seconds, worker_seconds=WORKER_SECONDS, max_queue=64,
            metrics_port=0, transports=config.transports,
        )  # fmt: skip
    if role == "vision":
        return VisionSettings(name=name, trace=False, model="sim", tcp_host="host", transports=config.transports)
    if role == "kvstore":
        return kvstore_service.KvStoreSettings(
            name=name, trace=False, capacity_bytes=STORE_BYTES, max_ttl_seconds=config.store_seconds,
            transports=config.transports, evict_stop=config.store_objects / 2 / STORE_OBJECTS,
            evict_start=config.store_objects / STORE_OBJECTS, refuse_above=min(1.0, 3 * config.store_objects / STORE_OBJECTS),
        )  # fmt: skip
    cls = CLASSES[role].Settings
    more = {"ticket_seconds": config.ticket_seconds, "slab_slots": config.slab_slots, "growth_tokens": 64}
    return cls(
        name=name, engine="sim", trace=False, transports=config.transports, checksums=config.checksums,
        num_blocks=config.decode_blocks if role == "decode" else config.prefill_blocks,
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.chunk, max_model_len=1024,
        sim_block_bytes=BLOCK_BYTES, sim_state_bytes=STATE_BYTES, sim_prefill_seconds=config.prefill_seconds,
        sim_step_seconds=config.step_seconds, kvstore_wait=0.1, **(more if role == "decode" else {}),
    )  # fmt: skip


def prompt(number: int, group: int, tokens: int, images: int = 0) -> array:
    """`tokens` ids; prompts of one group begin alike, with a placeholder for each image. The last id names the request."""
    shared = max(0, (tokens - 1) // 128 * 128 - 128 * (number % 2))
    ids = [200 + group] * shared + [300 + number % 150] * (tokens - 1 - shared) + [LAST_PROMPT_ID + number]
    ids[1:1] = [IMAGE_TOKEN] * images
    return array("I", ids)
