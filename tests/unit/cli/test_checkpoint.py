"""What `up` serves when nothing is named; and of a random checkpoint whose making was cut short, nothing is left."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.bus import BusSettings
from headrace.cli.checkpoint import bundled_checkpoint
from headrace.cli.console import Console
from headrace.cli.state import StateDir
from headrace.cli.system import Options, System

SCRIPT = """
import asyncio, sys
from pathlib import Path
from headrace.cli.checkpoint import random_checkpoint
from headrace.cli.console import Console
asyncio.run(random_checkpoint(Path(sys.argv[1]), "nano", Console()))
"""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, seconds: float = 20.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return value


def test_killed_while_making_it_leaves_no_process_and_what_was_left_goes(tmp_path):
    leftover = tmp_path / "random-nano-0.tmp-1"
    leftover.mkdir()
    (leftover / "config.json").touch()
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, tmp_path], stderr=subprocess.DEVNULL)
    try:
        maker = until(lambda: children(process.pid))[0]
        until(lambda: b"make-checkpoint" in Path(f"/proc/{maker}/cmdline").read_bytes())
        assert not leftover.exists()
    finally:
        process.kill()
        process.wait()
    until(lambda: not running(maker))


def test_the_better_bundled_model_of_a_clone_is_served(tmp_path, monkeypatch):
    monkeypatch.delenv("HEADRACE_HOME", raising=False)
    assert bundled_checkpoint() is None
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    assert bundled_checkpoint() is None
    for name in ("headrace-nano", "headrace-tiny"):
        (tmp_path / "models" / name).mkdir(parents=True)
        assert bundled_checkpoint() == (tmp_path / "models" / "headrace-nano" if name == "headrace-tiny" else None)
        (tmp_path / "models" / name / "config.json").touch()
        assert bundled_checkpoint() == tmp_path / "models" / name


@pytest.mark.parametrize(
    ("options", "bundled"),
    [({}, True), ({"preset": "nano"}, False), ({"model": Path("mine")}, False), ({"engine": "sim"}, False)],
)
def test_what_is_named_comes_before_what_is_bundled(tmp_path, monkeypatch, options, bundled):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    (tmp_path / "models" / "headrace-nano").mkdir(parents=True)
    (tmp_path / "models" / "headrace-nano" / "config.json").touch()
    system = System(Options(**options), StateDir(tmp_path / "state"), Console(quiet=True))
    assert (system.bundled is not None) == bundled
    assert system.random_words == (not bundled and "model" not in options)


@pytest.mark.parametrize("drafts", [True, False])
def test_drafts_are_turned_off_by_a_flag_of_decode(tmp_path, drafts):
    class Nats:
        settings = BusSettings("nats://127.0.0.1:1")

    system = System(Options(engine="sim", drafts=drafts), StateDir(tmp_path), Console(quiet=True))
    system.nats = Nats()
    roles = system._children(1)
    assert ("--speculative off" in " ".join(roles["decode"][0].argv)) == (not drafts)
    assert "--speculative" not in roles["prefill"][0].argv
