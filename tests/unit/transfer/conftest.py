"""A shared-memory directory of its own for every test, on a real tmpfs where there is one."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import uvloop

from headrace.transfer import Memory, connect

WRITER = Path(__file__).with_name("writer.py")


def pytest_asyncio_loop_factories(config, item):
    """Each test on both loops: the services run on uvloop, other users may not, and transports behave differently there."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


async def line(process) -> str:
    """The next line that a process prints."""
    async with asyncio.timeout(20):
        return (await process.stdout.readline()).decode().strip()


async def end(process) -> None:
    """Kill it, wait for it, and read its pipe to the end (a pipe left open is a warning later)."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
        process.kill()
    await process.stdout.read()
    await process.wait()


@pytest.fixture(name="end")
def _end():
    return end


@pytest.fixture
def shm_dir():
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = tempfile.mkdtemp(prefix="headrace-test-", dir=base)
    yield path
    left = [name for name in os.listdir(path) if name != "nonce"]
    shutil.rmtree(path)
    assert not left, f"files left behind: {left}"


@pytest.fixture(params=["shm", "tcp"])
def kind(request):
    return request.param


@pytest.fixture
async def pair(kind, shm_dir):
    """(owner's memory with regions kv, slab, mailbox and arena; a peer that writes into it)."""
    owner = Memory("owner", shm_dir=shm_dir, kinds=(kind,))
    for name, nbytes in (("kv", 8 << 20), ("slab", 100_000), ("mailbox", 512)):
        owner.register(name, nbytes)
    owner.register("arena", 4 << 20, readable=True)
    await owner.start()
    writer = Memory("writer", shm_dir=shm_dir, kinds=(kind,))
    peer = await connect(owner.address(), writer.incarnation, timeout=5)
    assert peer.kind == kind
    yield owner, peer
    await peer.close()
    await writer.close()
    await owner.close()


@pytest.fixture
async def spawn(shm_dir):
    """spawn(owner, kind, mode) -> a writer process that has connected, and its incarnation."""
    processes = []

    async def start(owner: Memory, kind: str, mode: str):
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(WRITER), owner.address().hex(), kind, shm_dir, mode, stdout=asyncio.subprocess.PIPE
        )
        processes.append(process)
        return process, await line(process)

    yield start
    for process in processes:
        await end(process)
    sweeper = Memory("sweeper", shm_dir=shm_dir, kinds=("shm",))  # removes what the killed writers left
    await sweeper.close()


async def _eventually(condition, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(0.005)


@pytest.fixture
def eventually():
    return _eventually


@pytest.fixture(name="line")
def _line():
    return line
