"""A program behind a command runs as `python -m` would run it."""

from __future__ import annotations

import os
import subprocess
import sys

from headrace.cli.main import main

PROGRAM = """\
import multiprocessing, sys

def double(number):
    return 2 * number

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(sys.argv, pool.map(double, [1, 2]), __package__)
    sys.exit(3)
"""

START = """\
from headrace.cli.passthrough import become

if __name__ == "__main__":
    become("measured.bench", "headrace bench x", ["-v"])
"""


def test_it_has_its_words_its_status_and_processes_of_its_own(tmp_path):
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "bench.py").write_text(PROGRAM)
    (tmp_path / "start.py").write_text(START)
    paths = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, tmp_path / "start.py"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (3, "['headrace bench x', '-v'] [2, 4] measured\n"), done.stderr


def test_a_service_ends_as_it_does_by_itself():
    argv = ["kvstore", "--nats-url", "nats://127.0.0.1:1", "--nats-connect-seconds", "0.2"]
    done = subprocess.run([sys.executable, "-m", "headrace.cli", *argv], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert any(line.startswith("headrace kvstore: ") for line in done.stderr.splitlines()), done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["decode"]) == 1
    assert (
        "headrace.decode is not installed in this environment; install it: pip install headrace-decode"
        in capsys.readouterr().err
    )
