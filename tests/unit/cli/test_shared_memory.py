"""What a system leaves in /dev/shm when all of its processes are killed, and who removes it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.shared_memory import Claim, clear_dead

# `up`, and a worker as headrace.transfer has it, in processes of their own: they say that they are there, and wait.
UP = "from headrace.cli.shared_memory import Claim; import pathlib, sys; c = Claim(pathlib.Path(sys.argv[1]))"
WORKER = "from headrace.transfer.incarnation import Incarnation; import sys; i = Incarnation('w', sys.argv[1])"


@pytest.fixture
def start():
    started = []

    def start(code: str, folder: Path) -> subprocess.Popen:
        code += "; print(1, flush=True); sys.stdin.read()"
        process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"1\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_what_a_killed_system_left_goes_when_its_last_process_is_gone(tmp_path, start):
    folder = tmp_path / "headrace-0"
    up, worker = start(UP, folder), start(WORKER, folder)
    (folder / "segment").write_bytes(b"x" * 5000)
    assert clear_dead(tmp_path) == []
    up.kill()
    up.wait()
    assert clear_dead(tmp_path) == [] and folder.is_dir()  # the worker may still write
    worker.send_signal(signal.SIGSTOP)
    assert clear_dead(tmp_path) == []
    worker.kill()
    worker.wait()
    assert (folder / "nonce").is_file()
    ((cleared, held),) = clear_dead(tmp_path)
    assert cleared == folder and held >= 5000 and list(tmp_path.iterdir()) == []


def test_what_is_not_proven_dead_stays(tmp_path):
    (tmp_path / "headrace-no-owner").mkdir()
    (tmp_path / "headrace-no-owner" / "nonce").write_text("n")
    (tmp_path / "headrace").mkdir()  # the default of services that are started one by one
    (tmp_path / "other").mkdir()
    (tmp_path / "headrace-file").write_text("")
    assert clear_dead(tmp_path) == [] and len(list(tmp_path.iterdir())) == 4
    assert clear_dead(tmp_path / "nowhere") == []


def test_a_claim_is_empty_and_leaves_nothing(tmp_path):
    folder = tmp_path / "headrace-1"
    folder.mkdir()
    (folder / "old").write_text("")
    claim = Claim(folder)
    assert [path.name for path in folder.iterdir()] == ["owner.lock"] and folder.stat().st_mode & 0o777 == 0o700
    assert clear_dead(tmp_path) == []
    claim.release()
    assert list(tmp_path.iterdir()) == []
