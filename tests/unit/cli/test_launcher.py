"""The shell launcher with stand-ins for Python: what it refuses, what it installs, and that it does so once.

The stand-ins are shell scripts that note how they were called; a real installation takes minutes and is what `.ci/run` on
a clean clone shows.
"""

from __future__ import annotations

import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.testing import BUDGET

LAUNCHER = Path(__file__).parents[3] / "headrace"
TOOLS = ("sh", "dirname", "readlink", "cat", "cksum", "date", "tail", "tee", "mkdir", "rm", "flock")
FAKE = """#!/bin/sh
echo "$@" >>"{calls}"
case "$*" in
    *"{fails}"*) echo "ERROR: no such wheel"; exit 1 ;;
    "-V") echo "Python 3.11.7" ;;
    "-m headrace.cli"*) echo "CLI $*"; echo "called $HEADRACE_PROGRAM" >&2 ;;
esac
"""

# Not a shell script: shells take the signals that are kept back from them.
INTERRUPTED_PYTHON = """#!/bin/sh
[ "$1 $2" = "-m headrace.cli" ] || exit 0
kill -INT $$
exec {python} "$@"
"""


@pytest.fixture
def path(tmp_path) -> Path:
    """A PATH with the tools that the launcher uses, and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool))
    return folder


def fake_python(where: Path, calls: Path, fails: str = "nothing at all") -> None:
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(FAKE.format(calls=calls, fails=fails))
    where.chmod(0o755)


def launch(path: Path, tmp_path: Path, *argv: str, **env: str) -> subprocess.CompletedProcess:
    """As from a terminal: in the background of a script tests have SIGINT ignored, and so would all that they start."""
    return subprocess.run(
        [LAUNCHER, *argv],
        env={"PATH": str(path), "HEADRACE_VENV": str(tmp_path / "venv"), **env},
        capture_output=True,
        text=True,
        timeout=30,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_no_python_is_one_sentence(path, tmp_path):
    done = launch(path, tmp_path, "up")
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 2  # the progress line, then the sentence
    assert "Python 3.11 or 3.12 is needed and this machine has no python3; install one" in done.stderr


def test_python_that_is_too_old_is_named(path, tmp_path):
    (path / "python3").write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2 && exit 0\nexit 1\n')
    (path / "python3").chmod(0o755)
    assert "this machine has Python 3.9.2" in launch(path, tmp_path, "up").stderr


def test_wrong_choice_of_python_is_named(path, tmp_path):
    done = launch(path, tmp_path, "up", HEADRACE_PYTHON="/no/python")
    assert done.returncode == 1
    assert "HEADRACE_PYTHON=/no/python is not Python 3.11 or 3.12" in done.stderr


def test_python_without_venv_says_which_package_brings_it(path, tmp_path):
    fake_python(path / "python3", tmp_path / "calls", fails="import venv")
    done = launch(path, tmp_path, "up")
    assert done.returncode == 1
    assert "Python 3.11.7 has no venv module with pip; install it (Debian: apt-get install python3-venv)" in done.stderr


def test_installs_once_torch_first_then_starts_the_command(path, tmp_path):
    calls = tmp_path / "calls"
    fake_python(tmp_path / "venv" / "bin" / "python", calls)
    done = launch(path, tmp_path, "chat", "hello there")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "CLI -m headrace.cli chat hello there\n"
    assert done.stderr.endswith(f"called {LAUNCHER}\n"), "texts name the program as it was called"
    installs = [line for line in calls.read_text().splitlines() if " install " in line]
    assert [line.split(" install ")[1] for line in installs] == ["torch==2.13.0", "-r requirements.txt"]
    calls.unlink()
    assert launch(path, tmp_path, "--version").returncode == 0
    assert calls.read_text() == "-m headrace.cli --version\n", "a later start does nothing but start"


def test_torch_may_come_from_an_index_of_its_own(path, tmp_path):
    calls = tmp_path / "calls"
    fake_python(tmp_path / "venv" / "bin" / "python", calls)
    assert launch(path, tmp_path, "--version", HEADRACE_TORCH_INDEX="https://index.invalid/cpu").returncode == 0
    installs = [line.split(" install ")[1] for line in calls.read_text().splitlines() if " install " in line]
    assert installs == ["--no-deps --index-url https://index.invalid/cpu torch==2.13.0", "-r requirements.txt"]


def test_help_of_test_needs_no_installation(path, tmp_path):
    done = launch(path, tmp_path, "test", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {LAUNCHER} test")
    assert f"within {BUDGET // 60} minutes" in done.stdout
    assert not (tmp_path / "venv").exists()


def test_an_interrupt_is_kept_back_until_it_is_harmless(path, tmp_path):
    """While Python itself starts, before any line of the command, it would be a traceback."""
    if subprocess.run(["env", "--block-signal=INT", "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this env cannot block signals")
    (path / "env").symlink_to(shutil.which("env"))
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(INTERRUPTED_PYTHON.format(python=shlex.quote(sys.executable)))
    python.chmod(0o755)
    done = launch(path, tmp_path, "--help", PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    assert done.returncode == 130 and done.stdout == "", done.stderr
    assert done.stderr.splitlines()[-1].startswith("headrace: installing headrace"), "nothing after the installation"


def test_folders_may_have_spaces_in_their_names(path, tmp_path):
    home = tmp_path / "a b"
    home.mkdir()
    shutil.copy(LAUNCHER, home)
    for name in ("requirements.txt", "requirements-dev.txt", "requirements-parity.txt"):
        shutil.copy(LAUNCHER.parent / name, home)
    for name in ("libs/x", "services/y"):
        (home / name).mkdir(parents=True)
        (home / name / "pyproject.toml").touch()
    calls = home / "calls"
    fake_python(home / ".venv" / "bin" / "python", calls)
    env = {"PATH": str(path)}
    done = subprocess.run([home / "headrace", "test"], env=env, capture_output=True, text=True, timeout=30)
    assert done.stdout == "CLI -m headrace.cli test\n", done.stderr
    installs = [line for line in calls.read_text().splitlines() if " install " in line]
    assert len(installs) == 4


def test_tests_need_more_packages_than_the_rest(path, tmp_path):
    calls = tmp_path / "calls"
    fake_python(tmp_path / "venv" / "bin" / "python", calls)
    assert launch(path, tmp_path, "--version").returncode == 0
    calls.unlink()
    assert launch(path, tmp_path, "test").returncode == 0
    installs = [line.split(" install ")[1] for line in calls.read_text().splitlines() if " install " in line]
    assert installs == ["-r requirements-dev.txt", "--no-deps -r requirements-parity.txt"]


def test_progress_appears_as_it_comes(path, tmp_path):
    """On a terminal a line of pip is there while pip still runs: here it waits until the test has seen it."""
    seen = tmp_path / "seen"
    python = tmp_path / "venv" / "bin" / "python"
    fake_python(python, tmp_path / "calls")
    waits = f'*"install torch"*) echo "  Downloading torch.whl"; n=0; while [ ! -e "{seen}" ] && [ $n -lt 100 ]; do'
    waits += ' n=$((n + 1)); sleep 0.1; done; [ -e "{0}" ] ;;\n'.replace("{0}", str(seen))
    python.write_text(python.read_text().replace('    "-V")', f'    {waits}    "-V")'))
    (path / "sleep").symlink_to(shutil.which("sleep"))
    ours, theirs = pty.openpty()
    env = {"PATH": str(path), "HEADRACE_VENV": str(tmp_path / "venv")}
    process = subprocess.Popen([LAUNCHER, "--version"], env=env, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    said = b""
    while b"Downloading torch.whl" not in said and process.poll() is None:
        said += os.read(ours, 4096)
    seen.touch()
    try:
        while os.read(ours, 4096):
            pass
    except OSError:  # how Linux says that nobody holds the other end any more
        pass
    os.close(ours)
    assert process.wait(30) == 0
    assert b"Downloading torch.whl" in said


def test_failed_install_shows_why_and_goes_on_where_it_stopped(path, tmp_path):
    calls = tmp_path / "calls"
    python = tmp_path / "venv" / "bin" / "python"
    fake_python(python, calls, fails="requirements.txt")
    done = launch(path, tmp_path, "up")
    assert done.returncode == 1
    assert "ERROR: no such wheel" in done.stderr
    assert "could not finish: installing headrace and what it needs" in done.stderr
    calls.unlink()
    fake_python(python, calls)
    assert launch(path, tmp_path, "up").returncode == 0
    assert "torch" not in calls.read_text(), "the finished step is not done again"


def test_can_be_called_through_a_link(path, tmp_path):
    fake_python(tmp_path / "venv" / "bin" / "python", tmp_path / "calls")
    link = tmp_path / "elsewhere"
    link.symlink_to(LAUNCHER)
    env = {**os.environ, "HEADRACE_VENV": str(tmp_path / "venv")}
    done = subprocess.run([link, "--version"], env=env, capture_output=True, text=True, timeout=30)
    assert done.stdout == "CLI -m headrace.cli --version\n"
