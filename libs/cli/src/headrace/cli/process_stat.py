"""What the kernel says of a process: its state, its parent, its age.

Knows: proc(5). Does not know: whose process it is.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may hold anything; [] when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


def process_state(pid: int) -> str:
    """R, S, T (stopped), Z ...; "" when there is no such process."""
    return next(iter(_fields(pid)), "")


def runs(pid: int) -> bool:
    return process_state(pid) not in ("", "Z")


def runs_under(parent: int, pid: int) -> bool:
    """Whether the process runs and is a child of `parent`."""
    state, of, *_ = _fields(pid) or ("Z", "0")
    return state != "Z" and int(of) == parent


def started_at(pid: int) -> float:
    """Unix time at which a process began; 0 when there is none."""
    if not (fields := _fields(pid)):
        return 0.0
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
