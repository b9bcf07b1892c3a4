"""The state directory: what a running system leaves for the other commands to find, and what outlives it.

    running.json    who runs: pid, URL, NATS address and password, model, processes (mode 600)
    nats.url        NATS address and password in one, for `nats --server "$(cat .headrace/nats.url)" sub 'headrace.trace.>'`
    logs/           one file per process, from the last start on
    checkpoints/    random checkpoints made by `up`
    lock            held while a system runs from here

Default: .headrace/ beside the launcher, or in the current directory without one; HEADRACE_STATE_DIR or --state-dir
choose another.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from headrace.bus import BusSettings
from headrace.cli.console import Console
from headrace.cli.errors import CommandError
from headrace.cli.full_disk import naming, trouble
from headrace.cli.process_stat import runs_under
from headrace.cli.program import program

PATIENCE = 240.0  # seconds; `up` itself gives up before


@dataclass
class Running:
    """A system that is up, as the other commands need it."""

    pid: int
    url: str  # of the gateway, without a slash at the end
    nats_url: str
    nats_user: str
    nats_password: str
    model: str
    engine: str
    processes: dict[str, int] = field(default_factory=dict)  # name -> pid, kept up to date; `alive` says which still are

    def alive(self) -> dict[str, int]:
        """Processes that run now, name -> pid. A record that could not be renewed names dead ones, whose pids may be
        anybody's by now: only children of this system count."""
        return {name: pid for name, pid in self.processes.items() if runs_under(self.pid, pid)}

    def bus_settings(self) -> BusSettings:
        return BusSettings(self.nats_url, self.nats_user, self.nats_password)


class StateDir:
    """One state directory. Reading needs no lock; `acquire` is for the command that runs the system."""

    def __init__(self, path: str | Path):
        self.path = Path(path).absolute()
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self._running = self.path / "running.json"
        self._nats_url = self.path / "nats.url"
        self._lock = None

    def acquire(self) -> None:
        """Become the one system that runs from here, and start with empty logs. Raises CommandError when another does."""
        try:
            for folder in (self.path, self.logs, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("a+")
        except OSError as error:
            what = f"cannot write to the state directory {self.path}: {trouble(error)}"
            raise CommandError(f"{what}, or use --state-dir") from None
        if not self._take():
            self.close()
            running = self._record()
            who = f"pid {running.pid}, {running.url}" if running else "it is still starting"
            raise CommandError(
                f"a system already runs from {self.path} ({who}); stop it with Ctrl-C in its terminal, or start a second "
                f"one with --state-dir"
            )
        self._forget()
        for log in self.logs.glob("*.log"):
            log.unlink()

    def _take(self) -> bool:
        """The lock; a command that looks whether anybody holds it (`starting`) holds it for a moment itself."""
        for pause in (0.02, 0.1, 0.0):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(pause)
        return False

    def starting(self) -> bool:
        """Whether a system is on its way here: the lock is held, and nothing is recorded yet. Raises CommandError as `read`."""
        return self._held() and self._record() is None

    def _held(self) -> bool:
        """Whether a system has the lock; a killed one has lost it."""
        try:
            with (self.path / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass  # nothing ever ran here
        return False

    def release(self) -> None:
        """The system is gone."""
        try:
            if self._lock:
                self._forget()
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the lock without touching anything."""
        if self._lock:
            self._lock.close()
            self._lock = None

    def write(self, running: Running) -> None:
        """Record it, whole or not at all. Raises OSError; what was recorded before is then still there."""
        secret_url = running.nats_url.replace("://", f"://{running.nats_user}:{running.nats_password}@")
        texts = {self._running: json.dumps(asdict(running), indent=2), self._nats_url: secret_url}
        try:
            for path, text in texts.items():
                temporary = path.with_suffix(".tmp")
                with naming(temporary), open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                    file.write(text + "\n")
            for path in texts:
                path.with_suffix(".tmp").replace(path)
        except OSError:
            for path in texts:
                path.with_suffix(".tmp").unlink(missing_ok=True)
            raise

    def read(self) -> Running | None:
        """The running system, or None when none is recorded or it is gone: a record that a killed one left holds for nobody.
        Raises CommandError where that of a system that runs can't be read: it is written whole, so somebody else damaged it."""
        return self._record() if self._held() else None

    def _record(self) -> Running | None:
        try:
            return msgspec.json.decode(self._running.read_bytes(), type=Running)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:  # msgspec's are ValueErrors
            why = error.strerror if isinstance(error, OSError) else error
            raise CommandError(
                f"a system runs from {self.path}, but its record {self._running} can't be read ({why}); "
                "stop that system with Ctrl-C in its terminal and start it again"
            ) from None

    def _forget(self) -> None:
        self._running.unlink(missing_ok=True)
        self._nats_url.unlink(missing_ok=True)


def default_path() -> Path:
    return Path(os.environ.get("HEADRACE_STATE_DIR") or Path(os.environ.get("HEADRACE_HOME", ".")) / ".headrace")


def add_argument(parser: argparse.ArgumentParser) -> None:
    """The --state-dir flag, the same for every command."""
    parser.add_argument(
        "--state-dir",
        type=StateDir,
        default=StateDir(default_path()),
        metavar="DIR",
        help="where a running system records its address, logs and checkpoints (default: .headrace; env HEADRACE_STATE_DIR)",
    )


def bus_settings(state: StateDir, url: str = "") -> BusSettings:
    """How to reach the bus: `url`, else the one of the system here, else HEADRACE_NATS_URL; credentials likewise."""
    running = None if url else state.read()
    if running:
        return running.bus_settings()
    url = url or os.environ.get("HEADRACE_NATS_URL", "")
    if not url:
        return running_or_fail(state).bus_settings()
    return BusSettings(url, os.environ.get("HEADRACE_NATS_USER", ""), os.environ.get("HEADRACE_NATS_PASSWORD", ""))


def running_or_fail(state: StateDir) -> Running:
    """The running system, or a CommandError that says how to start one."""
    running = state.read()
    if running is None and state.starting():
        raise CommandError(f"the system in {state.path} is still starting; try again when `up` says that it is ready")
    if running is None:
        raise CommandError(f"no running system is recorded in {state.path}; start one with `{program()} up`")
    return running


def running_soon(state: StateDir, console: Console, patience: float = PATIENCE) -> Running:
    """The running system, or the one that is starting, once it runs; a CommandError as above, or after `patience` seconds."""
    end = time.monotonic() + patience
    if state.starting():
        console.say(f"the system in {state.path} is still starting; waiting for it (Ctrl-C: not)")
        while state.starting() and time.monotonic() < end:
            time.sleep(0.2)
    return running_or_fail(state)
