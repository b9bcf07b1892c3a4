"""`headrace demo`, the whole of it: a clean start, two requests, a verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A state directory: the random checkpoint in it is made by the first demo and kept for the next."""
    return tmp_path_factory.mktemp("home")


def demo(home: Path, *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli", "demo", *flags],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "HEADRACE_STATE_DIR": str(home)},
    )


def test_second_request_computes_fewer_rows_and_says_the_same(home):
    done = demo(home, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    first, second = result["runs"]
    assert result["ok"] and all(result["checks"].values())
    assert first["prompt_tokens"] == second["prompt_tokens"] >= 300
    assert first["text"] == second["text"] != ""
    assert first["computed_rows"] == first["prompt_tokens"]
    assert 0 < second["computed_rows"] < first["computed_rows"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == second["prompt_tokens"] - second["computed_rows"]
    assert {name.partition("-")[0] for name in result["processes"]} >= {"nats", "gateway", "prefill", "decode", "kvstore"}
    assert len(set(result["processes"].values())) == len(result["processes"])
    for run in result["runs"]:
        times = [row["end_ms"] for row in run["timeline"]]
        assert times == sorted(times)
    roles = {row["role"] for run in result["runs"] for row in run["timeline"] if row["ms"] > 0}
    assert roles >= {"gateway", "decode", "prefill", "kvstore"}
    assert all(not Path(f"/proc/{pid}").exists() for pid in result["processes"].values()), "everything is stopped"


def test_simulated_engine_is_labelled_and_readable(home):
    done = demo(home, "--engine", "sim")
    assert done.returncode == 0, done.stderr
    assert "SIMULATED" in done.stdout
    assert "rows computed by prefill" in done.stdout
    assert "yes  both texts are equal and not empty" in done.stdout
