"""Many schedules on all cores: what ran, what failed, which guard's absence was found when.

Knows processes (one per core, each with its own share of the seeds) and sums. Does not know what a schedule holds or how
anything is printed. A seed's result does not depend on the process, or on what that process ran before.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any

from mutations import NO_FLIPS, without
from schedule import draw, mix
from simulated import TABLE, forget, installed, lenient
from table import Row
from world import World

CHUNK = 20  # schedules between two collections of garbage
real_seconds = time.perf_counter  # `time.monotonic` is simulated while worlds run


@dataclass
class Result:
    """Sums over schedules. `failed`: seed -> what was seen."""

    schedules: int = 0
    simulated_seconds: float = 0.0
    cpu_seconds: float = 0.0
    turns: int = 0
    failed: dict[int, list[str]] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    planned: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    rows: Counter[Row] = field(default_factory=Counter)  # of the tables of docs/handoff.md

    def __iadd__(self, other: Result) -> Result:
        for name in self.__dataclass_fields__:
            if name == "failed":
                self.failed |= other.failed
            else:
                setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


def simulate(plan: Any, traced: bool = False) -> World:
    """One schedule. To be called where `installed` holds."""
    world = World(plan)
    world.traced = traced
    world.run()
    return world


def kind(violations: list[str]) -> str:
    """What the first of them is about, without its numbers."""
    return re.sub(r"\d+|\w*simulated\w*", "#", violations[0])[:60] if violations else ""


def some(first: int, count: int) -> Result:
    """Schedules of `count` seeds from `first` on, in this process."""
    result, began = Result(), time.process_time()
    TABLE.counts.clear()
    with installed():
        for seed in range(first, first + count):
            plan = draw(seed)
            world = simulate(plan)
            mix(result.planned, plan)
            result.schedules += 1
            result.turns += world.turns
            result.simulated_seconds += world.now - 1000.0
            result.happened += world.network.happened
            result.outcomes += world.outcomes
            result.messages += world.network.counts
            if world.violations:
                result.failed[seed] = world.violations
            del world
        forget()
    result.rows = +TABLE.counts
    result.cpu_seconds = time.process_time() - began
    return result


@dataclass
class Hunt:
    """Of a guard that was taken away: after how many schedules from `base` on, and how many seconds of computing, a violation
    was seen; `found` 0: none was, in `tried`."""

    name: str
    base: int
    tried: int = 0
    found: int = 0
    seed: int = 0
    cpu_seconds: float = 0.0
    violation: str = ""

    def __iadd__(self, later: Hunt) -> Hunt:
        """What the seeds after these gave."""
        if later.found:
            self.found, self.seed, self.violation = self.tried + later.found, later.seed, later.violation
        self.tried += later.tried
        self.cpu_seconds += later.cpu_seconds
        return self


def hunt(name: str, first: int, count: int) -> Hunt:
    """`count` seeds from `first` on without the guard, until a schedule fails that holds with the guard in place."""
    out, began = Hunt(name, first), time.process_time()
    with installed():
        for seed in range(first, first + count):
            plan = draw(seed)
            if name in NO_FLIPS:  # would find that the checksums are away, which is not the point
                plan = replace(plan, faults=tuple(f for f in plan.faults if getattr(f, "action", "") != "flip"))
            with without(name), lenient():
                violations = simulate(plan).violations
            out.tried += 1
            if not violations:
                continue
            with without(name, itself=False):
                sound = not simulate(plan).violations
            if sound:
                out.found, out.seed, out.violation = out.tried, seed, violations[0]
                break
        forget()
    out.cpu_seconds = time.process_time() - began
    return out


# ------------------------------------------------------------------ processes


def cores() -> int:
    return len(os.sched_getaffinity(0))


def _prepare() -> None:
    """In a new process: what is imported stays, so only worlds are looked through for garbage."""
    import warnings

    warnings.simplefilter("ignore")  # coroutines of killed processes were never awaited: that is what being killed means
    gc.collect()
    gc.freeze()
    gc.disable()


@contextlib.contextmanager
def _processes(count: int) -> Iterator[Callable[..., Future]]:
    """A way to have functions called elsewhere; in this process when `count` is 1."""
    if count == 1:
        _prepare()

        def here(function: Callable, *args: Any) -> Future:
            done: Future = Future()
            done.set_result(function(*args))
            return done

        yield here
        return
    pool = ProcessPoolExecutor(count, mp_context=get_context("fork"), initializer=_prepare)
    try:
        yield pool.submit
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _InOrder:
    """Shares of a row of seeds that end in any order, added up in the order of their seeds: the sum does not depend on how
    many processes there are."""

    def __init__(self, total: Any, first: int, count: int, ends: Callable[[Any], Any] = lambda part: False) -> None:
        """`ends`: does this share end it all?"""
        self.total, self.next, self.end, self._ends = total, first, first + count, ends
        self.running = 0
        self.over = count == 0
        self._added = first  # below it everything is in `total`
        self._waiting: dict[int, tuple[int, Any]] = {}  # first seed -> (how many, what they gave), not yet in turn

    def share(self) -> tuple[int, int]:
        """(first seed, how many) of what is to be done next."""
        first = self.next
        self.next = min(self.end, first + CHUNK)
        self.running += 1
        return first, self.next - first

    def take(self, first: int, count: int, part: Any) -> None:
        self.running -= 1
        self._waiting[first] = (count, part)
        while self._added in self._waiting and not self.over:
            count, part = self._waiting.pop(self._added)
            self.total += part
            self._added += count
            self.over = self._added == self.end or bool(self._ends(part))

    @property
    def begun(self) -> int:
        return self.next - self.total.base

    @property
    def wants_more(self) -> bool:
        """No share that has ended ends it all, and there are seeds left."""
        return not self.over and self.next < self.end and not any(self._ends(part) for _, part in self._waiting.values())


def search(
    first: int, count: int, seconds: float, workers: int, stop_at_failure: bool, progress: Callable[[Result], None]
) -> Result:
    """`count` seeds from `first` on, or as many as begin within `seconds` (0: all of them)."""
    row, began = _InOrder(Result(), first, count), real_seconds()
    waiting: dict[Future, tuple[int, int]] = {}
    with _processes(workers) as submit:
        while True:
            late = bool(seconds) and real_seconds() - began > seconds
            enough = late or (stop_at_failure and bool(row.total.failed))
            while not enough and row.next < row.end and len(waiting) < 2 * workers - 1:
                share = row.share()
                waiting[submit(some, *share)] = share
            if not waiting:
                return row.total
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                row.take(*waiting.pop(future), future.result())
            progress(row.total)


def hunts(
    names: list[str], bases: list[int], limit: int, seconds: float, workers: int, progress: Callable[[list[Hunt]], None]
) -> list[Hunt]:
    """One per guard and base, in order. Shares of all of them run side by side."""
    began = real_seconds()
    rows = [_InOrder(Hunt(name, base), base, limit, lambda part: part.found) for name in names for base in bases]
    waiting: dict[Future, tuple[_InOrder, int, int]] = {}
    with _processes(workers) as submit:
        while True:
            late = bool(seconds) and real_seconds() - began > seconds
            while not late and len(waiting) < 2 * workers - 1:
                more = [row for row in rows if row.wants_more]
                if not more:
                    break
                row = min(more, key=lambda row: (row.running, row.begun))
                share = row.share()
                waiting[submit(hunt, row.total.name, *share)] = (row, *share)
            if not waiting:
                return [row.total for row in rows]
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                row, *share = waiting.pop(future)
                row.take(*share, future.result())
            progress([row.total for row in rows])
