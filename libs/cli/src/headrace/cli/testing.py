"""`headrace test`: all tests, in a process of their own, with a closing summary.

Words after `test` go to pytest. Without any, the whole of tests/ runs, on as many processes as pay (see docs/operations.md).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from headrace.cli.errors import CommandError

PASS_THROUGH = True
BUDGET = 12 * 60  # seconds that the whole suite may take on two cores


def run(name: str, argv: list[str]) -> int:
    """Run pytest in the repository; returns its exit status."""
    root = Path(os.environ.get("HEADRACE_HOME", "."))
    if not (root / "tests").is_dir():
        raise CommandError(f"there are no tests in {root.absolute()}; run ./headrace test in a clone of the repository")
    # One thread per process: two pytest workers, and the services that tests start, share the cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    status = subprocess.call([sys.executable, "-m", "pytest", *(argv or defaults())], cwd=root, env=environment)
    took = time.monotonic() - began
    verdict = "all tests passed" if status == 0 else f"pytest ended with status {status}"
    late = f", above its budget of {BUDGET // 60} minutes" if took > BUDGET else ""
    print(f"headrace test: {verdict} in {took:.0f} s{late}")
    return status


def defaults() -> list[str]:
    """All of tests/. Files stay together on one worker, since fixtures of a file may hold a running system."""
    workers = min(2, os.cpu_count() or 1)
    return ["-q", "--durations=15", *(["-n", str(workers), "--dist", "loadfile"] if workers > 1 else [])]
