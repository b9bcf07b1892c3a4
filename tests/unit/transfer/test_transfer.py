"""Both transports behave the same: place, flush, commit, read, refuse, stop."""

import asyncio
import contextlib
import os
import random
import threading
import time
from pathlib import Path

import msgspec
import pytest

from headrace.transfer import (
    Address,
    BadRange,
    DeadlineExceeded,
    GenerationRefused,
    Links,
    Memory,
    NoCommonKind,
    PeerLost,
    TransferError,
    connect,
    frames,
    shm,
)
from headrace.transfer.memory import read_u64

WHOLE = {"kv": [(0, 8 << 20)], "slab": [(0, 100_000)], "mailbox": [(0, 512)]}


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


async def test_random_parts_land_where_they_belong(pair):
    owner, peer = pair
    owner.arm(7, WHOLE)
    rng = random.Random(1)
    expected = bytearray(8 << 20)
    writes = []
    for _ in range(6):
        pieces = []
        for _ in range(rng.choice([1, 3, 20])):
            size = rng.choice([1, 8, 500, 113_920, 113_920, 1_200_000])
            offset = rng.randrange(len(expected) - size)
            data = rng.randbytes(size)
            pieces.append((offset, rng.choice([bytes, bytearray, memoryview])(data)))
            expected[offset : offset + size] = data
        writes.append(pieces)
    for pieces in writes:
        await peer.write("kv", pieces, 7, soon())
    await peer.flush(soon(), 7)
    assert owner.view("kv") == expected


async def test_concurrent_writers_share_a_peer(pair):
    owner, peer = pair
    part = 1 << 20
    for generation in range(1, 9):
        owner.arm(generation, {"kv": [((generation - 1) * part, part)], "mailbox": [(8 * generation, 8)]})

    async def one(generation: int):
        data = bytes([generation]) * part
        await peer.write("kv", [((generation - 1) * part, data)], generation, soon())
        await peer.commit("mailbox", 8 * generation, generation << 32 | 1, generation, soon())
        assert owner.view("kv")[(generation - 1) * part : generation * part] == data  # placed before the flag

    await asyncio.gather(*(one(generation) for generation in range(1, 9)))
    assert [read_u64(owner.view("mailbox"), 8 * g) for g in range(1, 9)] == [g << 32 | 1 for g in range(1, 9)]


async def test_read_back_into_own_buffers_and_new_ones(pair):
    owner, peer = pair
    data = random.Random(2).randbytes(4 << 20)
    owner.view("arena")[:] = data
    ranges = [(5, 10), (0, 3 << 20), (1 << 20, 113_920), (4 << 20, 0)]
    got = await peer.read("arena", ranges, deadline=soon())
    assert [bytes(part) for part in got] == [data[offset : offset + size] for offset, size in ranges]
    target = bytearray(20)
    await peer.read("arena", [(100, 10), (200, 10)], deadline=soon(), into=[memoryview(target)[:10], memoryview(target)[10:]])
    assert target == data[100:110] + data[200:210]
    many = [(i * 16, 16) for i in range(3000)]
    assert b"".join(await peer.read("arena", many, deadline=soon())) == data[: 3000 * 16]
    with pytest.raises(BadRange):
        await peer.read("arena", [(0, 10)], deadline=soon(), into=[bytearray(9)])


async def test_many_reads_and_writes_at_once(pair):
    """More than the owner queues, mixed with writes, some given up: every answer is its own."""
    owner, peer = pair
    data = random.Random(3).randbytes(4 << 20)
    owner.view("arena")[:] = data
    owner.arm(1, WHOLE)

    async def read(i: int) -> None:
        offset, size = i * 9_000, 1 + i * 400
        (got,) = await peer.read("arena", [(offset, size)], deadline=soon(30))
        assert got == data[offset : offset + size]

    async def write(i: int) -> None:
        await peer.write("kv", [(i * 20_000, bytes([i + 1]) * 20_000)], 1, soon(30))

    async def give_up(i: int) -> None:
        target = bytearray(100_000)
        reading = asyncio.create_task(peer.read("arena", [(0, 100_000)], deadline=soon(30), into=[target]))
        await asyncio.sleep(0)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        target[:] = bytes(100_000)
        await asyncio.sleep(0.05)
        assert not any(target), "bytes arrived after the read was given up"

    await asyncio.gather(
        *(task(i) for i in range(200) for task in (read, write) if task is read or i < 100), *map(give_up, range(10))
    )
    await peer.flush(soon(), 1)
    assert all(owner.view("kv")[i * 20_000 : (i + 1) * 20_000] == bytes([i + 1]) * 20_000 for i in range(100))


async def test_an_unreadable_region_needs_a_generation(pair):
    owner, peer = pair
    with pytest.raises(GenerationRefused, match="kv"):
        await peer.read("kv", [(0, 10)], deadline=soon())
    owner.arm(1, {"kv": [(0, 100)]})
    assert await peer.read("kv", [(0, 10)], generation=1, deadline=soon()) == [bytes(10)]


async def test_unarmed_and_disarmed_generations_are_refused(pair):
    owner, peer = pair
    for _ in range(2):  # never armed, then disarmed
        with pytest.raises(GenerationRefused, match="generation 3"):
            await peer.write("kv", [(0, b"x" * 100)], 3, soon())
            await peer.flush(soon(), 3)
        with pytest.raises(GenerationRefused):
            await peer.commit("mailbox", 8, 1, 3, soon())
        if not owner.is_armed(2):
            owner.arm(2, WHOLE)
            owner.disarm(2)
            owner.disarm(2)  # idempotent
    assert not any(owner.view("kv")[:100]) and read_u64(owner.view("mailbox"), 8) == 0
    owner.arm(4, WHOLE)  # the refusals cost nobody else anything
    await peer.write("kv", [(0, b"x" * 100)], 4, soon())
    await peer.flush(soon(), 4)
    assert owner.view("kv")[:100] == b"x" * 100


async def test_ranges_outside_a_region(pair):
    owner, peer = pair
    owner.arm(1, WHOLE)
    with pytest.raises((BadRange, GenerationRefused)):
        await peer.write("kv", [((8 << 20) - 4, b"12345678")], 1, soon())
        await peer.flush(soon(), 1)
    with pytest.raises((BadRange, GenerationRefused)):
        await peer.write("nosuch", [(0, b"1")], 1, soon())
        await peer.flush(soon(), 1)
    with pytest.raises((BadRange, GenerationRefused)):
        await peer.read("arena", [(0, 5 << 20)], deadline=soon())
    assert not any(owner.view("kv")[-8:])


async def test_tcp_owner_checks_ranges_before_it_places_a_byte():
    owner = Memory("owner", kinds=("tcp",))
    owner.register("kv", 1000)
    await owner.start()
    peer = await connect(owner.address(), "w~-~1")
    owner.arm(1, {"kv": [(100, 50), (150, 50), (400, 100)]})
    await peer.write("kv", [(100, b"a" * 100), (450, b"b" * 50)], 1, soon())  # 100..200 is two armed ranges side by side
    await peer.flush(soon(), 1)
    for offset, size in ((99, 10), (190, 11), (200, 1), (499, 2), (0, 1000)):
        owner.arm(2, {"kv": [(100, 100), (400, 100)]})
        await peer.write("kv", [(100, b"c"), (offset, b"c" * size)], 2, soon())
        with pytest.raises(GenerationRefused, match="may not write"):
            await peer.flush(soon(), 2)
        owner.disarm(2)
        peer._refused.clear()  # the test uses one generation again and again, which owners never do
    assert bytes(owner.view("kv")) == bytes(100) + b"a" * 100 + bytes(250) + b"b" * 50 + bytes(500)
    assert owner.stats()["refused_frames"] >= 1
    await peer.close()
    await owner.close()


async def test_tcp_disarm_in_the_middle_of_a_frame_stops_it(eventually):
    """Half a frame has arrived when the ticket is revoked: the other half is thrown away, the connection lives on."""
    owner = Memory("owner", kinds=("tcp",))
    owner.register("kv", 1000)
    await owner.start()
    peer = await connect(owner.address(), "w~-~1")
    owner.arm(1, {"kv": [(0, 1000)]})
    peer.send(frames.pack(frames.Write(1, "kv", [(0, 1000)])) + b"x" * 400)
    await eventually(lambda: owner.view("kv")[399] != 0)
    owner.disarm(1)
    peer.send(b"x" * 600)
    with pytest.raises(GenerationRefused, match="disarmed while bytes arrived"):
        await peer.flush(soon(), 1)
    assert bytes(owner.view("kv")) == b"x" * 400 + bytes(600)
    owner.arm(2, {"kv": [(0, 1000)]})
    await peer.write("kv", [(0, b"y" * 1000)], 2, soon())
    await peer.flush(soon(), 2)
    assert bytes(owner.view("kv")) == b"y" * 1000
    await peer.close()
    await owner.close()


async def test_deadline_passed_before_it_began(pair):
    owner, peer = pair
    owner.arm(1, WHOLE)
    with pytest.raises(DeadlineExceeded):
        await peer.write("kv", [(0, bytes(4 << 20))], 1, time.monotonic() - 1)
        await peer.flush(time.monotonic() - 1, 1)


async def test_cancelled_write_leaves_nothing_behind(pair):
    """After the cancellation the caller's buffer is its own again: changing it changes nothing at the owner's."""
    owner, peer = pair
    owner.arm(1, WHOLE)
    data = bytearray(b"a" * (8 << 20))
    writing = asyncio.create_task(peer.write("kv", [(0, data)], 1, soon()))
    await asyncio.sleep(0.0005)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    data[:] = b"b" * len(data)
    await peer.flush(soon(), 1)
    assert b"b" not in bytes(owner.view("kv"))
    await peer.write("kv", [(0, b"c" * 10)], 1, soon())  # and the peer still works
    await peer.flush(soon(), 1)
    assert owner.view("kv")[:10] == b"c" * 10


async def test_a_write_cancelled_twice_still_waits_for_its_copy(shm_dir, monkeypatch):
    """The first cancellation waits for the slice that is being copied; a second one must not end that wait."""
    begun, go_on = threading.Event(), threading.Event()

    def slowly(pieces, deadline, stop, copy_pieces=shm.copy_pieces):
        begun.set()
        go_on.wait(10)
        copy_pieces(pieces, deadline, lambda: None)

    monkeypatch.setattr(shm, "copy_pieces", slowly)
    owner = Memory("owner", shm_dir=shm_dir, kinds=("shm",))
    view = owner.register("kv", 1 << 20)
    owner.arm(1, {"kv": [(0, 1 << 20)]})
    peer = await connect(owner.address(), "writer~-~0", kinds=("shm",))
    writing = asyncio.create_task(peer.write("kv", [(0, b"a" * (1 << 20))], 1, soon()))
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(3):
        writing.cancel()
        await asyncio.sleep(0.01)
    assert not writing.done() and view[0] == 0
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert view[(1 << 20) - 1] == ord("a")
    await peer.close()
    view.release()
    await owner.close()


async def test_large_copies_leave_the_loop(pair):
    """While 64 MB go over, the loop's thread never computes for long between two turns (its CPU time: a busy machine is no
    failure)."""
    owner, peer = pair
    owner.arm(1, WHOLE)
    data = os.urandom(8 << 20)
    worst, running = 0.0, True

    async def watch():
        nonlocal worst
        while running:
            before = time.thread_time()
            await asyncio.sleep(0)
            worst = max(worst, time.thread_time() - before)

    watcher = asyncio.create_task(watch())
    for _ in range(8):
        await peer.write("kv", [(0, data)], 1, soon(30))
    await peer.flush(soon(30), 1)
    running = False
    await watcher
    assert owner.view("kv") == data
    assert worst < 0.02, f"the loop's thread computed for {worst * 1000:.1f} ms"


async def test_owner_closed(pair):
    owner, peer = pair
    owner.arm(1, WHOLE)
    await owner.close()
    with pytest.raises((PeerLost, GenerationRefused)):
        await peer.write("kv", [(0, bytes(1 << 20))], 1, soon())
        await peer.flush(soon(), 1)


async def test_connect_chooses_and_refuses(shm_dir):
    both = Memory("both", shm_dir=shm_dir)
    both.register("kv", 10)
    await both.start()
    peer = await connect(both.address(), both.incarnation)
    assert peer.kind == "shm" and peer.incarnation == both.incarnation
    await peer.close()
    peer = await connect(both.address(), both.incarnation, kinds=("tcp",))
    assert peer.kind == "tcp"
    await peer.close()
    shm_only = Memory("s", shm_dir=shm_dir, kinds=("shm",))
    with pytest.raises(NoCommonKind, match="offers shm; this side allows tcp"):
        await connect(shm_only.address(), "w~-~1", kinds=("tcp",))
    with pytest.raises(TransferError, match="not a memory address"):
        await connect(b"garbage", "w~-~1")
    await shm_only.close()
    await both.close()


async def test_shm_only_where_both_see_the_same_directory(shm_dir, tmp_path):
    owner = Memory("owner", shm_dir=shm_dir)
    owner.register("kv", 10)
    await owner.start()
    address = Address.decode(owner.address())
    elsewhere = msgspec.structs.replace(address, shm_dir="/not/mounted/here").encode()
    for data, own_dir, kind in (
        (owner.address(), None, "shm"),
        (elsewhere, shm_dir, "shm"),  # the same directory under another name (a container's mount)
        (elsewhere, None, "tcp"),
        (elsewhere, str(tmp_path), "tcp"),
        (msgspec.structs.replace(address, nonce="another host's").encode(), shm_dir, "tcp"),
    ):
        peer = await connect(data, "w~-~1", shm_dir=own_dir)
        assert peer.kind == kind
        await peer.close()
    with pytest.raises(NoCommonKind, match="not visible from here"):
        await connect(elsewhere, "w~-~1", kinds=("shm",))
    await owner.close()


async def test_tcp_needs_the_key_and_the_right_incarnation():
    owner = Memory("owner", kinds=("tcp",))
    await owner.start()
    address = Address.decode(owner.address())
    with pytest.raises(PeerLost, match="gone"):
        await connect(msgspec.structs.replace(address, key=b"wrong").encode(), "w~-~1")
    with pytest.raises(PeerLost, match="was wanted"):
        await connect(msgspec.structs.replace(address, incarnation="owner~-~old").encode(), "w~-~1")
    # whoever talks nonsense is cut off, and the server goes on
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"\xff" * 1000)
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    with contextlib.suppress(ConnectionResetError):
        await writer.wait_closed()
    peer = await connect(owner.address(), "w~-~1")
    await peer.close()
    await owner.close()
    with pytest.raises(PeerLost, match="can't reach"):
        await connect(address.encode(), "w~-~1")


async def test_who_does_not_introduce_himself_is_cut_off(monkeypatch, eventually):
    monkeypatch.setattr("headrace.transfer.server.HELLO", 0.05)
    owner = Memory("owner", kinds=("tcp",))
    await owner.start()
    address = Address.decode(owner.address())
    peer = await connect(owner.address(), "w~-~1")
    reader, writer = await asyncio.open_connection(address.host, address.port)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    await writer.wait_closed()
    assert owner.stats()["connections"] == 1 and not peer.closed  # those who did stay
    await peer.close()
    await owner.close()


async def test_links_open_once_and_replace_a_lost_peer():
    owner = Memory("owner", kinds=("tcp",))
    owner.register("kv", 10)
    await owner.start()
    links = Links("w~-~1", kinds=("tcp",))
    first, second = await asyncio.gather(links.get(owner.address()), links.get(owner.address()))
    assert first is second and owner.stats()["connections"] == 1
    first.abort("test")
    third = await links.get(owner.address())
    assert third is not first and not third.closed
    await links.close()
    assert third.closed
    await owner.close()


async def test_links_let_go_of_the_dead(shm_dir):
    """A dead owner's segments would take memory as long as this process maps them."""
    links = Links("w~-~1", shm_dir=shm_dir)
    first = Memory("first", shm_dir=shm_dir, kinds=("shm",))
    first.register("kv", 1 << 20)
    peer = await links.get(first.address())
    first.arm(1, {"kv": [(0, 1 << 20)]})
    await peer.write("kv", [(0, bytes(1 << 20))], 1, soon())
    await first.close()
    assert first.incarnation in Path("/proc/self/maps").read_text()
    second = Memory("second", shm_dir=shm_dir, kinds=("shm",))
    assert (await links.get(second.address())).kind == "shm"
    assert first.incarnation not in Path("/proc/self/maps").read_text()
    await links.close()
    await second.close()


async def test_a_commit_after_a_refused_write_is_refused(pair):
    """The flag must not claim what was thrown away, also when the flag's own range is armed."""
    owner, peer = pair
    owner.arm(1, {"kv": [(0, 100)], "mailbox": [(0, 8)]})
    with pytest.raises(BadRange, match="aligned"):
        await peer.commit("mailbox", 4, 5, 1, soon())
    if peer.kind == "tcp":
        await peer.write("kv", [(0, b"x" * 200)], 1, soon())
        with pytest.raises(GenerationRefused):
            await peer.commit("mailbox", 0, 5, 1, soon())
        assert read_u64(owner.view("mailbox"), 0) == 0
    with pytest.raises((BadRange, GenerationRefused)):
        await peer.commit("mailbox", 1 << 20, 5, 1, soon())


async def test_memory_refuses_what_makes_no_sense(shm_dir):
    memory = Memory("m", shm_dir=shm_dir, kinds=("shm",))
    memory.register("kv", 100)
    for bad, words in (
        (lambda: memory.register("kv", 1), "taken"),
        (lambda: memory.register("../x", 1), "plain word"),
        (lambda: memory.register("fence", 1), "plain word"),
        (lambda: memory.register("z", 0), "at least one byte"),
        (lambda: memory.arm(0, {}), "1 to"),
        (lambda: memory.arm(1, {"kv": [(90, 11)]}), "90..101"),
        (lambda: memory.arm(1, {"kv": [(-1, 11)]}), "outside"),
        (lambda: memory.arm(1, {"nosuch": []}), "no region 'nosuch'"),
        (lambda: Memory("a~b", shm_dir=shm_dir), "instance name"),
        (lambda: Memory("a", kinds=("rdma",)), "unknown transports"),
        (lambda: Memory("a", kinds=()), "no transport"),
    ):
        with pytest.raises(ValueError, match=words):
            bad()
    memory.arm(1, {"kv": [(0, 100)]})
    with pytest.raises(ValueError, match="armed already"):
        memory.arm(1, {})
    with pytest.raises(ValueError, match="fence slot"):
        memory.arm(1 + (1 << 16), {})
    memory.disarm(1)
    memory.arm(1 + (1 << 16), {})
    await memory.close()
    await memory.close()


async def test_a_closed_memory_makes_no_region_that_would_outlive_it(shm_dir, monkeypatch):
    """A start that is given up goes on in its thread: what it makes after, or during, the end leaves no file."""
    memory = Memory("owner", shm_dir=shm_dir, kinds=("shm",))
    began, go_on, allocate = threading.Event(), threading.Event(), os.posix_fallocate

    def slow(*arguments):
        began.set()
        assert go_on.wait(10)
        allocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    making = asyncio.create_task(asyncio.to_thread(memory.register, "kv", 1 << 20))
    await asyncio.to_thread(began.wait, 10)
    await memory.close()
    go_on.set()
    with pytest.raises(TransferError, match="was closed while region 'kv' was made"):
        await making
    with pytest.raises(TransferError, match="is closed; region 'slab' would outlive it"):
        memory.register("slab", 100)
    assert [name for name in os.listdir(shm_dir) if name != "nonce"] == []
