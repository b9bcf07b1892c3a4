"""Threads that stand back: decoding and encoding may take every core that nobody else wants, and no other."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor


def background_pool(workers: int, name: str, nice: int) -> ThreadPoolExecutor:
    """Its threads stand `nice` steps behind the process (Linux counts that per thread; threads that they start inherit it)."""

    def stand_back() -> None:
        if nice:
            with contextlib.suppress(OSError, AttributeError):  # not Linux: then all threads are equal
                mine = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, mine, min(19, os.getpriority(os.PRIO_PROCESS, mine) + nice))

    return ThreadPoolExecutor(workers, thread_name_prefix=name, initializer=stand_back)
