"""Texts name the program as it was called, so that what they say to type works."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headrace.cli import program
from headrace.cli.passthrough import BENCHES


@pytest.mark.parametrize(
    ("launcher", "argv0", "named"),
    [
        ("./headrace", "/x/headrace/cli/__main__.py", "./headrace"),
        ("/a b/headrace", "/x/__main__.py", "'/a b/headrace'"),
        ("", "/x/headrace/cli/__main__.py", "headrace"),
        ("", ".venv/bin/headrace", ".venv/bin/headrace"),
    ],
)
def test_as_it_was_called(launcher, argv0, named, monkeypatch):
    monkeypatch.setattr(program, "_LAUNCHER", launcher)
    monkeypatch.setattr(sys, "argv", [argv0, "up"])
    assert program.program() == named
    assert program.say("`{program} up`, {braces}") == f"`{named} up`, {{braces}}"


def test_found_on_the_path_it_is_a_bare_name(tmp_path, monkeypatch):
    command = tmp_path / "headrace"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(program, "_LAUNCHER", "")
    monkeypatch.setattr(sys, "argv", [str(command)])
    assert program.program() == "headrace"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--help"], "usage: ./headrace COMMAND"),
        (["--help"], '  ./headrace chat "Why is the sky blue?"'),
        (["dril"], "did you mean `./headrace drill`?"),
        (["drill", "--help"], "  ./headrace drill --list  "),
        (["bench", "--help"], "usage: ./headrace bench WHAT"),
        (["chat", "x", "--state-dir", "/nowhere"], "start one with `./headrace up`"),
    ],
)
def test_in_a_clone(argv, said):
    environment = {**os.environ, "HEADRACE_PROGRAM": "./headrace"}
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli", *argv], env=environment, capture_output=True, text=True, timeout=60
    )
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize("bench", BENCHES)
def test_the_help_of_a_benchmark_names_it_as_it_was_asked_for(bench):
    environment = {**os.environ, "HEADRACE_PROGRAM": "./headrace"}
    argv = [sys.executable, "-m", "headrace.cli", "bench", bench, "--help"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"usage: headrace bench {bench} "), done.stderr


def test_what_it_starts_was_called_otherwise():
    code = "import os; from headrace.cli import program; print(program.program(), 'HEADRACE_PROGRAM' in os.environ)"
    environment = {**os.environ, "HEADRACE_PROGRAM": "./headrace"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "./headrace False\n"
