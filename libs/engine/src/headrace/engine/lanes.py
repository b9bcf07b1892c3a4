"""Whole pieces of a step side by side, one thread each, instead of each operator split over threads.

An operator of a small model is shorter than the barrier at its end; sequences are independent, so a step's are dealt out to
lanes, which meet once. Work must let the interpreter go (torch operators and compiled loops do). Knows threads and costs; does
not know models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch


class Lanes:
    """`count` threads, the caller's among them. Operators inside a lane use one thread, elsewhere `count`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1, "lane", torch.set_num_threads, (1,)) if count > 1 else None

    def run(self, work: Sequence[Callable[[], Any]]) -> list[Any]:
        """Results in order; at most `count` pieces. All have ended when this returns or raises."""
        if len(work) <= 1 or self._pool is None:
            return [piece() for piece in work]
        others = [self._pool.submit(_inference, piece) for piece in work[1:]]
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            first = work[0]()
        finally:
            wait(others)
            torch.set_num_threads(threads)
        return [first, *(other.result() for other in others)]

    def deal(self, costs: Sequence[float]) -> list[list[int]] | None:
        """Indices of `costs` for each lane, the dearest first to whoever has least; None when one of them would leave the other
        lanes idle for most of the time."""
        most, total = max(costs, default=0.0), sum(costs)
        if self.count == 1 or len(costs) == 1 or most * self.count > 1.6 * total:
            return None
        lanes, loads = [[] for _ in range(self.count)], [0.0] * self.count
        for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
            lane = loads.index(min(loads))
            lanes[lane].append(index)
            loads[lane] += costs[index]
        return [sorted(lane) for lane in lanes if lane]


def _inference(piece: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return piece()
