"""The kvstore as workers see it: a real nats-server, bytes over shm and tcp, and the store as a process of its own."""

import asyncio
import json
import os
import random
import signal
import sys
import time
from zlib import crc32

import aiohttp
import pytest

from headrace.bus import Peers, Trace, gather, subjects
from headrace.bus import messages as m
from headrace.bus.testing import eventually
from headrace.kv.hashing import ROOT, BlockHasher, namespace_key
from headrace.kvstore.service import KvStoreService
from headrace.kvstore.settings import KvStoreSettings
from headrace.transfer import GenerationRefused, Links, Memory

BLOCK = 113_920
NS = namespace_key(b"tenant", None)
HASHES = BlockHasher("layout", NS).hashes(range(128 * 6))
PARENTS = [ROOT, *HASHES[:-1]]


def settings(nats, shm_dir, **more) -> KvStoreSettings:
    return KvStoreSettings(nats_url=nats.url, shm_dir=shm_dir, capacity_bytes="4MiB", **more)


class Worker:
    """As little of a worker as the tests need."""

    def __init__(self, bus, store: str, shm_dir: str, kind: str = "shm") -> None:
        self.bus, self.store = bus, store
        self.memory = Memory("worker", shm_dir=shm_dir, kinds=(kind,))
        self.links = Links(self.memory.incarnation, (kind,), shm_dir)

    async def ask(self, verb: str, message):
        return await self.bus.request("kvstore", self.store, verb, message, timeout=5.0)

    async def reserve(self, hashes, parents, nbytes=BLOCK, kind="block", namespace=NS, ttl=10.0, request="r1"):
        return await self.ask(
            "reserve",
            m.KvReserve(
                "worker", self.memory.incarnation, namespace, b"".join(hashes), [nbytes] * len(hashes), kind, ttl,
                b"".join(parents), [request],
            ),
        )  # fmt: skip

    async def put(self, hashes, parents, data, **more):
        """Reserve, write out of band, commit."""
        granted = await self.reserve(hashes, parents, len(data[0]), **more)
        if not isinstance(granted, m.KvReserved) or not granted.grant:
            return granted
        wanted = [(offset, part) for offset, part in zip(granted.offsets, data, strict=True) if offset >= 0]
        peer = await self.links.get(granted.memory)
        await peer.write("arena", wanted, granted.generation, time.monotonic() + 5)
        await peer.flush(time.monotonic() + 5, granted.generation)
        return await self.ask("commit", m.KvCommit(granted.grant, granted.generation, [crc32(part) for _, part in wanted]))

    async def fetch(self, hashes, states=(), namespace=NS, request="r1"):
        """Lookup, read out of band, check, release. -> (data of blocks, data of states, were the pins held)"""
        found = await self.ask("lookup", m.KvLookup("worker", namespace, b"".join(hashes), b"".join(states), 10.0, request))
        if not found.handle:
            return [], [None] * len(states), False
        peer = await self.links.get(found.memory)
        places = found.blocks + [state for state in found.states if state is not None]
        parts = await peer.read("arena", [(p.offset, p.nbytes) for p in places], deadline=time.monotonic() + 5)
        assert [crc32(part) for part in parts] == [place.checksum for place in places]
        released = await self.ask("release", m.KvRelease(found.handle))
        rest = iter(parts[len(found.blocks) :])
        return parts[: len(found.blocks)], [None if s is None else next(rest) for s in found.states], released.valid

    async def close(self):
        await self.links.close()
        await self.memory.close()


@pytest.fixture
async def service(nats, shm_dir):
    service = KvStoreService(settings(nats, shm_dir))
    await service.start()
    yield service
    await service.stop()


@pytest.fixture(params=["shm", "tcp"])
async def worker(request, bus, service, shm_dir):
    worker = Worker(bus, service.instance, shm_dir, request.param)
    yield worker
    await worker.close()


def blocks(count: int, nbytes: int = BLOCK, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(nbytes) for _ in range(count)]


async def test_what_was_written_is_read_back(worker, service):
    data, state = blocks(4), blocks(1, 300_000, seed=1)
    assert await worker.put(HASHES[:4], PARENTS[:4], data) == m.KvStored(4)
    assert await worker.put([HASHES[3]], [ROOT], state, kind="state") == m.KvStored(1)
    got, states, valid = await worker.fetch(HASHES, states=HASHES)
    assert [bytes(part) for part in got] == data and valid
    assert [None if s is None else bytes(s) for s in states] == [None, None, None, state[0], None, None]
    assert (await worker.fetch(HASHES, namespace=namespace_key(b"other", None)))[0] == []
    again = await worker.reserve(HASHES[:4], PARENTS[:4])
    assert again.grant == "" and again.offsets == [-1] * 4
    service.store.check()
    assert service.store.bytes_by_state()["pinned"] == 0


async def test_a_broken_block_is_never_published(worker, service):
    granted = await worker.reserve(HASHES[:2], PARENTS[:2])
    data = blocks(2)
    peer = await worker.links.get(granted.memory)
    await peer.write(
        "arena", [(granted.offsets[0], data[0]), (granted.offsets[1], data[0])], granted.generation, time.monotonic() + 5
    )
    await peer.flush(time.monotonic() + 5, granted.generation)
    commit = m.KvCommit(granted.grant, granted.generation, [crc32(part) for part in data])
    first, second = await asyncio.gather(worker.ask("commit", commit), worker.ask("commit", commit))  # a retry on its heels
    assert first == second == m.KvStored(1, 1)
    assert await worker.ask("commit", commit) == m.KvStored(1, 1)
    assert len((await worker.fetch(HASHES))[0]) == 1
    with pytest.raises(GenerationRefused):  # the grant is over: nothing can be changed behind the checksum
        await peer.write("arena", [(granted.offsets[0], data[1])], granted.generation, time.monotonic() + 5)
        await peer.flush(time.monotonic() + 5, granted.generation)
    service.store.check()


async def test_a_block_whose_write_is_under_way_is_not_there_yet_and_nobody_waits_for_it(worker, service):
    """Half of it is in the arena, and later all of it: only the commit, with its checksum, makes it visible."""
    data = blocks(3)
    assert await worker.put(HASHES[:1], PARENTS[:1], data[:1]) == m.KvStored(1)
    granted = await worker.reserve(HASHES[1:3], PARENTS[1:3])
    peer, until = await worker.links.get(granted.memory), time.monotonic() + 30
    half = BLOCK // 2
    audit = json.loads((await worker.ask("audit", m.Ping())).state)
    assert audit["ok"] and audit["grants"] == 1 and audit["writing"] >= 2 * BLOCK
    for done in (half, BLOCK):
        await peer.write("arena", [(granted.offsets[0], data[1][:done])], granted.generation, until)
        await peer.flush(until, granted.generation)
        got, states, valid = await worker.fetch(HASHES[:3], states=HASHES[:3])
        assert [bytes(part) for part in got] == data[:1] and states == [None] * 3 and valid
        again = await worker.reserve(HASHES[1:2], PARENTS[1:2])
        assert again.grant == "" and again.offsets == [-1], "a second writer of the same block has nothing to do"
    await peer.write("arena", [(granted.offsets[1], data[2])], granted.generation, until)
    await peer.flush(until, granted.generation)
    commit = m.KvCommit(granted.grant, granted.generation, [crc32(part) for part in data[1:]])
    assert await worker.ask("commit", commit) == m.KvStored(2)
    assert [bytes(part) for part in (await worker.fetch(HASHES[:3]))[0]] == data
    audit = json.loads((await worker.ask("audit", m.Ping())).state)
    assert audit["ok"] and audit["grants"] == audit["handles"] == audit["writing"] == 0


async def test_refusals_name_what_is_wrong(worker, service):
    unknown = await worker.ask("commit", m.KvCommit("nosuch", 1, []))
    assert isinstance(unknown, m.Refused) and unknown.code == "unknown"
    assert await worker.ask("release", m.KvRelease("nosuch")) == m.KvReleased(False)
    big = await worker.reserve([HASHES[0]], [ROOT], nbytes=1 << 30)
    assert big.code == "invalid" and "4,194,304" in big.message
    full = await worker.reserve([bytes([i]) * 16 for i in range(37)], [ROOT] * 37)
    assert full.code == "full" and full.retry_after > 0 and "4,194,304" in full.message
    granted = await worker.reserve(HASHES[:1], [ROOT])
    assert (await worker.ask("commit", m.KvCommit(granted.grant, granted.generation + 1, [0]))).code == "stale"
    assert (await worker.ask("commit", m.KvCommit(granted.grant, granted.generation, []))).code == "invalid"
    assert (await worker.ask("release", m.KvRelease(granted.grant))).valid
    assert (await worker.ask("commit", m.KvCommit(granted.grant, granted.generation, [0]))).code == "stale"
    service.set_state("draining")
    assert (await worker.ask("lookup", m.KvLookup("worker", NS, HASHES[0]))).code == "draining"
    assert (await worker.reserve(HASHES[:1], [ROOT])).code == "draining"
    service.store.check()


async def test_pins_of_a_worker_that_forgot_them_expire(worker, service):
    await worker.put(HASHES[:1], [ROOT], blocks(1))
    found = await worker.ask("lookup", m.KvLookup("worker", NS, HASHES[0], b"", 0.05))
    assert service.store.bytes_by_state()["pinned"] == BLOCK
    await eventually(lambda: service.store.bytes_by_state()["pinned"] == 0)
    assert not (await worker.ask("release", m.KvRelease(found.handle))).valid


async def test_events_tell_what_is_here_and_a_snapshot_pages_it(worker, service, bus):
    seen: list[m.KvEvents] = []
    subscription = await bus.subscribe(subjects.kv_events(service.instance), lambda message, subject: seen.append(message))
    await bus.flush()
    await worker.put(HASHES[:3], PARENTS[:3], blocks(3))
    await eventually(lambda: seen)
    assert seen[0].stored == b"".join(HASHES[:3]) and (seen[0].epoch, seen[0].seq) == (service.epoch, 1)
    page = await worker.ask("blocks", m.KvSnapshot())
    assert page == m.KvBlocks(service.epoch, 1, b"".join(HASHES[:3]), -1)
    assert (await worker.ask("blocks", m.KvSnapshot(99))).code == "invalid"
    for number in range(8):  # fill it up: what was first goes
        await worker.put([bytes([number, i]) * 8 for i in range(4)], [ROOT] * 4, blocks(4))
    await eventually(lambda: any(event.removed for event in seen))
    await asyncio.sleep(0.05)
    assert [event.seq for event in seen] == list(range(1, len(seen) + 1))
    resident: set[bytes] = set()
    for event in seen:
        resident |= {event.stored[i : i + 16] for i in range(0, len(event.stored), 16)}
        resident -= {event.removed[i : i + 16] for i in range(0, len(event.removed), 16)}
    assert resident == {stored.key[2] for stored in service.store.objects}
    await subscription.close()


async def test_trace_and_metrics_speak_of_it(worker, service, bus):
    await worker.put(HASHES[:2], PARENTS[:2], blocks(2), request="request-7")
    await worker.fetch(HASHES, request="request-7")
    events = await gather(bus, [("kvstore", service.instance)], "request-7")
    assert [event["event"] for event in events] == ["kvstore.stored", "kvstore.lookup", "kvstore.released"]
    assert all(event["ms"] > 0 for event in events)
    assert events[0]["objects"] == 2 and events[1]["blocks"] == 2 and events[2]["valid"]
    async with aiohttp.ClientSession() as session, session.get(f"{service.http_url}/metrics") as answer:
        text = await answer.text()
    for line in (
        "headrace_kvstore_capacity_bytes 4.194304e+06",
        f'headrace_kvstore_bytes{{state="stored"}} {2 * BLOCK:.1f}',
        'headrace_kvstore_objects{kind="block"} 2.0',
        "headrace_kvstore_stored_blocks_total 2.0",
        "headrace_kvstore_hit_keys_total 2.0",
        "headrace_kvstore_lookup_seconds_count 1.0",
        "headrace_kvstore_check_seconds_count 1.0",
    ):
        assert line in text, text
    assert isinstance(service.trace, Trace)


# ---------------------------------------------------------------- as a process


async def start_process(nats, shm_dir, *flags: str, stderr=None):
    command = [
        sys.executable,
        "-m",
        "headrace.kvstore",
        "--nats-url",
        nats.url,
        "--shm-dir",
        shm_dir,
        "--log-level",
        "warning",
        *flags,
    ]
    return await asyncio.create_subprocess_exec(*command, stderr=stderr)


async def find_store(peers: Peers, known=()) -> m.Presence:
    await eventually(lambda: [p for p in peers.by_role("kvstore") if p.instance not in known], timeout=20)
    return next(p for p in peers.by_role("kvstore") if p.instance not in known)


@pytest.fixture
async def peers(bus):
    peers = Peers(bus)
    await peers.start()
    yield peers
    await peers.stop()


async def test_a_process_of_its_own_killed_and_started_again(nats, bus, peers, shm_dir):
    process = await start_process(nats, shm_dir, "--capacity-bytes", "4MiB", "--name", "first")
    presence = await find_store(peers)
    worker = Worker(bus, presence.instance, shm_dir)
    data = blocks(3)
    assert await worker.put(HASHES[:3], PARENTS[:3], data) == m.KvStored(3)
    assert [bytes(part) for part in (await worker.fetch(HASHES))[0]] == data
    process.send_signal(signal.SIGKILL)
    await process.wait()
    again = await start_process(nats, shm_dir, "--capacity-bytes", "4MiB")
    second = await find_store(peers, known={presence.instance})
    assert not [name for name in os.listdir(shm_dir) if presence.instance in name]  # the dead one's arena was swept
    worker.store = second.instance
    assert await worker.fetch(HASHES) == ([], [], False)
    assert await worker.put(HASHES[:3], PARENTS[:3], data) == m.KvStored(3)
    again.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(again.wait(), 20) == 0
    await worker.close()


async def test_a_writer_that_dies_gives_its_room_back(nats, service, bus, shm_dir):
    code = (
        "import asyncio, sys, time\n"
        "from headrace.bus import Bus, BusSettings, messages as m\n"
        "from headrace.transfer import Memory\n"
        "async def main():\n"
        "    bus = await Bus.connect(BusSettings(nats_url=sys.argv[1]), name='w')\n"
        "    memory = Memory('worker', shm_dir=sys.argv[2], kinds=('shm',))\n"
        "    r = m.KvReserve('w', memory.incarnation, b'n' * 16, b'k' * 16, [1000], ttl=0.2)\n"
        "    print(await bus.request('kvstore', sys.argv[3], 'reserve', r), flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, nats.url, shm_dir, service.instance, stdout=asyncio.subprocess.PIPE
    )
    assert b"KvReserved" in await process.stdout.readline()
    await eventually(lambda: service.store.bytes_by_state()["quarantined"] > 0)
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(0.6)
    assert service.store.bytes_by_state()["quarantined"] == 1024  # stopped is not dead
    process.kill()
    await process.wait()
    await eventually(lambda: service.store.bytes_by_state()["quarantined"] == 0)
    service.store.check()
    sweeper = Memory("sweeper", shm_dir=shm_dir, kinds=("shm",))
    await sweeper.close()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--capacity-bytes", "1000TiB"], b"bytes of shared memory"),
        (["--capacity-bytes", "1000TiB", "--transports", "tcp"], b"bytes of memory"),
        (["--capacity-bytes", "4MiB", "--shm-dir", "/proc/nowhere"], b"--transports tcp"),
    ],
)
async def test_a_start_that_can_not_be_is_one_clear_sentence(nats, shm_dir, flags, words):
    process = await start_process(nats, shm_dir, *flags, stderr=asyncio.subprocess.PIPE)
    _, errors = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 1
    last = errors.strip().splitlines()[-1]
    assert last.startswith(b"headrace kvstore: ") and words in last and b"Traceback" not in errors
