"""The random checkpoint of `up`: nothing is left of a making that was cut short."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

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
