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
from simulated import TABLE, installed, lenient
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


def kind(world: World) -> str:
    """What a violation is about, without its numbers."""
    return re.sub(r"\d+|\w*simulated\w*", "#", world.violations[0])[:60] if world.violations else ""


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
    result.rows = +TABLE.counts
    gc.collect()
    result.cpu_seconds = time.process_time() - began
    return result


@dataclass
class Found:
    """Of a guard that was taken away: after how many schedules, and how many seconds of computing, a violation was seen; 0
    schedules: none was."""

    name: str
    base: int
    schedules: int = 0
    seed: int = 0
    cpu_seconds: float = 0.0
    violation: str = ""


def hunt(name: str, base: int, limit: int) -> Found:
    """Seeds from `base` on without the guard, until a schedule fails that holds with the guard in place."""
    began = time.process_time()
    with installed():
        for number in range(limit):
            plan = draw(base + number)
            if name in NO_FLIPS:  # would find that the checksums are away, which is not the point
                plan = replace(plan, faults=tuple(f for f in plan.faults if getattr(f, "action", "") != "flip"))
            with without(name), lenient():
                violations = simulate(plan).violations
            if violations and not simulate(plan).violations:
                return Found(name, base, number + 1, plan.seed, time.process_time() - began, violations[0])
            if number % CHUNK == CHUNK - 1:
                gc.collect()
    return Found(name, base, 0, 0, time.process_time() - began)


# ------------------------------------------------------------------ processes


def cores() -> int:
    return len(os.sched_getaffinity(0))


def _prepare() -> None:
    """In a new process: what is imported stays, so only worlds are looked through for garbage."""
    import warnings

    warnings.simplefilter("ignore")  # coroutines of killed processes were never awaited: that is what being killed means
    os.nice(0)
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


def search(
    first: int, count: int, seconds: float, processes: int, stop_at_failure: bool, progress: Callable[[Result], None]
) -> Result:
    """`count` seeds from `first` on, or as many as begin within `seconds` (0: all of them)."""
    total, began, next_seed, end = Result(), real_seconds(), first, first + count
    waiting: set[Future] = set()
    with _processes(processes) as submit:
        while True:
            late = bool(seconds) and real_seconds() - began > seconds
            enough = late or (stop_at_failure and bool(total.failed))
            while not enough and next_seed < end and len(waiting) < 2 * processes - 1:
                size = min(CHUNK, end - next_seed)
                waiting.add(submit(some, next_seed, size))
                next_seed += size
            if not waiting:
                return total
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                total += future.result()
            progress(total)


def hunts(names: list[str], bases: list[int], limit: int, processes: int) -> Iterator[tuple[str, list[Found]]]:
    """Per guard, in order, one `Found` for each base seed."""
    with _processes(processes) as submit:
        tasks = {name: [submit(hunt, name, base, limit) for base in bases] for name in names}
        for name, futures in tasks.items():
            yield name, [future.result() for future in futures]
