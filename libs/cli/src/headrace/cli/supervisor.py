"""Processes that must run until they are told to stop.

Knows: starting a process with its output in a file, noticing its end, starting it again with growing pauses, stopping it
within a budget. Does not know: what the processes are, in which order they belong, or when one is ready.

Every child is in its own session (a Ctrl-C at the terminal reaches only the supervisor, which then stops children in
order) and is told by the kernel to terminate when the supervisor dies, however it dies: nothing is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

BACKOFF_FIRST = 0.5  # seconds before the first restart; doubled each time
BACKOFF_MAX = 15.0  # seconds
STEADY_AFTER = 30.0  # seconds of life after which a later death counts as the first again
PR_SET_PDEATHSIG = 1


@dataclass
class Child:
    """One process to keep alive. `env` is added to this process's environment; `log` receives stdout and stderr."""

    name: str
    argv: list[str]
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    starts: int = 0
    keeper: asyncio.Task | None = None
    stopping: bool = False
    log_start: int = 0  # bytes of its log that earlier starts wrote
    hold: float = 0.0  # time.monotonic() before which it is not started again: a drill's outage

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process and self.process.returncode is None else None

    def last_lines(self, count: int = 8) -> list[str]:
        """The end of its log, of the last start only."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.log_start, self.log.stat().st_size - 16384))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return []
        return [line for line in lines if line.strip()][-count:]


@dataclass
class Death:
    """A child ended without being asked to, or could not be started again (`error`). `pause`: seconds until the next try."""

    child: Child
    status: int  # exit status; negative: the signal that killed it
    lived: float  # seconds
    pause: float
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"{self.child.name} could not be started: {self.error}"
        if self.status < 0:
            with contextlib.suppress(ValueError):
                return f"{self.child.name} was killed by {signal.Signals(-self.status).name} after {self.lived:.1f} s"
        return f"{self.child.name} ended with status {self.status} after {self.lived:.1f} s"


class Supervisor:
    """Keeps children alive. `on_death` is called for each unwanted end; on False the child is not started again.
    `on_restart` is called after each later start."""

    def __init__(self, on_death: Callable[[Death], bool], on_restart: Callable[[Child], None] = lambda child: None):
        self.on_death, self.on_restart = on_death, on_restart
        self.longest_pause = BACKOFF_MAX  # seconds
        self.children: list[Child] = []

    async def start(self, child: Child) -> None:
        """Start `child` and keep it alive. Raises OSError when the program cannot be executed at all."""
        self.children.append(child)
        await self._spawn(child)
        child.keeper = asyncio.create_task(self._keep(child), name=f"keep-{child.name}")

    async def stop(self, children: list[Child], budget: float) -> list[Child]:
        """SIGTERM to all of `children`, SIGKILL to those that still run after `budget` seconds; returns the killed."""
        for child in children:
            child.stopping = True
            self._signal(child, signal.SIGTERM)
            if child.keeper and not child.pid:  # sleeps before a restart
                child.keeper.cancel()
        keepers = [child.keeper for child in children if child.keeper]
        if not keepers:
            return []
        await asyncio.wait(keepers, timeout=budget)
        killed = [child for child in children if child.pid]
        for child in killed:
            self._signal(child, signal.SIGKILL)
        await asyncio.gather(*keepers, return_exceptions=True)
        return killed

    def kill_all(self) -> None:
        """SIGKILL to everything, at once."""
        for child in self.children:
            child.stopping = True
            self._signal(child, signal.SIGKILL)

    async def _keep(self, child: Child) -> None:
        pause, error = BACKOFF_FIRST, ""
        while True:
            began = time.monotonic()
            status = 127 if error else await child.process.wait()
            lived = time.monotonic() - began
            if child.stopping:
                return
            pause = BACKOFF_FIRST if lived > STEADY_AFTER else pause
            if not self.on_death(Death(child, status, lived, pause, error)):
                return
            await asyncio.sleep(max(pause, child.hold - time.monotonic()))
            pause = min(2 * pause, self.longest_pause)
            if child.stopping:
                return
            error = await self._spawn_again(child)

    async def _spawn_again(self, child: Child) -> str:
        """Start a child once more; -> why that was not possible (no memory, no descriptors, its log's disk is full), or ""."""
        try:
            await self._spawn(child)
        except OSError as error:
            return str(error)
        self.on_restart(child)
        return ""

    async def _spawn(self, child: Child) -> None:
        child.starts += 1
        with child.log.open("ab") as log:
            child.log_start = log.tell()
            child.process = await asyncio.create_subprocess_exec(
                *child.argv,
                env={**os.environ, **child.env},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @staticmethod
    def _signal(child: Child, number: int) -> None:
        if child.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)


_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Runs in the child before exec: SIGTERM when the parent ends (prctl(2))."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
