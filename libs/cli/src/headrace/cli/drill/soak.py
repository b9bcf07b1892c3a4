"""`headrace drill soak`: load for an hour, a fault every ten seconds, and the question whether anything is left behind.

Knows: the capacity of the system as it measures it, the faults it draws, which requests a fault touched, memory of every
process. Does not know how its result is shown (soak_report.py).

A request is touched when its life overlaps a fault's window: from the fault until every process is ready again, nobody waits in
line and nothing that the fault left is owed. `decode-1` and `prefill-1` are never killed, gateway, kvstore and NATS only in the
first half, so that the memory of processes which live long can be judged: flat means that the last quarter of a life takes at
most FLAT times what the second one took.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.bus import BusError
from headrace.cli.console import Console
from headrace.cli.drill import soak_report
from headrace.cli.drill.client import Client, Seen
from headrace.cli.drill.figures import resident, used
from headrace.cli.drill.load import Answers, Mix, closed_loop, open_loop
from headrace.cli.drill.target import Own
from headrace.cli.drill.watch import Watch
from headrace.cli.errors import CommandError

ASKS = 240  # different requests
CAPACITY_SECONDS = 20.0
SAMPLE_SECONDS = 5.0
SAVE_SECONDS = 60.0
WINDOW_LIMIT = 30.0  # a fault from which the system has not recovered by then is a failure
FLAT = 1.05
FLAT_BYTES = 4 << 20  # less growth than this is not looked at
CANCELS = 0.03
MIX = Mix(prompts=(3, 100, 200, 400), outputs=(8, 16, 24))
# Time is modelled and generous, so that capacity is a number of sequences and not of cores.
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 512, "num_blocks": 400,
    "decode": {"ticket_seconds": 1.0, "sim_step_seconds": 0.04},
    "prefill": {"sim_prefill_seconds": 0.0002},
    "gateway": {"request_seconds": 30.0, "queue_seconds": 20.0},
    "kvstore": {"capacity_bytes": "64MiB"},
}  # fmt: skip


@dataclass
class Window:
    """One fault. Times are seconds since the soak began."""

    fault: str
    began: float
    ended: float = 0.0
    recovered: bool = False
    why: str = ""


@dataclass
class Life:
    """One request, as far as it is kept."""

    began: float
    seconds: float
    ttft: float
    end: str
    victim: bool  # a worker that served it was the victim of a fault during its life


@dataclass
class Soak:
    """State and result of one soak."""

    target: Own
    client: Client
    watch: Watch
    answers: Answers
    rng: random.Random
    console: Console
    zero: float = 0.0  # time.monotonic() at the start
    lives: list[Life] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    rss: dict[str, list[tuple[float, float, int]]] = field(default_factory=dict)  # name -> (seconds, bytes, pid)
    shm: list[tuple[float, float]] = field(default_factory=list)
    load: list[tuple[float, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def now(self) -> float:
        return time.monotonic() - self.zero

    # ------------------------------------------------------------ requests

    def done(self, seen: Seen) -> None:
        if self.answers.wrong(seen):
            self.wrong.append(f"{seen.request}: {seen.ids[:40]} instead of {self.answers.by_ask[seen.ask][:40]}")
        ttft = seen.first - seen.began if seen.first else 0.0
        names = self.target.instance_names()
        served = {names.get(instance, instance) for instance in self.watch.served_by(seen.request)}
        began = seen.began - self.zero
        hit = any(w.began <= began + seen.seconds and (w.ended or 1e9) >= began and w.fault.split()[1] in served
                  for w in self.windows[-20:])  # fmt: skip
        self.lives.append(Life(began, seen.seconds, ttft, seen.end, hit))

    def touched(self, life: Life) -> bool:
        return any(w.began <= life.began + life.seconds and life.began <= w.ended for w in self.windows)

    # ------------------------------------------------------------ faults

    def faults(self, early: bool) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        """What may be done now: "verb process", and how."""
        kill, stop = self._kill, self._stop
        out = 3 * [(f"kill {name}", kill(name)) for name in ("decode-2", "prefill-2")]
        out += [(f"stop {name} 1.5 s", stop(name, 1.5)) for name in ("decode-1", "decode-2", "prefill-1", "prefill-2")]
        out += [("stop kvstore 1.5 s", stop("kvstore", 1.5)), ("stop gateway 1 s", stop("gateway", 1.0))]
        out += [
            (f"arm {name} {text}", self._arm(name, text))
            for name, text in (
                ("decode-1", "lose=out:20%"), ("decode-2", "lose=Bound:50%"), ("prefill-1", "lose=commit"),
                ("prefill-2", "repeat=commit,repeat=bind"), ("prefill-1", "hold=flush:0.5"), ("gateway", "lose=cancel:50%"),
                ("decode-2", "delay=out:0.1:30%"),
            )
        ]  # fmt: skip
        if early:
            out += [(f"kill {name}", kill(name)) for name in ("kvstore", "nats", "gateway")]
        return out

    def _kill(self, name: str) -> Callable[[], Awaitable[None]]:
        async def act() -> None:
            pid = self.target.signal(name, signal.SIGKILL)
            await self.target.until(lambda: self.target.pids().get(name) != pid, 5.0, f"{name} did not die")

        return act

    def _stop(self, name: str, seconds: float) -> Callable[[], Awaitable[None]]:
        async def act() -> None:
            self.target.signal(name, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            self.target.signal(name, signal.SIGCONT)

        return act

    def _arm(self, name: str, text: str) -> Callable[[], Awaitable[None]]:
        async def act() -> None:
            await self.target.arm(name, text)
            await asyncio.sleep(2.0)
            await self.target.arm(name, "")

        return act

    async def disturb(self, every: float, until: float) -> None:
        """A fault every so many seconds; one at a time, each waited for until the system is as before."""
        middle = self.now() + (until - self.now()) / 2
        while (due := (len(self.windows) + 1) * every) < until - WINDOW_LIMIT / 2:
            await asyncio.sleep(max(0.0, due - self.now()))
            fault, act = self.rng.choice(self.faults(self.now() < middle))
            window = Window(fault, self.now())
            self.windows.append(window)
            try:
                await act()
                await self._as_before()
                window.recovered = True
            except (CommandError, BusError) as error:
                window.why = str(error)
                self.console.alert(f"[{window.began:.0f} s] {fault}: {error}")
            window.ended = self.now()

    async def _as_before(self) -> None:
        """Every process is ready, nobody waits in line, nothing is in quarantine."""
        await self.target.ready(WINDOW_LIMIT)

        end = time.monotonic() + WINDOW_LIMIT
        while True:
            audits = await asyncio.gather(*map(self.target.audit, self.target.names()))
            owed = [a for a in audits if not a.get("ok") or a.get("quarantined") or a.get("waiting")]
            if not owed:
                return
            if time.monotonic() > end:
                raise CommandError(f"not as before after {WINDOW_LIMIT:g} s: {owed}")
            await asyncio.sleep(0.1)

    # ------------------------------------------------------------ memory

    async def sample(self) -> None:
        while True:
            now = self.now()
            for name, pid in self.target.pids().items():
                if rss := resident(pid):
                    self.rss.setdefault(name, []).append((now, rss, pid))
            self.shm.append((now, used(self.target.shm_dir)))
            self.load.append((now, os.getloadavg()[0]))
            await asyncio.sleep(SAMPLE_SECONDS)

    def flatness(self) -> dict[str, dict[str, Any]]:
        """Of the longest life of each process: seconds, and medians of its second and last quarter, in bytes."""
        out = {}
        for name, samples in self.rss.items():
            lives: dict[int, list[tuple[float, float]]] = {}
            for when, rss, pid in samples:
                lives.setdefault(pid, []).append((when, rss))
            line = max(lives.values(), key=len)
            quarter = max(1, len(line) // 4)
            second = statistics.median(rss for _, rss in line[quarter : 2 * quarter] or line)
            last = statistics.median(rss for _, rss in line[-quarter:])
            flat = last <= max(FLAT * second, second + FLAT_BYTES)
            seconds = round(line[-1][0] - line[0][0])
            out[name] = {"seconds": seconds, "lives": len(lives), "second": second, "last": last, "flat": flat}
        return out


async def run(console: Console, minutes: float, load: float, every: float, seed: int, out: Path | None) -> dict[str, Any]:
    """The whole soak; -> its result, also written to `out`/soak.json and soak.svg each minute."""
    own = Own(console, SETTINGS, engine="sim", prefill=2, decode=2)
    async with own as target, Client(target.url, target.model()) as client:
        watch, answers, rng = Watch(), Answers(), random.Random(seed)
        await watch.start(target.bus)
        asks = MIX.asks(ASKS, seed)
        console.say(f"asking {len(asks)} requests undisturbed")
        await answers.learn(client, asks, 8)
        measured = await closed_loop(client, asks, 12, CAPACITY_SECONDS, rng)
        capacity = len(measured) / CAPACITY_SECONDS
        rate, quiet_seconds = load * capacity, min(300.0, max(20.0, minutes * 6.0))
        console.say(f"capacity {capacity:.1f} requests/s; {quiet_seconds:.0f} s at {rate:.1f} undisturbed")
        quiet = Soak(target, client, watch, answers, rng, console, time.monotonic())
        sampling = asyncio.create_task(quiet.sample())
        try:
            await open_loop(client, asks, rate, time.monotonic() + quiet_seconds, rng, quiet.done, CANCELS)
        finally:
            sampling.cancel()
        soak = Soak(target, client, watch, answers, rng, console, time.monotonic())
        console.say(f"{minutes:g} minutes with a fault every {every:g} s")
        await _soak(soak, quiet, asks, rate, minutes, every, capacity, out)
        owed = await _quiet_at_last(target)
        result = soak_report.report(soak, quiet, capacity, rate, minutes, every, owed)
        await watch.stop()
    if out is not None:
        soak_report.save(out, soak, result)
    return result


async def _soak(soak: Soak, quiet: Soak, asks: list, rate: float, minutes: float, every: float, capacity: float,
                out: Path | None) -> None:  # fmt: skip
    async def saving() -> None:
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            soak.console.say(f"{soak.now() / 60:.0f} min: {len(soak.lives)} requests, {len(soak.windows)} faults, "
                             f"{len(soak.wrong)} wrong")  # fmt: skip
            if out is not None:
                soak_report.save(out, soak, soak_report.report(soak, quiet, capacity, rate, minutes, every, {}))

    side = [asyncio.create_task(soak.sample()), asyncio.create_task(saving())]
    until = minutes * 60
    try:
        await asyncio.gather(
            open_loop(soak.client, asks, rate, soak.zero + until, soak.rng, soak.done, CANCELS), soak.disturb(every, until)
        )
    finally:
        for task in side:
            task.cancel()
        await asyncio.gather(*side, return_exceptions=True)


async def _quiet_at_last(target: Own) -> dict[str, str]:
    """What is still owed ten seconds after the last request."""
    try:
        await target.ready(WINDOW_LIMIT)
        await target.whole(10.0)
    except CommandError as error:
        return {"system": str(error)} | await target.debts()
    return {}
