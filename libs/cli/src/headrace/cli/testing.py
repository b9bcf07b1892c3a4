"""`headrace test`: all tests, in a process of their own, with a closing summary.

Words after `test` go to pytest. Without any, the whole of tests/ runs, on as many processes as pay (see docs/operations.md).
Then a few failures are run once more, alone: tests of whole systems measure how soon a death is noticed, which a neighbour on
the same core can spoil. What only passed alone is named in the summary; a defect fails twice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

from headrace.bus.cores import usable_cores
from headrace.cli.errors import CommandError

PASS_THROUGH = True
BUDGET = 12 * 60  # seconds that the whole suite may take on two cores; the launcher's help says it in minutes
NOTHING = "no test ran"
FEW = 5  # failures; more are no accident


def run(name: str, argv: list[str]) -> int:
    """Run pytest in the repository; returns its exit status."""
    root = Path(os.environ.get("HEADRACE_HOME", "."))
    if not (root / "tests").is_dir():
        raise CommandError(f"there are no tests in {root.absolute()}; run ./headrace test in a clone of the repository")
    # One thread per process: two pytest workers, and the services that tests start, share the cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    pytest = [sys.executable, "-m", "pytest"]
    with tempfile.TemporaryDirectory(prefix="headrace-test-") as folder:
        report = Path(folder) / "report.xml"
        words = [f"--junitxml={report}", *(argv or defaults())]  # first: words of yours may say otherwise
        status = subprocess.call([*pytest, *words], cwd=root, env=environment)
        ran, skipped = counts(report)
    verdict = f"all {ran:,} {'chosen ' if argv else ''}tests passed" if ran else NOTHING
    if status == 1 and not argv and 0 < len(failed := last_failed(root)) <= FEW:
        print(f"headrace test: {len(failed)} failed beside other tests; running them again, alone", flush=True)
        status = subprocess.call([*pytest, "-q", *failed], cwd=root, env=environment)
        verdict += ", but these only alone: " + ", ".join(failed)
    if status != 0:
        verdict = f"pytest ended with status {status}" if ran else NOTHING
    if skipped:
        verdict += f", {skipped:,} skipped,"
    took = time.monotonic() - began
    late = f", above its budget of {BUDGET // 60} minutes" if took > BUDGET else ""
    print(f"headrace test: {verdict} in {took:.0f} s{late}")
    return status


def counts(report: Path) -> tuple[int, int]:
    """Tests that ran and that were skipped, by pytest's report in JUnit's form; 0 where it left none (`--version`, say)."""
    try:
        suites = list(ElementTree.parse(report).iter("testsuite"))
    except (OSError, ElementTree.ParseError):
        return 0, 0
    skipped = sum(int(suite.get("skipped", 0)) for suite in suites)
    return sum(int(suite.get("tests", 0)) for suite in suites) - skipped, skipped


def last_failed(root: Path) -> list[str]:
    """Node ids that failed in the run that just ended; none when pytest left no record (an error in collection, say)."""
    try:
        return sorted(json.loads((root / ".pytest_cache/v/cache/lastfailed").read_text()))
    except (OSError, ValueError):
        return []


def defaults() -> list[str]:
    """All of tests/. Files stay together on one worker, since fixtures of a file may hold a running system."""
    workers = min(2, usable_cores())
    return ["-q", "--durations=15", *(["-n", str(workers), "--dist", "loadfile"] if workers > 1 else [])]
