"""Real processes: restarted when they die, stopped within a budget, never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.cli import supervisor
from headrace.cli.supervisor import Child, Death, Supervisor

SLEEPER = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def child(tmp_path: Path, code: str, name: str = "service") -> Child:
    return Child(name, [sys.executable, "-c", code], tmp_path / f"{name}.log")


async def until(condition, seconds: float = 5.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.01)
    return value


async def test_killed_child_is_named_with_its_last_lines_and_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST", 0.05)
    deaths: list[Death] = []
    keeper = Supervisor(lambda death: deaths.append(death) or True)
    service = child(tmp_path, SLEEPER)
    await keeper.start(service)
    first = service.pid
    await until(lambda: service.last_lines() == ["up"])
    os.kill(first, signal.SIGKILL)
    await until(lambda: service.pid not in (None, first))
    assert str(deaths[0]).startswith("service was killed by SIGKILL after")
    assert service.starts == 2
    await keeper.stop([service], 5)
    assert len(deaths) == 1, "an ordered stop is no death"
    assert service.pid is None


async def test_last_lines_are_of_the_last_start(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST", 0.02)
    said: list[list[str]] = []
    keeper = Supervisor(lambda death: said.append(death.child.last_lines()) or len(said) < 2)
    service = child(tmp_path, "import os; print(os.getpid())")
    await keeper.start(service)
    await asyncio.wait_for(service.keeper, 10)
    (first,), (second,) = said
    assert first != second


async def test_pauses_between_restarts_grow(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST", 0.02)
    pauses: list[float] = []
    keeper = Supervisor(lambda death: pauses.append(death.pause) or len(pauses) < 4)
    service = child(tmp_path, "raise SystemExit('no checkpoint')")
    await keeper.start(service)
    await asyncio.wait_for(service.keeper, 10)
    assert pauses == [0.02, 0.04, 0.08, 0.16]
    assert service.last_lines(1) == ["no checkpoint"]


async def test_child_that_ignores_sigterm_is_killed_after_its_budget(tmp_path):
    keeper = Supervisor(lambda death: True)
    stubborn, willing = child(tmp_path, STUBBORN, "stubborn"), child(tmp_path, SLEEPER, "willing")
    for service in (stubborn, willing):
        await keeper.start(service)
        await until(lambda service=service: service.last_lines() == ["up"])
    began = time.monotonic()
    assert await keeper.stop([stubborn, willing], 0.3) == [stubborn]
    assert time.monotonic() - began < 2
    assert stubborn.process.returncode == -signal.SIGKILL
    assert willing.process.returncode == -signal.SIGTERM


async def test_stop_does_not_wait_for_a_child_that_sleeps_before_its_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST", 30.0)
    dead = asyncio.Event()
    keeper = Supervisor(lambda death: dead.set() or True)
    service = child(tmp_path, "pass")
    await keeper.start(service)
    await asyncio.wait_for(dead.wait(), 10)
    began = time.monotonic()
    assert await keeper.stop([service], 10) == []
    assert time.monotonic() - began < 1
    assert service.starts == 1


def test_children_end_when_the_supervisor_is_killed(tmp_path):
    """`kill -9` of the supervisor itself: the kernel tells the child."""
    code = f"""
import asyncio, sys
from pathlib import Path
from headrace.cli.supervisor import Child, Supervisor
async def main():
    child = Child("service", [sys.executable, "-c", {SLEEPER!r}], Path({str(tmp_path)!r}) / "log")
    await Supervisor(lambda death: True).start(child)
    print(child.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with parent.stdout:
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split():
        assert time.monotonic() < deadline, "the child outlived its supervisor"
        time.sleep(0.02)


async def test_program_that_does_not_exist_is_an_error_at_once(tmp_path):
    keeper = Supervisor(lambda death: True)
    with pytest.raises(OSError):
        await keeper.start(Child("ghost", ["/no/such/program"], tmp_path / "log"))


async def test_a_program_that_cannot_be_started_again_is_tried_until_it_can(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST", 0.02)
    program = tmp_path / "program"
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}"\n')  # a path in a #! line may hold no space
    program.chmod(0o700)
    deaths: list[str] = []
    started: list[Child] = []
    keeper = Supervisor(lambda death: deaths.append(str(death)) or True, started.append)
    service = Child("service", [str(program)], tmp_path / "service.log")
    await keeper.start(service)
    first = service.pid
    hidden = program.rename(tmp_path / "away")
    os.kill(first, signal.SIGKILL)
    await until(lambda: len(deaths) >= 3)
    assert "service could not be started: " in deaths[1] and "No such file" in deaths[1]
    assert not service.keeper.done() and not started
    hidden.rename(program)
    await until(lambda: service.pid)
    assert started == [service]
    await keeper.stop([service], 5)


async def test_an_outage_on_purpose_lasts_as_long_as_it_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST", 0.01)
    keeper = Supervisor(lambda death: True)
    service = child(tmp_path, SLEEPER)
    await keeper.start(service)
    began = service.hold = time.monotonic() + 0.5
    os.kill(service.pid, signal.SIGKILL)
    await until(lambda: service.starts == 2)
    assert time.monotonic() >= began
    await keeper.stop([service], 5)
