"""`headrace drill` as a person runs it: it brings a system up, breaks it, and says what came of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

FAULTS = ("decode-kill-bound", "gateway-kill")


def drill(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "headrace.cli", "drill", *argv], capture_output=True, text=True, timeout=200)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_few_faults_each_once():
    done = drill(*FAULTS, "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout)
    rows = {row["name"]: row for row in result["rows"]}
    assert set(rows) == set(FAULTS) and all(row["ok"] and row["rounds"] == 1 for row in rows.values())
    assert rows["decode-kill-bound"]["noticed_by"].startswith(("gateway.retry", "prefill.failed")), "whoever was first"
    assert rows["gateway-kill"]["clients"] == {"broken": 6} and "gateway_died" in rows["gateway-kill"]["noticed_by"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_requests_under_random_faults_have_their_own_tokens_or_an_error():
    done = drill("disturbed", "--requests", "40", "--seed", "5", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout)
    assert sum(result["ends"].values()) == 40 and result["wrong"] == [] and result["ends"]["answer"] > 10


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nonsense"], "there is no fault 'nonsense'; `headrace drill --list` names them"),
        (["soak", "--running"], "needs a system of its own"),
        (["soak", "nats-kill"], "name it alone"),
        (["--rounds", "0"], "--rounds is 0; at least 1"),
        (["--running", "--state-dir", "/nonexistent/state"], "no running system is recorded"),
    ],
)
def test_what_cannot_be_done_is_said(argv, said):
    done = drill(*argv)
    assert done.returncode == 1 and said in done.stderr


def test_the_faults_are_listed():
    done = drill("--list")
    assert done.returncode == 0 and all(name in done.stdout for name in FAULTS)
