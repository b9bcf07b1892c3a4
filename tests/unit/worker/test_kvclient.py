"""The kvstore client against a real kvstore process: what comes back is what was stored, or nothing."""

from __future__ import annotations

import asyncio
import mmap
import signal
import time
from array import array
from pathlib import Path

import pytest

from headrace.bus import messages as m
from headrace.engine import api
from headrace.kv.hashing import ROOT, BlockHasher
from headrace.transfer import Links, Memory
from headrace.worker.kvclient import KvStoreClient, Limits
from headrace.worker.sim import SimConfig, SimEngine
from headrace.worker.testing import Cluster

SPACE, OTHER = b"tenant-a........", b"tenant-b........"
CONFIG = dict(num_blocks=64, block_bytes=4096, state_bytes=256, max_num_seqs=4)


class Worker:
    """An engine with memory and a client, in this process."""

    def __init__(self, cluster: Cluster, name: str, **limits) -> None:
        self.memory = Memory(name, cluster.shm_dir, kinds=("shm",))
        kv = self.memory.register("kv", CONFIG["num_blocks"] * CONFIG["block_bytes"])
        self.engine = SimEngine(SimConfig(**CONFIG), kv)
        bus, peers = cluster.gateway.bus, cluster.gateway.peers
        self.links = Links(self.memory.incarnation, ("shm",), cluster.shm_dir)
        self.client = KvStoreClient(
            bus, name, self.links, kv, self.engine, lambda: next(iter(peers.by_role("kvstore")), None), Limits(**limits)
        )
        self.client.start()

    async def close(self) -> None:
        await self.client.stop()
        await self.links.close()
        await self.memory.close()

    def hashes(self, ids, namespace: bytes = SPACE) -> list[bytes]:
        return BlockHasher(self.engine.info.layout_id, namespace).hashes(ids)

    def prefill(self, ids, namespace: bytes = SPACE, store: bool = True) -> api.PrefillDone:
        """Compute a prompt; what fills is handed to the client."""
        request = api.EngineRequest(
            "r", array("I", ids), self.hashes(ids, namespace), api.SamplingParams(), namespace, prefill_only=True
        )
        self.engine.submit(request)
        while True:
            plan = self.engine.plan()
            for event in self.engine.apply(plan, self.engine.execute(plan)):
                if isinstance(event, api.BlocksFilled) and store:
                    self.client.fill(event, namespace, "r")
                elif isinstance(event, api.SnapshotTaken) and store:
                    self.client.snapshot(event, namespace, "r")
                elif isinstance(event, api.PrefillDone):
                    self.engine.release("r")
                    return event
                assert not isinstance(event, api.Failed), event

    def check(self) -> None:
        owners = self.engine.owners()
        for block, count in self.client.owners().items():
            owners[block] = owners.get(block, 0) + count
        self.engine.pool.check(owners)


@pytest.fixture
async def cluster():
    async with Cluster() as cluster:
        cluster.store = await cluster.start("kvstore", "--transports", "shm")
        yield cluster


async def test_what_one_worker_stored_another_one_reads(cluster):
    ids = list(range(1000, 1700))
    one, two = Worker(cluster, "one"), Worker(cluster, "two")
    one.prefill(ids)
    assert await one.client.drain(5.0)
    assert one.client.counters["written"] == 6  # five blocks and a snapshot
    one.prefill(ids)
    one.check()

    usable = two.hashes(ids)[:5]
    fetched = await two.client.fetch("r", SPACE, usable, 0)
    assert len(fetched.blocks) == 5 and fetched.snapshots == 1 and fetched.nbytes == 5 * 4096 + 256
    done = two.prefill(ids)  # the simulated engine compares every byte
    assert (done.cached_tokens, done.snapshot_hit, done.replay_rows) == (640, True, 0)
    two.engine.pool.release(fetched.blocks)
    two.check()

    rest = await two.client.fetch("r", OTHER, two.hashes(ids, OTHER)[:5], 0)  # another tenant has nothing of it
    assert rest.blocks == [] and rest.snapshots == 0
    tail = Worker(cluster, "three")
    tail.prefill(ids[:256], store=False)
    got = await tail.client.fetch("r", SPACE, usable, 2)  # only what is missing
    assert len(got.blocks) == 3
    tail.engine.pool.release(got.blocks)
    assert tail.prefill(ids).cached_tokens == 640
    tail.check()
    for worker in (one, two, tail):
        await worker.close()


async def test_a_flipped_bit_in_the_store_is_never_used(cluster):
    ids = list(range(600))
    one, two = Worker(cluster, "one"), Worker(cluster, "two")
    one.prefill(ids)
    assert await one.client.drain(5.0)
    usable = two.hashes(ids)[:4]
    store = cluster.find(cluster.store).instance
    found = await cluster.gateway.bus.request("kvstore", store, "lookup", m.KvLookup("test", SPACE, b"".join(usable)))
    (path,) = Path(cluster.shm_dir).glob("kvstore*.arena")
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
        arena[found.blocks[2].offset + 77] ^= 4
    fetched = await two.client.fetch("r", SPACE, usable, 0)
    assert len(fetched.blocks) == 2  # the whole ones before it
    assert two.prefill(ids).cached_tokens == 256
    two.engine.pool.release(fetched.blocks)
    two.check()
    for worker in (one, two):
        await worker.close()


async def test_a_late_fetch_is_kept_for_the_next_request(cluster, monkeypatch):
    ids = list(range(600))
    one, two = Worker(cluster, "one"), Worker(cluster, "two", wait=0.1)
    one.prefill(ids)
    assert await one.client.drain(5.0)
    links_get = two.links.get

    async def slow(*args, **options):
        await asyncio.sleep(0.3)
        return await links_get(*args, **options)

    monkeypatch.setattr(two.links, "get", slow)
    assert (await two.client.fetch("r", SPACE, two.hashes(ids)[:4], 0)).blocks == []
    await asyncio.sleep(0.6)
    assert two.client.counters["late_fetches"] == 1
    assert two.prefill(ids).cached_tokens == 512

    two.engine.pool.drop_cached()
    two.client._paused_until = 0.0
    cancelled = asyncio.create_task(two.client.fetch("r", SPACE, two.hashes(ids)[:4], 0))
    await asyncio.sleep(0.05)
    cancelled.cancel()  # its client has gone meanwhile
    await asyncio.sleep(0.6)
    assert two.engine.pool.cached == 4 and two.engine.pool.used == 0
    two.check()
    for worker in (one, two):
        await worker.close()


async def test_a_stopped_store_costs_the_wait_once(cluster):
    ids = list(range(600))
    one, two = Worker(cluster, "one"), Worker(cluster, "two", wait=0.3, pause=3.0)
    one.prefill(ids)
    assert await one.client.drain(5.0)
    usable = two.hashes(ids)[:4]
    cluster.store.signal(signal.SIGSTOP)
    started = time.monotonic()
    assert (await two.client.fetch("r", SPACE, usable, 0)).blocks == []
    assert time.monotonic() - started < 10, "not for as long as it is stopped"
    asked = two.client.counters["lookups"]
    assert (await two.client.fetch("r", SPACE, usable, 0)).blocks == []
    assert two.client.counters["lookups"] == asked, "left alone for a while"
    cluster.store.signal(signal.SIGCONT)
    await asyncio.sleep(3.1)
    assert len((await two.client.fetch("r", SPACE, usable, 0)).blocks) == 4
    for worker in (one, two):
        await worker.close()


async def test_room_whose_answer_was_lost_comes_back_while_its_worker_lives():
    """The answer to a reserve never arrives; over shared memory only the worker's word can end the quarantine."""
    async with Cluster() as cluster:
        store = await cluster.start("kvstore", "--transports", "shm", "--max-ttl-seconds", "0.3")
        worker, bus = Worker(cluster, "prefill-w"), cluster.gateway.bus
        said = worker.client.grant_status
        await bus.serve("headrace.prefill.prefill-w.grant", lambda message, _, reply: bus.respond(reply, said(message)))
        reserve = m.KvReserve("prefill-w", worker.memory.incarnation, SPACE, bytes(16), [4096], ttl=0.3)

        async def ask() -> m.KvReserved:
            return await bus.request("kvstore", cluster.find(store).instance, "reserve", reserve)

        lost = await ask()
        assert lost.grant and not (await ask()).grant  # its key is taken while it may be written
        again = await Cluster.until(ask, lambda answer: answer.grant, 5.0)
        assert again.generation != lost.generation
        assert worker.client.grant_status(m.TicketStatus(lost.grant)).state == "done"
        await worker.close()


async def test_write_through_is_bounded_and_drops_what_is_gone(cluster):
    worker = Worker(cluster, "one", queue=6, gather=0.1)
    worker.prefill(list(range(1300)))  # ten blocks and a snapshot
    counters = worker.client.counters
    assert counters["dropped_full"] == 5 and worker.client.pending == 7
    assert worker.engine.pool.drop_cached() == 10  # evicted before they were written
    assert await worker.client.drain(5.0)
    assert counters["dropped_gone"] == 6 and counters["written"] == 0
    worker.check()
    await worker.close()


async def test_no_store_no_wait():
    async with Cluster() as cluster:
        worker = Worker(cluster, "one")
        assert not worker.client.available
        started = time.monotonic()
        worker.prefill(list(range(600)))
        assert (await worker.client.fetch("r", SPACE, worker.hashes(list(range(600))), 0)).blocks == []
        assert time.monotonic() - started < 10 and worker.client.pending == 0
        assert ROOT not in worker.hashes(list(range(600)))
        await worker.close()
