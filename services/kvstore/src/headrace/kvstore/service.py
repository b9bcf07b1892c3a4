"""The kvstore on the bus: four verbs for workers, events for routers, an end that loses nothing that is being read.

Knows messages, futures, threads. Does not know eviction or places: see `store`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from headrace.bus import BusError, Service, StartError, subjects
from headrace.bus import messages as m
from headrace.kv import hashing
from headrace.kv.grants import effects as fx
from headrace.transfer import Memory, TransferError
from headrace.transfer.incarnation import SEPARATOR

from .objects import KINDS, Stored
from .settings import KvStoreSettings
from .store import Limits, Store, StoreError

TICK = 0.02  # seconds
EVENT_HASHES = 8192  # per KvEvents or KvBlocks message
CHECKERS = 2  # threads that compare checksums
ASK_SECONDS = 0.5  # patience with a question to a writer; the questions are repeated


class KvStoreService(Service):
    """One arena shared by all workers."""

    role, Settings = "kvstore", KvStoreSettings
    description = "Headrace kvstore: KV of all workers in one DRAM arena, content-addressed, read and written out of band"

    def __init__(self, settings: KvStoreSettings) -> None:
        super().__init__(settings)
        self.memory: Memory | None = None
        self.store: Store | None = None
        self.address = b""
        self.checks = 0  # commits whose checksums were compared
        self._checking = 0
        self._waiting: dict[str, list[asyncio.Future[m.Message]]] = {}  # commits without an answer yet, by grant
        self._tasks: set[asyncio.Task] = set()
        self._looked: dict[str, tuple[str, float]] = {}  # handle -> (request, since), for the trace
        self._threads = ThreadPoolExecutor(CHECKERS, thread_name_prefix="checksum")
        buckets = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
        self._lookup_seconds = Histogram(
            "headrace_kvstore_lookup_seconds", "time of a lookup in the store", registry=self.metrics, buckets=buckets
        )
        self._check_seconds = Histogram(
            "headrace_kvstore_check_seconds", "time to compare a commit's checksums", registry=self.metrics, buckets=buckets
        )
        self._event_seq = 0
        self._page: tuple[int, list[bytes]] = (-1, [])  # snapshot being paged out: (event seq, hashes)

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        settings = self.settings
        hashing.self_test()
        await super().start()
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
            limits = Limits(
                start=settings.evict_start,
                stop=settings.evict_stop,
                refuse=settings.refuse_above,
                ttl=settings.kv_cache_ttl_hours * 3600,
                lease=settings.max_ttl_seconds,
                handles=settings.max_handles,
            )
            self.store = await asyncio.to_thread(Store, self.memory, settings.capacity, limits)
        except (TransferError, OSError) as error:
            raise StartError(str(error)) from error
        self.address = self.memory.address()
        self.metrics.register(_Collector(self.store, self.memory))
        self.background(self._ticking())
        self.set_state("ready")

    async def drain(self) -> None:
        """New lookups and reservations are refused; what is being read or checked may end."""
        while self.store is not None and (len(self.store.held) or self._checking):  # noqa: ASYNC110  bounded outside
            await asyncio.sleep(TICK)

    async def stop(self) -> None:
        await super().stop()
        self._threads.shutdown()
        if self.memory is not None:
            await self.memory.close()

    def verbs(self) -> dict[str, Any]:
        return {
            "lookup": self._guarded(self._lookup),
            "reserve": self._guarded(self._reserve),
            "commit": self._guarded(self._commit),
            "release": self._guarded(self._release),
            "blocks": self._guarded(self._blocks),
            "audit": self._guarded(self._audit),
        }

    def load(self) -> m.Load:
        return m.Load(running=self._checking)

    def progress(self) -> int:
        return self.checks

    def describe(self) -> dict[str, Any]:
        return {"memory": self.address, "event_seq": self._event_seq}

    # ------------------------------------------------------------ verbs

    def _guarded(self, handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A refusal of the store is an answer."""

        def call(message: m.Message) -> Any:
            if self.store is None:
                return m.Refused("busy", "the store is starting", retry_after=0.5)
            try:
                return handler(message)
            except StoreError as error:
                return m.Refused(error.code, str(error), self.load(), error.retry_after)

        return call

    def _lookup(self, message: m.KvLookup) -> m.Message:
        if self.state == "draining":
            return m.Refused("draining", f"{self.instance} is draining")
        started = time.monotonic()
        handle, blocks, states = self.store.lookup(
            message.worker, message.namespace, message.keys, message.states, message.ttl, started
        )
        self._lookup_seconds.observe(time.monotonic() - started)
        if message.request:
            found = sum(state is not None for state in states)
            if handle:
                self._looked[handle] = (message.request, started)
            self._note(message.request, "lookup", started, asked=len(message.keys) // 16, blocks=len(blocks), states=found)
        return m.KvFound(
            handle,
            [_location(stored) for stored in blocks],
            [None if stored is None else _location(stored) for stored in states],
            self.address if handle else b"",
        )

    def _reserve(self, message: m.KvReserve) -> m.Message:
        if self.state == "draining":
            return m.Refused("draining", f"{self.instance} is draining")
        grant, generation, offsets = self.store.reserve(
            message.writer, message.namespace, message.keys, message.sizes, message.kind, message.parents, message.ttl,
            message.requests, time.monotonic(),
        )  # fmt: skip
        return m.KvReserved(grant, generation, offsets, self.address if grant else b"")

    def _commit(self, message: m.KvCommit) -> Any:
        """Answered when the checksums were compared. The same commit again joins the wait, or has the same answer."""
        store, grant = self.store, message.grant
        for effect in store.commit(grant, message.generation, message.checksums, time.monotonic()):
            match effect:
                case fx.Verify(checksums):
                    self._waiting[grant] = []
                    self._checking += 1
                    task = asyncio.ensure_future(self._check(grant, checksums))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case _:
                    return _answer(effect)
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[grant].append(waiting)
        return _wait(waiting)

    async def _check(self, grant: str, checksums: list[int]) -> None:
        store, pending, started = self.store, self.store.pending[grant], time.monotonic()
        try:
            good = await asyncio.get_running_loop().run_in_executor(self._threads, store.verify, grant, checksums)
        except Exception:
            self.log.exception("comparing checksums failed; nothing of the grant is published", grant=grant)
            good = (False,) * len(pending.objects)
        self._check_seconds.observe(time.monotonic() - started)
        self._checking -= 1
        self.checks += 1
        if not all(good):
            self.log.warning("checksums do not fit", grant=grant, objects=len(good), broken=good.count(False))
        answers = [_answer(effect) for effect in store.checked(grant, checksums, good, time.monotonic())]
        nbytes = sum(stored.nbytes for stored, fits in zip(pending.objects, good, strict=True) if fits)
        for request in dict.fromkeys(filter(None, pending.requests)):
            self._note(
                request, "stored", pending.since, kind=pending.objects[0].key[0], objects=sum(good), bytes=nbytes,
                rejected=good.count(False),
            )  # fmt: skip
        for waiting in self._waiting.pop(grant):
            if not waiting.done():
                waiting.set_result(answers[0])

    def _release(self, message: m.KvRelease) -> m.Message:
        valid = self.store.release(message.handle, time.monotonic())
        request, since = self._looked.pop(message.handle, ("", 0.0))
        if request:
            self._note(request, "released", since, valid=valid)
        return m.KvReleased(valid)

    def _blocks(self, message: m.KvSnapshot) -> m.Message:
        """All stored block keys, page by page; one page sequence is one moment (its `seq`)."""
        if message.start == 0 and self._page[0] != self._event_seq:
            self._publish_events()
            self._page = (self._event_seq, [stored.key[2] for stored in self.store.objects if stored.key[0] == KINDS[0]])
        seq, hashes = self._page
        end = message.start + EVENT_HASHES
        if message.start < 0 or message.start > len(hashes):
            raise StoreError("invalid", f"there are {len(hashes)} blocks; a page can't start at {message.start}")
        return m.KvBlocks(self.epoch, seq, b"".join(hashes[message.start : end]), end if end < len(hashes) else -1)

    def _audit(self, message: m.Message) -> m.Done:
        """Walk the owners of the arena; pins and grants that are open must be 0 when nothing is going on. -> Done(JSON)"""
        store = self.store
        report = {"ok": True, "error": "", "handles": len(store.held), "grants": len(store.grants), "checking": self._checking}
        try:
            store.check()
        except AssertionError as error:
            report |= {"ok": False, "error": str(error) or "the books of the arena do not fit its owners"}
        return m.Done(json.dumps(report | store.bytes_by_state()))

    # ------------------------------------------------------------ in the background

    async def _ticking(self) -> None:
        """Sweeps and evictions, whatever else happens; events of what became of it."""
        while True:
            for grant, writer in self.store.tick(time.monotonic()):
                self._ask_status(grant, writer)
            self._publish_events()
            if len(self._looked) > len(self.store.pinned):  # leases that ran out
                self._looked = {handle: note for handle, note in self._looked.items() if handle in self.store.pinned}
            await asyncio.sleep(TICK)

    def _ask_status(self, grant: str, writer: str) -> None:
        """Is the worker still writing under this grant? Its `reserve` may have been answered into the void."""
        instance = writer.partition(SEPARATOR)[0]
        subject = subjects.command(instance.partition("-")[0], instance, "grant")
        future = self.bus.ask(subject, m.TicketStatus(grant), ASK_SECONDS)

        def answered(future: asyncio.Future[m.Message]) -> None:
            if not future.cancelled() and future.exception() is None and isinstance(answer := future.result(), m.Done):
                self.store.writer_says(grant, answer.state, time.monotonic())

        future.add_done_callback(answered)

    def _publish_events(self) -> None:
        stored, removed = self.store.objects.take_events()
        changes = [("stored", stored), ("removed", removed)]
        for name, hashes in changes:
            for start in range(0, len(hashes), EVENT_HASHES):
                self._event_seq += 1
                part = b"".join(hashes[start : start + EVENT_HASHES])
                event = m.KvEvents(self.instance, self.epoch, self._event_seq, **{name: part})
                try:
                    self.bus.publish(subjects.kv_events(self.instance), event)
                except BusError as error:  # the gap in `seq` tells whoever listens
                    self.log.warning("events not published", error=str(error), hashes=len(hashes))

    def _note(self, request: str, event: str, since: float, **data: Any) -> None:
        self.trace.event(request, f"kvstore.{event}", ms=(time.monotonic() - since) * 1e3, **data)


def _location(stored: Stored) -> m.Location:
    return m.Location(stored.offset, stored.nbytes, stored.checksum, stored.generation)


def _answer(effect: fx.Effect) -> m.Message:
    match effect:
        case fx.Stored(stored, rejected):
            return m.KvStored(stored, rejected)
        case fx.Stale(message):
            return m.Refused("stale", message)
        case fx.Unknown():
            return m.Refused("unknown", "no such grant (it is long over, or this store was restarted)")
    raise AssertionError(effect)


async def _wait(future: asyncio.Future[m.Message]) -> m.Message:
    return await future


def _reachable(host: str) -> str:
    """What others can connect to when we listen on `host`."""
    return socket.gethostname() if host in ("0.0.0.0", "::", "") else host


class _Collector:
    """Prometheus: read when somebody asks."""

    def __init__(self, store: Store, memory: Memory) -> None:
        self._store, self._memory = store, memory

    def describe(self) -> list:
        return []

    def collect(self) -> Any:
        store = self._store
        yield GaugeMetricFamily("headrace_kvstore_capacity_bytes", "size of the arena", value=float(store.arena.capacity))
        sizes = GaugeMetricFamily(
            "headrace_kvstore_bytes", "bytes of the arena by state; pinned is part of stored", labels=["state"]
        )
        for state, nbytes in store.bytes_by_state().items():
            sizes.add_metric([state], float(nbytes))
        yield sizes
        objects = GaugeMetricFamily("headrace_kvstore_objects", "objects stored", labels=["kind"])
        for kind in KINDS:
            objects.add_metric([kind], float(store.objects.count(kind)))
        yield objects
        yield GaugeMetricFamily("headrace_kvstore_handles", "lookups whose pins are held", value=float(len(store.held)))
        yield GaugeMetricFamily("headrace_kvstore_grants", "write grants open or in quarantine", value=float(len(store.grants)))
        for name, value in store.counters.items():
            yield CounterMetricFamily(f"headrace_kvstore_{name}", f"kvstore: {name.replace('_', ' ')}", value=float(value))
        for name, value in self._memory.stats().items():
            yield GaugeMetricFamily(
                f"headrace_kvstore_transfer_{name}", f"transfer: {name.replace('_', ' ')}", value=float(value)
            )
