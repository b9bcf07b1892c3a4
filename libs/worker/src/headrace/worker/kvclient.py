"""The kvstore as a worker sees it: fetch a prefix before computing, write blocks through after they fill.

Knows the store's verbs, how long a request may be held up by them, and when bytes count as read: they were copied into this
worker's own pool, every checksum fits, and the store says that the pins held until after the copy. Does not know prompts or
sequences.

A store that is dead, slow or wrong costs a request at most `Limits.wait` (plus the time its bytes need at a modest rate),
then the prompt is computed; after a failure the store is left alone for `Limits.pause`. A fetch that comes too late still
ends up in the pool for the next request. Write-through is a bounded queue in the background: what does not fit is dropped
and counted.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import structlog

from headrace.bus import messages as m
from headrace.bus.errors import BusError
from headrace.engine import api
from headrace.kv.grants import Tombstones
from headrace.kv.hashing import DIGEST_BYTES, ROOT
from headrace.transfer import Links, TransferError

log = structlog.get_logger()


@dataclass(slots=True)
class Limits:
    """Seconds and bytes."""

    wait: float = 0.25  # a request waits this long for the store ...
    rate: float = 500e6  # ... plus its bytes at this rate (bytes per second)
    late: float = 2.0  # a read that the request no longer waits for may go on this long, for the next request
    pause: float = 1.0  # the store is left alone this long after a failure
    queue: int = 4096  # objects waiting to be written through
    gather: float = 0.02  # a batch gathers this long
    batch: int = 64  # objects per grant
    batch_bytes: int = 32 << 20
    write: float = 10.0  # a grant's whole life
    snapshot_keys: int = 4096  # boundaries asked for, the deepest; 0: no snapshots are wanted


@dataclass(slots=True)
class Fetched:
    """Blocks beyond `have` that are now in the pool, one reference each (the caller's), announced."""

    blocks: list[int] = field(default_factory=list)
    snapshots: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class _Item:
    key: bytes
    parent: bytes
    namespace: bytes
    request: str  # the server's id, for the trace
    block: int = -1
    state: bytes | None = None


class KvStoreClient:
    """`find()` gives the presence of a ready store or None. The engine's pool and `kv` (a view of the registered block
    memory) are the worker's; this object allocates, announces and pins blocks there, always on the loop."""

    def __init__(
        self,
        bus: Any,
        instance: str,
        links: Links,
        kv: memoryview,
        engine: api.Engine,
        find: Callable[[], m.Presence | None],
        limits: Limits | None = None,
        trace: Any = None,
    ) -> None:
        self.limits = limits or Limits()
        self.counters = dict.fromkeys(
            ("lookups", "hits", "fetched_blocks", "fetched_snapshots", "fetched_bytes", "fetch_failures", "late_fetches",
             "written", "written_bytes", "already_stored", "dropped_full", "dropped_gone", "write_failures"), 0
        )  # fmt: skip
        self._bus, self._instance, self._links, self._kv, self._engine = bus, instance, links, kv, engine
        self._find, self._trace = find, trace
        self._pool, self._block_bytes = engine.pool, engine.info.block_bytes
        self._queues: dict[tuple[bytes, str], deque[_Item]] = {}  # by namespace and kind: a grant has one of each
        self._queued = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._paused_until = 0.0
        self._granted = ""  # the grant under which something may be written now
        self._denied = Tombstones()  # grants that we told the store not to know
        self._writing: list[int] = []  # blocks pinned by the batch that is being written
        self._fetching: dict[str, list[int]] = {}  # blocks pinned by fetches
        self._tasks: set[asyncio.Task] = set()
        self._writer: asyncio.Task | None = None

    def start(self) -> None:
        self._writer = asyncio.create_task(self._write_loop())

    async def stop(self) -> None:
        tasks = [t for t in (self._writer, *self._tasks) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def drain(self, timeout: float) -> bool:
        """Wait until everything queued is written or dropped; False when `timeout` came first."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @property
    def pending(self) -> int:
        """Objects that are still to be written through."""
        return self._queued + (not self._idle.is_set())

    def wanted(self, hashes: Sequence[bytes], have: int, prompt_tokens: int) -> bool:
        """Whether asking the store may help a prompt whose first `have` usable blocks are resident."""
        missing = have < len(hashes) or (
            self.limits.snapshot_keys and not self._engine.would_restore(hashes, prompt_tokens)
        )
        return bool(missing) and self.available

    @property
    def available(self) -> bool:
        return time.monotonic() >= self._paused_until and self._find() is not None

    def owners(self) -> dict[int, int]:
        """References that this object holds, by block."""
        out: dict[int, int] = {}
        for block in [*self._writing, *(b for blocks in self._fetching.values() for b in blocks)]:
            out[block] = out.get(block, 0) + 1
        return out

    # ------------------------------------------------------------ reading

    async def fetch(self, request: str, namespace: bytes, hashes: Sequence[bytes], have: int) -> Fetched:
        """Blocks of `hashes[have:]` that the store holds, imported into the pool; and the deepest snapshot of any prefix.

        hashes[:have] are resident and pinned by the caller. Never raises, never takes longer than the limits say."""
        store = self._find()
        if store is None or not hashes or time.monotonic() < self._paused_until:
            return Fetched()
        allowed = self.limits.wait + (len(hashes) - have) * self._block_bytes / self.limits.rate
        task = asyncio.create_task(
            self._fetch(store, request, namespace, hashes, have, time.monotonic() + allowed + self.limits.late)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            done, _ = await asyncio.wait({task}, timeout=allowed)
        except asyncio.CancelledError:  # the request ended; what is read stays for the next one
            task.add_done_callback(self._keep_late)
            raise
        if done:
            return task.result()
        self.counters["late_fetches"] += 1
        self._paused_until = time.monotonic() + self.limits.pause
        task.add_done_callback(self._keep_late)
        return Fetched()

    def _keep_late(self, task: asyncio.Task) -> None:
        if not task.cancelled() and task.exception() is None:
            self._pool.release(task.result().blocks)  # announced: they stay as cached blocks

    async def _fetch(
        self, store: m.Presence, request: str, namespace: bytes, hashes: Sequence[bytes], have: int, deadline: float
    ) -> Fetched:
        started = time.monotonic()
        self.counters["lookups"] += 1
        handle, out = "", Fetched()
        try:
            keys = b"".join(hashes[have:])
            states = b"".join(hashes[-self.limits.snapshot_keys :]) if self.limits.snapshot_keys else b""
            lookup = m.KvLookup(self._instance, namespace, keys, states, request=request)
            found = await self._bus.request("kvstore", store.instance, "lookup", lookup, timeout=self.limits.wait)
            if not isinstance(found, m.KvFound):
                return out
            if not found.handle:
                return out
            handle = found.handle
            out = await self._import(store, found, hashes, have, deadline)
            handle = ""  # released inside
            if out.blocks or out.snapshots:
                self.counters["hits"] += 1
                self._note(
                    request, "prefill.fetched", started, blocks=len(out.blocks), bytes=out.nbytes, snapshots=out.snapshots
                )
            return out
        except (BusError, TransferError, OSError, TimeoutError) as error:
            self._failed("fetch_failures", error)
            return out
        finally:
            if handle:
                self._forget(store.instance, handle)

    async def _import(
        self, store: m.Presence, found: m.KvFound, hashes: Sequence[bytes], have: int, deadline: float
    ) -> Fetched:
        """Copy into private blocks, check, ask whether the pins held; only then the blocks get their identity."""
        blocks = self._pool.allocate(len(found.blocks)) if found.blocks else []
        if blocks is None:  # no room: what is resident must do
            blocks, found.blocks = [], []
        self._fetching[found.handle] = blocks
        first = len(hashes) - len(found.states)  # states may answer for the last keys only
        state_at = max((i for i, s in enumerate(found.states) if s is not None and first + i < have + len(blocks)), default=-1)
        states = [found.states[state_at]] if state_at >= 0 else []
        good, valid, snapshot = 0, False, None
        try:
            peer = await self._links.get(found.memory, timeout=max(0.05, deadline - time.monotonic()))
            size, where = self._block_bytes, found.blocks + states
            if any(location.nbytes != size for location in found.blocks):
                raise TransferError(f"the store's blocks are not {size} bytes")
            into = [self._kv[block * size : (block + 1) * size] for block in blocks] + [bytearray(s.nbytes) for s in states]
            if where:
                await peer.read("arena", [(w.offset, w.nbytes) for w in where], 0, deadline, into=into)
                sums = await asyncio.to_thread(lambda: [crc32(data) == w.checksum for data, w in zip(into, where, strict=True)])
                good = (sums[: len(blocks)] + [False]).index(False)
                snapshot = bytes(into[-1]) if states and sums[-1] else None
            released = await self._bus.request("kvstore", store.instance, "release", m.KvRelease(found.handle), timeout=0.5)
            valid = isinstance(released, m.KvReleased) and released.valid
        finally:
            self._fetching.pop(found.handle, None)
            if not valid:
                good = 0
            self._pool.release(blocks[good:])  # unannounced: free again
        if not valid:
            self.counters["fetch_failures"] += bool(where)
            return Fetched()
        for index, block in enumerate(blocks[:good], start=have):
            self._pool.announce(block, hashes[index], hashes[index - 1] if index else ROOT)
        snapshots = 0
        if snapshot is not None and first + state_at < have + good:
            key = hashes[first + state_at]
            self._engine.add_snapshot(key, (first + state_at + 1) * self._engine.info.block_tokens, snapshot)
            snapshots = 1
        nbytes = good * self._block_bytes + (len(snapshot) if snapshots else 0)
        self.counters["fetched_blocks"] += good
        self.counters["fetched_snapshots"] += snapshots
        self.counters["fetched_bytes"] += nbytes
        return Fetched(blocks[:good], snapshots, nbytes)

    def _forget(self, store: str, handle: str) -> None:
        """Drop pins without waiting; they also expire by themselves."""
        future = self._bus.ask(f"headrace.kvstore.{store}.release", m.KvRelease(handle), 1.0)
        future.add_done_callback(lambda f: f.cancelled() or f.exception())

    # ------------------------------------------------------------ writing through

    def fill(self, event: api.BlocksFilled, namespace: bytes, request: str) -> None:
        for key, block, parent in event.blocks:
            self._enqueue(_Item(key, parent, namespace, request, block=block))

    def snapshot(self, event: api.SnapshotTaken, namespace: bytes, request: str) -> None:
        self._enqueue(_Item(event.key, ROOT, namespace, request, state=event.state))

    def _enqueue(self, item: _Item) -> None:
        if self._find() is None:
            return
        if self._queued >= self.limits.queue:
            self.counters["dropped_full"] += 1
            return
        kind = (item.namespace, "block" if item.state is None else "state")
        queue = self._queues.get(kind)
        if queue is None:
            queue = self._queues[kind] = deque()
        queue.append(item)
        self._queued += 1
        self._idle.clear()
        self._wake.set()

    async def _write_loop(self) -> None:
        while True:
            if not self._queues:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
                await asyncio.sleep(self.limits.gather)
            await asyncio.sleep(max(0.0, self._paused_until - time.monotonic()))
            store, batch = self._find(), self._take()
            if not batch:
                continue
            try:
                if store is None:
                    self.counters["dropped_gone"] += len(batch)
                    continue
                await self._write(store, batch)
            except (BusError, TransferError, OSError, TimeoutError) as error:
                self.counters["write_failures"] += len(batch)
                self._failed("write_failures", error)
            except Exception:  # a bug must not end write-through for good
                self.counters["write_failures"] += len(batch)
                self._paused_until = time.monotonic() + self.limits.pause
                log.exception("write-through failed", objects=len(batch))
            finally:
                pinned, self._writing = self._writing, []
                self._pool.release(pinned)

    def _take(self) -> list[_Item]:
        """The next items of one kind and namespace whose bytes are still here, pinned. Kinds take turns."""
        if not self._queues:
            return []
        kind = next(iter(self._queues))
        queue, batch, nbytes = self._queues.pop(kind), [], 0
        while queue and len(batch) < self.limits.batch and nbytes < self.limits.batch_bytes:
            item = queue.popleft()
            self._queued -= 1
            if item.state is None:
                if self._pool.hash_of(item.block) != item.key or not self._pool.peek([item.key]):
                    self.counters["dropped_gone"] += 1
                    continue
                self._pool.retain([item.block])
                self._writing.append(item.block)
            nbytes += self._block_bytes if item.state is None else len(item.state)
            batch.append(item)
        if queue:
            self._queues[kind] = queue
        return batch

    async def _write(self, store: m.Presence, batch: list[_Item]) -> None:
        deadline = time.monotonic() + self.limits.write
        size = self._block_bytes
        data = [self._kv[i.block * size : (i.block + 1) * size] if i.state is None else i.state for i in batch]
        reserve = m.KvReserve(
            worker=self._instance,
            writer=self._links.incarnation,
            namespace=batch[0].namespace,
            keys=b"".join(i.key for i in batch),
            sizes=[len(d) for d in data],
            kind="block" if batch[0].state is None else "state",
            ttl=self.limits.write,
            parents=b"".join(i.parent for i in batch),
            requests=list(dict.fromkeys(i.request for i in batch)),
        )
        answer = await self._bus.request("kvstore", store.instance, "reserve", reserve, timeout=1.0)
        if not isinstance(answer, m.KvReserved):
            self.counters["write_failures"] += len(batch)
            self._paused_until = time.monotonic() + max(self.limits.pause, getattr(answer, "retry_after", 0.0))
            log.warning("kvstore takes nothing now", why=getattr(answer, "message", repr(answer)), objects=len(batch))
            return
        if answer.grant in self._denied:
            raise TransferError("the store asked for this grant before we knew it, and was told that we never shall")
        wanted = [(offset, d) for offset, d in zip(answer.offsets, data, strict=True) if offset >= 0]
        self.counters["already_stored"] += len(batch) - len(wanted)
        if not wanted:
            return
        self._granted = answer.grant
        try:
            peer = await self._links.get(answer.memory, timeout=1.0)
            checksums = await asyncio.to_thread(lambda: [crc32(d) for _, d in wanted])
            await peer.write("arena", wanted, answer.generation, deadline)
            await peer.flush(deadline)
        except BaseException:
            self._forget(store.instance, answer.grant)
            raise
        finally:
            self._granted = ""
        commit = m.KvCommit(answer.grant, answer.generation, checksums)
        try:
            stored = await self._bus.request("kvstore", store.instance, "commit", commit, timeout=2.0)
        except BusError:  # if it never came, the room is free now and not when its lease is over; else this changes nothing
            self._forget(store.instance, answer.grant)
            raise
        count = stored.stored if isinstance(stored, m.KvStored) else 0
        self.counters["written"] += count
        self.counters["written_bytes"] += sum(len(d) for _, d in wanted) if count else 0
        self.counters["write_failures"] += len(wanted) - count

    def grant_status(self, message: m.TicketStatus) -> m.Done:
        """The store holds room in quarantine. "done": we shall not write there, now or ever; its answer to our `reserve` or our
        `release` may have been lost."""
        if message.ticket == self._granted:
            return m.Done("writing")
        now = time.monotonic()
        self._denied.tick(now)
        self._denied.add(message.ticket, now)
        return m.Done("done")

    # ------------------------------------------------------------ shared

    def _failed(self, counter: str, error: BaseException) -> None:
        if counter == "fetch_failures":
            self.counters[counter] += 1
        self._paused_until = time.monotonic() + self.limits.pause
        log.warning("kvstore failed; going on without it", error=str(error) or type(error).__name__, pause=self.limits.pause)

    def _note(self, request: str, event: str, started: float, **data: Any) -> None:
        if self._trace is not None:
            self._trace.event(request, event, ms=(time.monotonic() - started) * 1e3, **data)


assert DIGEST_BYTES == m.HASH_BYTES
