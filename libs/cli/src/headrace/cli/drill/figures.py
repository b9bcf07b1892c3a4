"""Figures of processes and of lists of numbers."""

from __future__ import annotations

import contextlib
from pathlib import Path


def resident(pid: int) -> int:
    """Bytes; 0 when there is no such process."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) << 10
    return 0


def used(folder: Path) -> int:
    """Bytes of memory that files of a tmpfs folder take."""
    total = 0
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_blocks * 512
    return total


def quantile(values: list[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
