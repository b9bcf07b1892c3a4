"""`headrace up` ends as a whole, whatever its parts do meanwhile: no process, record or shared memory is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.cli.shared_memory import folder_of
from headrace.cli.state import Running, StateDir

START_BUDGET = 90.0  # seconds
STOP_BUDGET = 60.0  # seconds: all budgets of a stop, one after the other, with 2 s for the gateway


@contextmanager
def running(folder: Path) -> Iterator[tuple[subprocess.Popen, StateDir, Running]]:
    """A simulated system that is ready. Its processes are gone after the block, come what may."""
    where, errors = StateDir(folder / "state"), folder / "stderr"
    argv = [sys.executable, "-m", "headrace.cli", "up", "--engine", "sim", "--port", "0", "--drain-seconds", "2"]
    with errors.open("w") as stderr:
        process = subprocess.Popen([*argv, "--state-dir", str(where.path)], stdout=subprocess.PIPE, stderr=stderr)
    pids: dict[str, int] = {}
    try:
        end = time.monotonic() + START_BUDGET
        while (record := where.read()) is None:
            assert process.poll() is None and time.monotonic() < end, errors.read_text()
            time.sleep(0.05)
        pids = record.alive()
        assert set(pids) == {"nats", "kvstore", "prefill-1", "decode-1", "gateway"}
        assert b"Headrace is ready" in process.stdout.readline()
        yield process, where, record
    finally:
        process.kill()
        for pid in pids.values():
            if runs(pid, where):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def runs(pid: int, where: StateDir) -> bool:
    """Whether this is still a process of the system in `where`: its pid may be another's by now."""
    try:
        known = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return str(where.path).encode() in known or str(folder_of(where.path)).encode() in known


def assert_nothing_is_left(where: StateDir, record: Running) -> None:
    assert [name for name, pid in record.processes.items() if runs(pid, where)] == []
    assert sorted(path.name for path in where.path.iterdir()) == ["checkpoints", "lock", "logs", "nats.conf"]
    assert not folder_of(where.path).exists()


def test_a_nats_that_does_not_answer_keeps_nothing_from_being_stopped(tmp_path):
    with running(tmp_path) as (process, where, record):
        assert all(runs(pid, where) for pid in record.processes.values())
        os.kill(record.processes["nats"], signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_BUDGET) == 1
        assert_nothing_is_left(where, record)
    said = (tmp_path / "stderr").read_text()
    assert "nats did not stop within 10 s and was killed; its log: " in said
    assert "Traceback" not in said and said.endswith(" stopped\n")


@pytest.mark.parametrize(("pause", "silent"), [(0.0, None), (0.0003, None), (0.5, "kvstore"), (0.5, "nats")])
def test_a_second_interrupt_ends_everything_at_once(tmp_path, pause, silent):
    with running(tmp_path) as (process, where, record):
        if silent:  # without it an idle system is gone in less than 0.1 s
            os.kill(record.processes[silent], signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        time.sleep(pause)
        process.send_signal(signal.SIGTERM)  # counts as one; of two equal signals at once the kernel may deliver one
        assert process.wait(5) == 130
        assert_nothing_is_left(where, record)
    said = (tmp_path / "stderr").read_text()
    assert "Traceback" not in said and said.endswith(" everything was ended at once\n")
