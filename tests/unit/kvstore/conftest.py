"""A real nats-server, a real store in this process or another, a worker with registered memory."""

import contextlib
import os
import shutil
import tempfile

import pytest

from headrace.bus import Bus, BusSettings
from headrace.bus.testing import NatsServer


@pytest.fixture(scope="module")
def nats():
    with NatsServer() as server:
        yield server


@pytest.fixture
def shm_dir():
    path = tempfile.mkdtemp(prefix="headrace-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    yield path
    left = [name for name in os.listdir(path) if name != "nonce"]
    shutil.rmtree(path)
    assert not left, f"files left behind: {left}"


@pytest.fixture
async def bus(nats):
    bus = await Bus.connect(BusSettings(nats_url=nats.url), name="test")
    yield bus
    with contextlib.suppress(Exception):
        await bus.close()
