"""Threads that stand back: decoding and encoding may take every core that nobody else wants, and no other."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor


def background_pool(workers: int, name: str, nice: int) -> ThreadPoolExecutor:
    """Its threads have the nice value `nice` (Linux counts it per thread; threads that they start inherit it)."""

    def stand_back() -> None:
        if nice:
            with contextlib.suppress(OSError, AttributeError):  # not Linux: then all threads are equal
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)

    return ThreadPoolExecutor(workers, thread_name_prefix=name, initializer=stand_back)
