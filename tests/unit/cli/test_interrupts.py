"""Ctrl-C ends every command quietly, with status 130, also while modules are imported: that is most of the first second."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = "print('importing', flush=True)\nimport time\n"


def interrupted(slow: Path, *argv: str) -> tuple[int, str]:
    """Run a command that comes to import the module `slow` and interrupt it there; -> status, stderr."""
    paths = f"{slow.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace.cli", *argv],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    finally:
        process.kill()
    return process.returncode, said


@pytest.mark.parametrize("module", ["argparse", "uvloop", "aiohttp"])
def test_during_the_imports_of_a_command(module, tmp_path):
    slow = tmp_path / f"{module}.py"
    slow.write_text(SLOW + "try: time.sleep(30)\nexcept BaseException: raise ImportError from None\n")  # as some packages do
    assert interrupted(slow, "chat", "hello", "--url", "http://127.0.0.1:9") == (130, "")


def test_during_the_imports_of_a_program_behind_a_command(tmp_path):
    slow = tmp_path / "tokenizers.py"
    slow.write_text(SLOW + "time.sleep(30)\n")
    assert interrupted(slow, "bench", "recipe") == (130, "")
