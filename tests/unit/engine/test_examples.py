"""examples/ runs as its docstring says, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_offline_inference_makes_its_own_checkpoint():
    argv = [sys.executable, EXAMPLES / "offline_inference.py", "--max-tokens", "4"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    cold, again = done.stdout.split("--- again:")
    assert cold.count("[length]") == again.count("[length]") == 3
    words = [[line for line in run.splitlines() if line.endswith("[length]")] for run in (cold, again)]
    assert words[0] == words[1], "the cached run gives the same tokens"
