"""Two real processes: killed, stopped, late, swept; and a shared-memory directory that is too small."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from headrace.transfer import GenerationRefused, Memory, OutOfSpace, PeerLost, ShmUnavailable, connect, is_dead
from headrace.transfer.memory import read_u64

SIZE = 16 << 20


async def make_owner(shm_dir: str, kind: str) -> Memory:
    owner = Memory("owner", shm_dir=shm_dir, kinds=(kind,))
    owner.register("kv", SIZE)
    owner.register("mailbox", 64)
    await owner.start()
    owner.arm(1, {"kv": [(0, SIZE)], "mailbox": [(0, 64)]})
    return owner


async def settled(owner: Memory) -> bool:
    """Do the bytes stay as they are for a while?"""
    before = bytes(owner.view("kv"))
    await asyncio.sleep(0.15)
    return before == bytes(owner.view("kv"))


async def test_another_process_writes_and_commits(kind, shm_dir, spawn, line):
    owner = await make_owner(shm_dir, kind)
    process, _ = await spawn(owner, kind, "once")
    assert await line(process) == "committed"
    assert bytes(owner.view("kv")) == b"\x07" * SIZE and read_u64(owner.view("mailbox"), 8) == 1 << 32 | 1
    await owner.close()


async def test_killed_in_the_middle_of_a_write(kind, shm_dir, spawn, line, eventually):
    """kill -9: death is proven, and after the proof not one byte changes."""
    owner = await make_owner(shm_dir, kind)
    process, writer = await spawn(owner, kind, "forever")
    assert await line(process) == "writing"
    assert not owner.is_dead(writer)
    assert owner.fenced(writer) == (kind == "tcp")  # over tcp the owner itself is the fence
    process.kill()
    if kind == "shm":
        await eventually(lambda: owner.is_dead(writer))
    else:
        await eventually(lambda: owner.stats()["connections"] == 0)
    assert owner.fenced(writer) and await settled(owner)
    assert read_u64(owner.view("mailbox"), 8) == 0
    await owner.close()


async def test_a_stopped_process_is_not_dead_and_its_late_write_is_refused(kind, shm_dir, spawn, line):
    owner = await make_owner(shm_dir, kind)
    process, writer = await spawn(owner, kind, "forever")
    assert await line(process) == "writing"
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(0.1)
    assert not owner.is_dead(writer)
    owner.disarm(1)
    if kind == "tcp":  # what still lies in the socket is thrown away as well
        assert await settled(owner)
        before = bytes(owner.view("kv"))
    process.send_signal(signal.SIGCONT)
    assert await line(process) == "GenerationRefused"
    if kind == "tcp":
        assert before == bytes(owner.view("kv")), "a byte was placed after disarm"
    assert await settled(owner)
    await owner.close()


async def test_owner_killed_while_we_write(shm_dir, kind, line, end):
    """The writer notices within its own operation, not at a deadline."""
    code = (
        "import asyncio, sys\n"
        "from headrace.transfer import Memory\n"
        "async def main():\n"
        f"    m = Memory('owner', shm_dir=sys.argv[1], kinds=('{kind}',))\n"
        "    m.register('kv', 1 << 20); await m.start(); m.arm(1, {'kv': [(0, 1 << 20)]})\n"
        "    print(m.address().hex(), flush=True); await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, shm_dir, stdout=asyncio.subprocess.PIPE)
    peer = await connect(bytes.fromhex(await line(process)), "w~-~1", timeout=5)
    data = bytes(1 << 20)
    await peer.write("kv", [(0, data)], 1, time.monotonic() + 5)
    await end(process)
    started = time.monotonic()
    with pytest.raises(PeerLost):
        for _ in range(1000):
            await peer.write("kv", [(0, data)], 1, time.monotonic() + 5)
            await peer.flush(time.monotonic() + 5, 1)
    assert time.monotonic() - started < 1
    await peer.close()
    swept = Memory("sweeper", shm_dir=shm_dir, kinds=("shm",))
    assert len(swept.swept) == (kind == "shm")
    await swept.close()


async def test_a_stopped_owner_meets_the_deadline(shm_dir, spawn, line, end):
    """Over tcp a stopped owner takes no bytes: the write ends at its deadline and lets go of the buffer."""
    code = (
        "import asyncio\n"
        "from headrace.transfer import Memory\n"
        "async def main():\n"
        "    m = Memory('owner', kinds=('tcp',))\n"
        "    m.register('kv', 64 << 20); await m.start(); m.arm(1, {'kv': [(0, 64 << 20)]})\n"
        "    print(m.address().hex(), flush=True); await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    peer = await connect(bytes.fromhex(await line(process)), "w~-~1", timeout=5)
    process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        await peer.write("kv", [(0, bytes(64 << 20))], 1, started + 0.3)
    assert 0.2 < time.monotonic() - started < 2
    assert peer.closed  # half a frame is out: this connection is of no use any more
    with pytest.raises(PeerLost):
        await peer.flush(time.monotonic() + 1)
    await end(process)


async def test_what_the_dead_left_is_swept_and_the_living_are_spared(shm_dir, spawn, end):
    owner = await make_owner(shm_dir, "shm")
    process, writer = await spawn(owner, "shm", "hold")
    process.send_signal(signal.SIGSTOP)
    names = os.listdir(shm_dir)
    assert any(name.startswith(writer) for name in names) and any(name.startswith(owner.incarnation) for name in names)
    second = Memory("second", shm_dir=shm_dir, kinds=("shm",))
    assert second.swept == []
    await end(process)
    third = Memory("third", shm_dir=shm_dir, kinds=("shm",))
    assert third.swept == [writer]
    left = os.listdir(shm_dir)
    assert not any(name.startswith(writer) for name in left)
    assert any(name.startswith(owner.incarnation) for name in left)
    for memory in (owner, second, third):
        await memory.close()


async def test_death_is_proven_only_where_it_can_be(shm_dir, tmp_path):
    memory = Memory("m", shm_dir=shm_dir, kinds=("shm",))
    other = Memory("m", shm_dir=tmp_path, kinds=("shm",))
    assert not is_dead(memory.incarnation, shm_dir)
    await memory.close()
    assert is_dead(memory.incarnation, shm_dir)
    assert not is_dead(memory.incarnation, tmp_path)  # another directory proves nothing
    assert not is_dead(memory.incarnation, tmp_path / "missing")
    assert not is_dead("tcp-only~-~1234", shm_dir)
    assert other.fenced("tcp-only~-~1234") and other.fenced(memory.incarnation)  # neither can reach other's shared memory
    assert not other.fenced(other.incarnation)
    with pytest.raises(ValueError, match="not an incarnation"):
        is_dead("nonsense", shm_dir)
    await other.close()


async def test_lock_is_not_kept_by_children(shm_dir, line):
    """A subprocess started by the owner must not keep the owner's lock alive."""
    code = (
        "import subprocess, sys\n"
        "from headrace.transfer import Memory\n"
        "m = Memory('owner', shm_dir=sys.argv[1], kinds=('shm',))\n"
        "child = subprocess.Popen(['sleep', '30'], close_fds=False, stdout=subprocess.DEVNULL)\n"
        "print(m.incarnation, child.pid, flush=True)\n"
        "import os; os.kill(os.getpid(), 9)\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, shm_dir, stdout=asyncio.subprocess.PIPE)
    incarnation, child = (await line(process)).split()
    await process.wait()
    try:
        assert is_dead(incarnation, shm_dir)
    finally:
        os.kill(int(child), signal.SIGKILL)
    await process.stdout.read()
    sweeper = Memory("s", shm_dir=shm_dir, kinds=("shm",))
    assert sweeper.swept == [incarnation]
    await sweeper.close()


async def test_too_large_a_region_says_so_and_leaves_nothing(shm_dir):
    memory = Memory("m", shm_dir=shm_dir, kinds=("shm",))
    with pytest.raises(OutOfSpace) as caught:
        memory.register("kv", 1 << 50)
    for words in ("'kv'", "1,125,899,906,842,624 bytes", shm_dir, "bytes free", "--shm-dir", "--transports tcp", "shm_size"):
        assert words in str(caught.value)
    assert not any(name.endswith(".kv") for name in os.listdir(shm_dir))
    memory.register("kv", 1000)
    await memory.close()
    anonymous = Memory("m", kinds=("tcp",))
    with pytest.raises(OutOfSpace, match="are free"):
        anonymous.register("kv", 1 << 50)
    await anonymous.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_small_tmpfs_is_an_error_at_start_and_no_crash(tmp_path):
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(tmp_path)], capture_output=True)
    if mount.returncode:
        pytest.skip("can't mount here")
    try:
        memory = Memory("m", shm_dir=tmp_path, kinds=("shm",))
        view = memory.register("kv", 4 << 20)
        with pytest.raises(OutOfSpace, match="of 8,388,608 bytes free"):
            memory.register("slab", 6 << 20)
        view[:] = b"x" * len(view)  # what was granted is really there
        asyncio.run(memory.close())
        assert os.listdir(tmp_path) == ["nonce"]
        view.release()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


async def test_an_unusable_directory_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ShmUnavailable, match="--transports tcp"):
        Memory("m", shm_dir=tmp_path / "file" / "below")


async def test_nobody_else_may_look_into_the_segments(shm_dir):
    memory = Memory("m", shm_dir=shm_dir, kinds=("shm",))
    memory.register("kv", 100)
    for name in os.listdir(shm_dir):
        if name != "nonce":
            assert os.stat(os.path.join(shm_dir, name)).st_mode & 0o077 == 0
    await memory.close()


async def test_shm_refuses_a_generation_it_finds_disarmed(shm_dir):
    owner = await make_owner(shm_dir, "shm")
    peer = await connect(owner.address(), owner.incarnation)
    await peer.write("kv", [(0, b"a")], 1, time.monotonic() + 1)
    owner.disarm(1)
    with pytest.raises(GenerationRefused):
        await peer.write("kv", [(0, b"b")], 1, time.monotonic() + 1)
    assert owner.view("kv")[0] == ord("a")
    await peer.close()
    await owner.close()


def test_the_benchmark_prints_one_json_object():
    command = [sys.executable, "-m", "headrace.transfer.bench", "--json", "--repeat", "1"]
    printed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert {(row["kind"], row["what"]) for row in printed["rows"]} == {
        (kind, what) for kind in ("shm", "tcp") for what in ("write", "read", "blocks")
    }
    assert all(row["p50_us"] > 0 and row["gb_per_s"] >= 0 for row in printed["rows"])
