"""The life that prefill and decode share: engine, registered memory, output to gateways, KV events, the audit of memory.

Knows how a worker starts (bus, memory, engine in a thread, kvstore client, peers) and what it tells about itself. Does not know
hand-offs: the two services own those.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any, ClassVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from headrace.bus import BusError, Peers, Prober, Service, StartError, subjects
from headrace.bus import messages as m
from headrace.bus.presence import lost
from headrace.engine import api
from headrace.kv.grants import Tombstones
from headrace.transfer import Links, Memory, TransferError

from .engines import build
from .host import EngineHost
from .kvclient import KvStoreClient, Limits
from .settings import WorkerSettings

PAGE = 16_384  # hashes in one answer of `blocks`
GATEWAYS = 256  # whose output is counted
KEPT_SECONDS = 0.25  # between two attempts at sending an end that could not be sent
STALL_STEPS = 4  # times the longest step, lately or expected, that nothing may move
SCORES = 512  # prompt tokens whose log-probabilities go in one message: 170 KB where each names 20 others


class WorkerService(Service):
    """Subclasses give `verbs`, `handle_events`, `tick`, `owners`, and `prepare` (after the engine, before ready)."""

    Settings: ClassVar[type[WorkerSettings]] = WorkerSettings
    settings: WorkerSettings

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        self.engine: api.Engine = None  # type: ignore[assignment]  # set by start()
        self.host: EngineHost = None  # type: ignore[assignment]
        self.memory: Memory = None  # type: ignore[assignment]
        self.links: Links = None  # type: ignore[assignment]
        self.store: KvStoreClient = None  # type: ignore[assignment]
        self.kv: memoryview = None  # type: ignore[assignment]
        self.outbox: Outbox = None  # type: ignore[assignment]
        self.peers: Peers = None  # type: ignore[assignment]
        self.prober: Prober = None  # type: ignore[assignment]
        self.address = b""
        self._store_presence: m.Presence | None = None
        self.tombstones = Tombstones()
        self.event_seq = 0
        self._confirming: set[asyncio.Task] = set()
        self._needed: dict[str, tuple[str, int]] = {}  # instance -> (role, how many times)
        self.counters: dict[str, int] = {}

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
            self.engine = await asyncio.to_thread(build, settings, self.role, self._register)
        except (ValueError, OSError, RuntimeError, TransferError) as error:
            raise StartError(str(error)) from error
        self.host = EngineHost(self.engine, self.handle_events, self._ticked, on_begin=self.step_begins)
        self.outbox = Outbox(self)
        self.peers = Peers(self.bus)
        self.prober = Prober(self.bus, self.instance, self._suspect)
        self.links = Links(self.memory.incarnation, settings.transports, settings.shm_dir)
        self.store = KvStoreClient(
            self.bus, self.instance, self.links, self.kv, self.engine, self._find_store,
            Limits(wait=settings.kvstore_wait, snapshot_keys=4096 if settings.snapshot_bytes else 0), self.trace,
        )  # fmt: skip
        try:
            self.prepare()
        except TransferError as error:
            raise StartError(str(error)) from error
        self.address = self.memory.address()
        self.peers.watch(self._peer_changed)
        await self.peers.start()
        self.prober.start()
        self.store.start()
        self.host.start()
        self.metrics.register(_WorkerCollector(self))
        self.set_state("ready")

    async def stop(self) -> None:
        if self.host is not None:
            await self.host.stop()
        for part in (self.store, self.prober, self.peers):
            if part is not None:
                await part.stop()
        if self.links is not None:
            await self.links.close()
        await super().stop()
        if self.memory is not None:
            await self.memory.close()

    def prepare(self) -> None:
        """Register more memory, make tables. The engine is there, commands are still refused."""

    # ------------------------------------------------------------ peers that our work depends on

    def depend(self, role: str, instance: str) -> None:
        """Probe a peer as long as something here needs it. Counted: each needs its `undepend`."""
        name, count = self._needed.get(instance, (role, 0))
        self._needed[instance] = (name, count + 1)
        if not count:
            self.prober.watch(role, instance)

    def undepend(self, instance: str) -> None:
        role, count = self._needed.pop(instance)
        if count > 1:
            self._needed[instance] = (role, count - 1)
        else:
            self.prober.unwatch(instance)

    def _suspect(self, instance: str, why: str) -> None:
        task = asyncio.ensure_future(self._confirm(instance, why))
        self._confirming.add(task)
        task.add_done_callback(self._confirming.discard)

    async def _confirm(self, instance: str, why: str) -> None:
        """A worker ends work only for a peer that is gone or silent for a lease: missed pings alone may be a busy machine, and
        one lost ping is no silence."""
        role = self._needed.get(instance, ("", 0))[0]
        error = await lost(self.bus, role, instance, self.instance, lambda: instance in self._needed)
        if error is not None:
            self.peer_died(instance, f"{why}; {error}")
        elif instance in self._needed:
            self.prober.watch(role, instance)

    def _register(self, name: str, nbytes: int) -> memoryview:
        self.kv = self.memory.register(name, nbytes)
        return self.kv

    def _peer_changed(self, kind: str, presence: m.Presence) -> None:
        if presence.role == "kvstore" and kind != "update" and self.settings.kvstore:
            self._store_presence = next(iter(self.peers.by_role("kvstore")), None)

    def _find_store(self) -> m.Presence | None:
        return self._store_presence

    # ------------------------------------------------------------ what subclasses say

    def handle_events(self, events: list[api.Event]) -> None:
        raise NotImplementedError

    def tick(self, now: float) -> None:
        """Sweeps, every 20 ms, also when idle."""

    def owners(self) -> dict[int, int]:
        """References to blocks that this service itself holds (the engine's and the kvstore client's not)."""
        return {}

    def peer_died(self, instance: str, why: str) -> None:
        """A peer that we `depend` on is dead or silent for a lease."""

    def debts(self) -> dict[str, int]:
        """Everything that must be 0 when nothing is going on."""
        return {}

    # ------------------------------------------------------------ what a worker says about itself

    def progress(self) -> int:
        return self.host.steps if self.host is not None else 0

    def patience(self) -> float:
        """A chunk far into a very long prompt may take longer than `stall_seconds`, but only a little longer than the one
        before: what takes no more than some of the last steps together, or some times what is expected of it, is no stall."""
        longest = self.host.longest if self.host is not None else 0.0
        return max(super().patience(), STALL_STEPS * longest)

    def load(self) -> m.Load:
        if self.engine is None:
            return m.Load()
        stats, pool = self.engine.stats(), self.engine.pool
        return m.Load(
            running=int(stats["running"]),
            waiting=int(stats["waiting"]),
            queued_tokens=int(stats["queued_tokens"]),
            free_blocks=pool.available,
            total_blocks=pool.total,
            tokens_per_second=stats.get("prefill_tokens_per_second", 0.0),
            step_seconds=stats.get("step_seconds", 0.0),
        )

    def describe(self) -> dict[str, Any]:
        if self.engine is None:
            return {}
        info = self.engine.info
        return {
            "model": info.model_name,
            "engine": info.kind,
            "layout_id": info.layout_id,
            "checkpoint": info.checkpoint,
            "block_tokens": info.block_tokens,
            "block_bytes": info.block_bytes,
            "max_model_len": info.max_model_len,
            "memory": self.address,
            "out_seq": self.outbox.seq if self.outbox is not None else {},
            "event_seq": self.event_seq,
            "sees": "image_token_id" in info.extra,
        }

    @property
    def draft(self) -> bool:
        return bool(self.engine.info.extra.get("draft", False))

    def mismatch(self, layout_id: str, checkpoint: str, draft: bool, who: str) -> m.Refused | None:
        """A refusal that names both values when a peer's memory would not mean the same here."""
        info = self.engine.info
        for what, theirs, ours in (
            ("checkpoint", checkpoint, info.checkpoint),  # first: a layout id holds the checkpoint's digest too
            ("KV layout", layout_id, info.layout_id),
            ("draft model", draft, self.draft),
        ):
            if theirs != ours:
                return m.Refused(
                    "mismatch",
                    f"{what} differs: {who} has {theirs!r}, {self.instance} has {ours!r}; "
                    "start both with the same --model, --numerics, --kv-format and engine",
                )
        return None

    def not_ready(self) -> m.Refused | None:
        if self.state in ("ready", "stalled"):
            return None
        return m.Refused(
            "draining" if self.state == "draining" else "busy", f"{self.instance} is {self.state}", self.load(), 1.0
        )

    # ------------------------------------------------------------ events of blocks, audit

    def blocks(self, message: m.KvSnapshot) -> m.KvBlocks:
        """One page of resident hashes. `seq` names the last event that the page already contains."""
        self._publish_kv_events()
        hashes = self.engine.pool.resident()
        page = hashes[message.start : message.start + PAGE]
        end = message.start + PAGE
        return m.KvBlocks(self.epoch, self.event_seq, b"".join(page), end if end < len(hashes) else -1)

    def grant_status(self, message: m.TicketStatus) -> m.Done:
        """The kvstore asks whether we still write under a grant of its own."""
        return self.store.grant_status(message) if self.store is not None else m.Done("done")

    def audit(self, message: m.Message) -> m.Done:
        """Walk the owners of all blocks and compare with the pool's books. -> Done(JSON)"""
        pool = self.engine.pool
        report: dict[str, Any] = {
            "ok": True, "error": "", "total": pool.total, "free": pool.free, "used": pool.used, "cached": pool.cached,
            "quarantined": pool.quarantined, **self.debts(),
            "to_store": self.store.pending, "stored": self.store.counters["written"],
        }  # fmt: skip
        owners: dict[int, int] = {}
        for source in (self.engine.owners(), self.store.owners(), self.owners()):
            for block, count in source.items():
                owners[block] = owners.get(block, 0) + count
        try:
            pool.check(owners)
        except AssertionError as error:
            report |= {"ok": False, "error": str(error)}
        return m.Done(json.dumps(report))

    def step_begins(self) -> None:
        """A step of the engine has begun."""

    def _ticked(self) -> None:
        self.tick(time.monotonic())
        self._publish_kv_events()

    def _publish_kv_events(self) -> None:
        stored, removed = self.engine.pool.take_events()
        if not stored and not removed:
            return
        self.event_seq += 1  # also when it can't be sent: a gap is seen and repaired
        message = m.KvEvents(self.instance, self.epoch, self.event_seq, b"".join(stored), b"".join(removed))
        try:
            self.bus.publish(subjects.kv_events(self.instance), message)
        except BusError as error:
            self.log.warning("KV events lost", error=str(error))


def _reachable(host: str) -> str:
    """What others connect to when we listen on `host`: every address means this machine's own."""
    return socket.gethostbyname(socket.gethostname()) if host in ("0.0.0.0", "::", "") else host


class Outbox:
    """Entries for gateways, gathered and sent as one `Out` per gateway when `flush` is called (once per step)."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._entries: dict[str, list[m.OutEntry]] = {}
        self.seq: dict[str, int] = {}  # gateway -> last Out.seq; also of one that seems gone, for it may come back and count on
        self._soon: asyncio.Handle | None = None

    def add(self, gateway: str, entry: m.OutEntry) -> None:
        entries = self._entries.get(gateway)
        if entries is None:
            self._entries[gateway] = [entry]
        else:
            entries.append(entry)

    def add_soon(self, gateway: str, entry: m.OutEntry) -> None:
        """For entries outside a step: sent in this loop turn."""
        self.add(gateway, entry)
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self.flush)

    def scores(self, gateway: str, request: str, attempt: int, event: api.PromptScores) -> None:
        """Log-probabilities of a prompt, at once and in messages of a bounded size."""
        for at in range(0, len(event.logprobs), SCORES):
            part = m.Scores(event.start + at, [m.TokenLogprob(*entry) for entry in event.logprobs[at : at + SCORES]])
            self.add(gateway, m.OutEntry(request, attempt, 0, 0, b"", scores=part))
            self.flush()

    def flush(self) -> None:
        self._soon = None
        if not self._entries:
            return
        batch, self._entries = self._entries, {}
        service = self._service
        for gateway, entries in batch.items():
            seq = self.seq.pop(gateway, 0) + 1
            self.seq[gateway] = seq  # counts what was lost too: that is how the gateway notices and asks again
            if len(self.seq) > GATEWAYS:
                del self.seq[next(iter(self.seq))]  # the one that got nothing for longest
            try:
                service.bus.publish(subjects.out(gateway), m.Out(service.instance, service.epoch, seq, entries))
            except BusError as error:
                ends = [entry for entry in entries if entry.problem is not None]
                self._keep(gateway, ends)
                if len(ends) < len(entries):
                    service.log.warning("output lost; the gateway will ask for it", gateway=gateway, error=str(error))

    def _keep(self, gateway: str, ends: list[m.OutEntry]) -> None:
        """Nobody can be asked for these: who failed has forgotten. They are sent when the bus is back."""
        if not ends:
            return
        self._entries[gateway] = ends + self._entries.get(gateway, [])
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(KEPT_SECONDS, self.flush)


class _WorkerCollector:
    """Prometheus: pool, engine and kvstore client, read when somebody asks."""

    def __init__(self, service: WorkerService) -> None:
        self._service = service

    def describe(self) -> list:
        return []

    def collect(self) -> Any:
        service, pool = self._service, self._service.engine.pool
        blocks = GaugeMetricFamily("headrace_blocks", "KV blocks by place", labels=["role", "engine", "place"])
        for place in ("free", "used", "cached", "quarantined"):
            blocks.add_metric([service.role, service.engine.info.kind, place], getattr(pool, place))
        yield blocks
        yield GaugeMetricFamily("headrace_loop_lag_seconds", "how late the last tick was", value=service.host.lag)
        yield GaugeMetricFamily("headrace_loop_lag_worst_seconds", "how late a tick ever was", value=service.host.worst_lag)
        for name, seconds in (("between", service.host.between), ("beside", service.host.beside)):
            text = f"host work {name} steps of the model" + (": it waits" if name == "between" else ": hidden")
            yield CounterMetricFamily(f"headrace_host_{name}_steps_seconds", text, value=seconds)
        yield from _engine_gauges(service.engine.stats())
        for name, value in service.store.counters.items():
            yield CounterMetricFamily(f"headrace_kvstore_client_{name}", f"kvstore client: {name}", value=float(value))
        for name, value in service.counters.items():
            yield CounterMetricFamily(f"headrace_{service.role}_{name}", f"{service.role}: {name}", value=float(value))
        for name, value in service.debts().items():
            yield GaugeMetricFamily(f"headrace_{service.role}_{name}", f"{service.role}: {name}", value=float(value))


def _engine_gauges(stats: dict[str, float]) -> list[GaugeMetricFamily]:
    """One family a name; "name/label=value" is the sample of `name` with that label."""
    families: dict[str, GaugeMetricFamily] = {}
    for key, number in stats.items():
        name, _, label = key.partition("/")
        label, _, value = label.partition("=")
        if name not in families:
            families[name] = GaugeMetricFamily(f"headrace_engine_{name}", f"engine: {name}", labels=[label] if label else None)
        families[name].add_metric([value] if label else [], float(number))
    return list(families.values())
