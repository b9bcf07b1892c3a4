"""The system that a drill is held at: its processes, what they owe, and how to reach into them.

Knows: signals to processes by name, fault points over the bus, the audits by which a process says what memory it still holds.
Two kinds: `Own` brings a whole system up and may do anything to it; `Borrowed` is a system that `headrace up` runs, where only
signals by pid are possible, since its processes have no fault points armed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.bus import Bus, BusError, Peers
from headrace.bus import messages as m
from headrace.cli.console import Console
from headrace.cli.drill.netns import Wire
from headrace.cli.errors import CommandError
from headrace.cli.process_stat import runs, started_at
from headrace.cli.state import StateDir, default_path
from headrace.cli.supervisor import Child, Supervisor
from headrace.cli.system import Options, System

# What must be 0 once nothing is going on.
OWED = ("live", "tickets", "used", "quarantined", "credits_used", "promised", "slots_out", "unbound", "handles", "grants",
        "checking", "waiting", "deposits", "writing", "queue", "deliveries")  # fmt: skip
POLL = 0.01  # seconds


class Target:
    """Processes by name: `gateway`, `prefill-1`, `decode-2`, `kvstore`, `nats`."""

    owned = False

    def __init__(self, console: Console) -> None:
        self.console = console
        self.url = ""
        self.bus: Bus = None  # type: ignore[assignment]  # set on entry
        self.peers: Peers = None  # type: ignore[assignment]

    async def __aenter__(self) -> Target:
        await self._open()
        try:
            self.bus = await Bus.connect(self._bus_settings(), name="headrace-drill")
            self.peers = Peers(self.bus)
            await self.peers.start()
            await self.ready(30.0)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            if self.peers is not None:
                await self.peers.stop()
            if self.bus is not None:
                await self.bus.close()
        finally:
            await self._close()

    async def _open(self) -> None:
        raise NotImplementedError

    async def _close(self) -> None:
        raise NotImplementedError

    def _bus_settings(self) -> Any:
        raise NotImplementedError

    def pids(self) -> dict[str, int]:
        """The processes that run now."""
        raise NotImplementedError

    # ------------------------------------------------------------ what runs

    def names(self, role: str = "") -> list[str]:
        """Services, of one role or all, in order."""
        return sorted(name for name in self.pids() if name != "nats" and name.startswith(role))

    def presence(self, name: str) -> m.Presence | None:
        """The ready instance of the process that runs under this name now; what its dead predecessor said does not count."""
        pid = self.pids().get(name, 0)
        born = started_at(pid)
        if not born:
            return None
        found = [p for p in self.peers.all() if p.name == name and p.state == "ready" and p.epoch / 1e9 > born - 0.1]
        return max(found, key=lambda p: p.epoch, default=None)

    def instance_names(self) -> dict[str, str]:
        """instance id -> name of its process, of all that are known now."""
        return {p.instance: p.name for p in self.peers.all()}

    def model(self) -> str:
        """The name by which clients ask for the model."""
        return next((p.model for p in self.peers.by_role("decode") if p.model), "")

    async def until(self, condition: Callable[[], Any], timeout: float, what: str) -> Any:
        """Wait for a condition; CommandError after `timeout` seconds says `what` did not come."""
        end = time.monotonic() + timeout
        while not (value := condition()):
            if time.monotonic() > end:
                raise CommandError(f"after {timeout:g} s: {what}")
            await asyncio.sleep(POLL)
        return value

    # ------------------------------------------------------------ reaching in

    def signal(self, name: str, number: int) -> int:
        """Send a signal; -> the pid, 0 when the process does not run."""
        pid = self.pids().get(name, 0)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pid

    async def arm(self, name: str, faults: str) -> None:
        """Replace the fault points of a process. CommandError when it has none."""
        presence = await self.until(lambda: self.presence(name), 60.0, f"{name} is not ready, so nothing can be armed there")
        answer = await self.bus.request(presence.role, presence.instance, "arm", m.Arm(faults), timeout=3.0)
        if not isinstance(answer, m.Done):
            raise CommandError(f"{name} takes no faults: {getattr(answer, 'message', answer)}")

    # ------------------------------------------------------------ recovered?

    async def ready(self, timeout: float) -> None:
        """Wait until every process runs and says that it is ready."""

        def missing() -> list[str]:
            pids = self.pids()
            return [name for name in self.expected if name not in pids or (name != "nats" and not self.presence(name))]

        end = time.monotonic() + timeout
        while away := missing():
            if time.monotonic() > end:
                raise CommandError(f"after {timeout:g} s these are not ready: {', '.join(away)}")
            await asyncio.sleep(POLL)

    @property
    def expected(self) -> list[str]:
        """All processes that the system should have."""
        raise NotImplementedError

    async def audit(self, name: str) -> dict[str, Any]:
        """What a process finds when it walks the owners of its memory; an `error` when it can't be asked."""
        presence = self.presence(name)
        if presence is None:
            return {"ok": False, "error": f"{name} is not there"}
        try:
            answer = await self.bus.request(presence.role, presence.instance, "audit", m.Ping(), timeout=2.0)
        except BusError as error:
            return {"ok": False, "error": str(error)}
        if not isinstance(answer, m.Done):
            return {"ok": False, "error": getattr(answer, "message", repr(answer))}
        return json.loads(answer.state)

    async def debts(self) -> dict[str, str]:
        """Who owes what: name -> text; empty when every pool is whole."""
        found = {}
        names = self.names()
        for name, audit in zip(names, await asyncio.gather(*map(self.audit, names)), strict=True):
            owed = {key: audit[key] for key in OWED if audit.get(key)}
            if not audit.get("ok") or owed:
                found[name] = audit.get("error") or ", ".join(f"{key} {value}" for key, value in owed.items())
        return found

    async def whole(self, timeout: float) -> float:
        """Wait until nobody owes anything; -> seconds it took. CommandError names who owes what."""
        began = time.monotonic()
        while debts := await self.debts():
            if time.monotonic() - began > timeout:
                raise CommandError(f"after {timeout:g} s " + "; ".join(f"{name}: {text}" for name, text in debts.items()))
            await asyncio.sleep(0.02)
        return time.monotonic() - began


class Own(Target):
    """A system of the drill's own, on free ports, with fault points. `settings`: of the services, as in a settings file."""

    owned = True
    wire: Wire | None = None  # to a network namespace, for partitions

    def __init__(self, console: Console, settings: dict[str, Any], **options: Any) -> None:
        super().__init__(console)
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-drill-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        self._config, self._settings = folder / "drill.yaml", settings | {"test_faults": "remote"}
        state = StateDir(folder / "state")
        state.checkpoints = StateDir(default_path()).checkpoints  # made once, kept
        self.system = System(Options(config=self._config, port=0, drain_seconds=5.0, **options), state, Console(quiet=True))
        self.system.console.alert = lambda text: None  # deaths are what this is about

    def also(self, role: str, **settings: Any) -> None:
        """More settings of a role, before the start."""
        self._settings = self._settings | {role: self._settings.get(role, {}) | settings}

    @property
    def supervisor(self) -> Supervisor:
        return self.system.supervisor

    async def _open(self) -> None:
        self.console.say("starting a system for the drill")
        self._config.write_text(json.dumps(self._settings))  # JSON is YAML
        await self.system.start()
        self.supervisor.longest_pause = 0.5
        self.url = self.system.url

    async def _close(self) -> None:
        for name in self.pids():
            self.signal(name, signal.SIGCONT)
        await self.system.stop()
        self._folder.cleanup()

    def _bus_settings(self) -> Any:
        return self.system.nats.settings

    def pids(self) -> dict[str, int]:
        return {child.name: child.pid for child in self.supervisor.children if child.pid and runs(child.pid)}

    @property
    def expected(self) -> list[str]:
        return [child.name for child in self.supervisor.children]

    async def another(self, role: str, name: str, before: list[str], flags: list[str]) -> Child:
        """One more worker, its command behind the words `before`; ready when this returns. `remove` ends it."""
        like = self.system.services[role][0]
        argv = [*before, *(name if word == like.name else word for word in like.argv), *flags]
        child = Child(name, argv, like.log.with_name(f"{name}.log"), like.env)
        await self.supervisor.start(child)
        await self.until(lambda: self.presence(name), 60.0, f"{name} is not ready; its log ends: {child.last_lines(2)}")
        return child

    async def remove(self, child: Child) -> None:
        self.signal(child.name, signal.SIGCONT)
        await self.supervisor.stop([child], 10.0)
        self.supervisor.children.remove(child)

    @property
    def shm_dir(self) -> Path:
        return self.system.shm_dir

    def log_end(self, name: str) -> list[str]:
        child = next(child for child in self.supervisor.children if child.name == name)
        return child.last_lines()

    async def outage(self, name: str, seconds: float) -> None:
        """Kill a process, and keep it away for so long."""
        child = next(child for child in self.supervisor.children if child.name == name)
        first, child.hold = child.pid, time.monotonic() + seconds
        self.signal(name, signal.SIGKILL)
        await self.until(lambda: child.pid not in (None, first), seconds + 10.0, f"{name} did not come back")


class Borrowed(Target):
    """The system that `headrace up` runs from a state directory."""

    def __init__(self, console: Console, state: StateDir) -> None:
        super().__init__(console)
        self.state = state
        self._expected: list[str] = []

    async def _open(self) -> None:
        running = self.state.read()
        if running is None:
            raise CommandError(f"no running system is recorded in {self.state.path}; leave --running out to start one")
        self.url, self._expected = running.url, list(running.processes)
        self._settings = running.bus_settings()

    async def _close(self) -> None:
        for name in self.pids():
            self.signal(name, signal.SIGCONT)

    def _bus_settings(self) -> Any:
        return self._settings

    def pids(self) -> dict[str, int]:
        running = self.state.read()
        return running.alive() if running else {}

    @property
    def expected(self) -> list[str]:
        return self._expected
