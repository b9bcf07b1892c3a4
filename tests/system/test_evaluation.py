"""The evaluation command against a whole system that serves a bundled model: it measures, and says when it cannot."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "headrace-nano"  # the smaller one: what it answers is not in question here


def evaluate(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "models.training", "evaluate", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    """A system with the smaller bundled model."""
    state = tmp_path_factory.mktemp("evaluation")
    config = state / "settings.yaml"
    config.write_text("decode:\n  speculative: dspark\n")
    command = [sys.executable, "-m", "headrace.cli", "up", "--port", "0", "--model", str(MODEL)]
    command += ["--state-dir", str(state), "--config", str(config)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 90
        while not (state / "running.json").exists():
            assert process.poll() is None and time.monotonic() < deadline, "the system did not start"
            time.sleep(0.1)
        yield json.loads((state / "running.json").read_text())["url"]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(40)
        finally:
            process.kill()


def test_it_measures_a_running_system(url, tmp_path):
    out = tmp_path / "evaluation.json"
    tasks = ("--tasks", "tools_simple", "facts", "--count", "6", "--threads", "3", "--no-speed")
    done = evaluate("--url", url, *tasks, "--json", str(out))
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["model"] == MODEL.name
    results = report["results"]
    assert results["simple calls valid"]["n"] == 6 and results["think tags well-formed"]["n"] == 12
    assert results["simple: right tool"]["share"] >= 0.5  # it was trained for this
    for result in results.values():
        low, high = result["interval"]
        assert 0 <= low <= result["share"] <= high + 1e-9
    assert len(report["samples"]) == 10 and all(s["answer"] for s in report["samples"])


def test_nobody_there_is_said(tmp_path):
    done = evaluate("--url", "http://127.0.0.1:9", "--count", "1")
    assert done.returncode == 1 and "nobody answers at http://127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


def test_metrics_that_are_not_there_are_said(url):
    done = evaluate("--url", url, "--metrics", "http://127.0.0.1:9/metrics", "--count", "1", "--no-speed")
    assert done.returncode == 1 and "no metrics at http://127.0.0.1:9/metrics" in done.stderr
