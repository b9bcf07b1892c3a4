"""How many cores this process may use.

Knows its affinity (taskset, cpusets of containers). Does not know quotas, which take time and not cores away, or what else runs
here.
"""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that the scheduler may put this process on; at least 1. `os.cpu_count()` counts those of the whole machine."""
    return len(os.sched_getaffinity(0))
