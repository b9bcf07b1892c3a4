"""`headrace drill soak`: load for an hour, a fault every ten seconds, and the question whether anything is left behind.

Knows: the capacity of the system as it measures it, the faults it draws, which requests a fault touched, memory of every process.
A request is touched when its life overlaps a fault's window: from the fault until every process is ready again, nobody waits in
line and nothing that the fault left is owed.

`decode-1` and `prefill-1` are never killed, gateway, kvstore and NATS only in the first half, so that the memory of processes which
live long can be judged: flat means that the last quarter of a life takes at most FLAT times what the second one took.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
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
from headrace.cli.drill import plot
from headrace.cli.drill.client import Client, Seen
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
P99_LIMIT = 1.5
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
            out[name] = {"seconds": round(line[-1][0] - line[0][0]), "lives": len(lives), "second": second, "last": last, "flat": flat}
        return out


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


async def run(console: Console, minutes: float, load: float, every: float, seed: int, out: Path | None) -> dict[str, Any]:
    """The whole soak; -> its result, also written to `out`/soak.json and soak.svg each minute."""
    async with Own(console, SETTINGS, engine="sim", prefill=2, decode=2) as target, Client(target.url, target.model()) as client:
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
        await open_loop(client, asks, rate, time.monotonic() + quiet_seconds, rng, quiet.done, CANCELS)
        soak = Soak(target, client, watch, answers, rng, console, time.monotonic())
        console.say(f"{minutes:g} minutes with a fault every {every:g} s")
        await _soak(soak, quiet, asks, rate, minutes, every, capacity, out)
        owed = await _quiet_at_last(target)
        result = report(soak, quiet, capacity, rate, minutes, every, owed)
        await watch.stop()
    if out is not None:
        save(out, soak, result)
    return result


async def _soak(soak: Soak, quiet: Soak, asks: list, rate: float, minutes: float, every: float, capacity: float,
                out: Path | None) -> None:  # fmt: skip
    async def saving() -> None:
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            soak.console.say(f"{soak.now() / 60:.0f} min: {len(soak.lives)} requests, {len(soak.windows)} faults, "
                             f"{len(soak.wrong)} wrong")  # fmt: skip
            if out is not None:
                save(out, soak, report(soak, quiet, capacity, rate, minutes, every, {}))

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


def report(
    soak: Soak, quiet: Soak, capacity: float, rate: float, minutes: float, every: float, owed: dict[str, str]
) -> dict[str, Any]:
    """Figures and verdicts. Seconds and bytes."""
    for window in soak.windows:
        window.ended = window.ended or soak.now()
    groups: dict[str, list[Life]] = {"quiet run": quiet.lives, "untouched": [], "during a fault, other workers": [], "victim's": []}
    ends: dict[str, int] = {}
    for life in soak.lives:
        touched = soak.touched(life)
        groups["victim's" if life.victim else "during a fault, other workers" if touched else "untouched"].append(life)
        ends[life.end] = ends.get(life.end, 0) + 1
    latency = {}
    for name, lives in groups.items():
        answered = [life for life in lives if life.end == "answer"]
        latency[name] = {
            "requests": len(lives), "answers": len(answered),
            "p50": quantile([x.seconds for x in answered], 0.5), "p99": quantile([x.seconds for x in answered], 0.99),
            "ttft_p50": quantile([x.ttft for x in answered], 0.5), "ttft_p99": quantile([x.ttft for x in answered], 0.99),
        }  # fmt: skip
    ratio = latency["untouched"]["p99"] / latency["quiet run"]["p99"] if latency["quiet run"]["p99"] else 0.0
    memory = soak.flatness()
    failed = [f"{w.began:.0f} s {w.fault}: {w.why}" for w in soak.windows if not w.recovered and w.why]
    lasted = [w.ended - w.began for w in soak.windows if w.recovered]
    checks = {
        "0 wrong tokens": not soak.wrong and not quiet.wrong,
        "no request hung": not ends.get("hung"),
        "every untouched request was answered or left by its client": all(
            life.end in ("answer", "cancelled") for life in groups["untouched"]
        ),
        "recovered from every fault": not failed,
        "pools whole at the end": not owed,
        "memory flat": all(each["flat"] for each in memory.values()),
        f"p99 of untouched requests within {P99_LIMIT} of the quiet run": 0 < ratio <= P99_LIMIT,
    }
    return {
        "ok": all(checks.values()), "checks": checks, "minutes": minutes, "every": every, "capacity": capacity, "rate": rate,
        "requests": len(soak.lives), "ends": ends, "faults": len(soak.windows), "failed_faults": failed,
        "recovery_p50": quantile(lasted, 0.5), "recovery_max": max(lasted, default=0.0), "latency": latency,
        "p99_ratio": ratio, "memory": memory, "shm_first": soak.shm[len(soak.shm) // 4][1] if soak.shm else 0,
        "shm_last": soak.shm[-1][1] if soak.shm else 0, "owed": owed, "wrong": soak.wrong + quiet.wrong,
        "load_p50": quantile([x for _, x in soak.load], 0.5), "load_max": max((x for _, x in soak.load), default=0.0),
        "by_fault": by_fault(soak.windows),
    }  # fmt: skip


def by_fault(windows: list[Window]) -> dict[str, dict[str, float]]:
    """How often each fault came, and how long until all was as before: median and longest, seconds."""
    lasted: dict[str, list[float]] = {}
    for window in windows:
        lasted.setdefault(window.fault, []).append(window.ended - window.began)
    return {
        name: {"times": len(each), "p50": quantile(each, 0.5), "max": max(each)} for name, each in sorted(lasted.items())
    }


def table(result: dict[str, Any]) -> str:
    """For people; Markdown."""
    lines = [
        f"{result['minutes']:g} minutes at {result['rate']:.1f} requests/s (capacity {result['capacity']:.1f}), "
        f"{result['faults']} faults: {result['requests']} requests, "
        + ", ".join(f"{count} {end}" for end, count in sorted(result["ends"].items())),
        f"as before after a fault: p50 {result['recovery_p50']:.1f} s, at most {result['recovery_max']:.1f} s; "
        f"load average p50 {result['load_p50']:.1f}, at most {result['load_max']:.1f}",
        "",
        "| requests | count | answers | p50 s | p99 s | first token p50 s | p99 s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, x in result["latency"].items():
        lines.append(
            f"| {name} | {x['requests']} | {x['answers']} | {x['p50']:.2f} | {x['p99']:.2f} | {x['ttft_p50']:.2f} | "
            f"{x['ttft_p99']:.2f} |"
        )
    lines += ["", "| process | starts | longest life s | RSS 2nd quarter MiB | last quarter MiB | flat |", "|---|---|---|---|---|---|"]
    for name, x in sorted(result["memory"].items()):
        lines.append(
            f"| {name} | {x['lives']} | {x['seconds']} | {x['second'] / 2**20:.1f} | {x['last'] / 2**20:.1f} | "
            f"{'yes' if x['flat'] else 'NO'} |"
        )
    lines += [f"| shared memory | | | {result['shm_first'] / 2**20:.1f} | {result['shm_last'] / 2**20:.1f} | |"]
    lines += ["", "| fault | times | as before after p50 s | at most s |", "|---|---|---|---|"]
    lines += [f"| {name} | {x['times']} | {x['p50']:.1f} | {x['max']:.1f} |" for name, x in result["by_fault"].items()]
    lines += ["", *(f"{'yes' if holds else 'NO '}  {check}" for check, holds in result["checks"].items())]
    lines += [f"     {text}" for text in [*result["failed_faults"][:10], *result["wrong"][:10]]]
    lines += [f"     owed by {name}: {text}" for name, text in result["owed"].items()]
    return "\n".join(lines)


def save(out: Path, soak: Soak, result: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    windows = [[w.fault, round(w.began, 2), round(w.ended, 2), w.recovered, w.why] for w in soak.windows]
    (out / "soak.json").write_text(json.dumps(result | {"windows": windows}, indent=1) + "\n")
    (out / "soak.svg").write_text(picture(soak))


def picture(soak: Soak) -> str:
    minute = 60.0
    marks = [w.began / minute for w in soak.windows]
    memory = {name: [(t / minute, rss / 2**20) for t, rss, _ in line] for name, line in sorted(soak.rss.items())}
    memory["shared memory"] = [(t / minute, size / 2**20) for t, size in soak.shm]
    by_minute: dict[bool, dict[int, list[float]]] = {True: {}, False: {}}
    for life in soak.lives:
        if life.end == "answer":
            by_minute[soak.touched(life)].setdefault(int(life.began // minute), []).append(life.seconds)
    latency = {
        name: [(at + 0.5, quantile(values, 0.99)) for at, values in sorted(by_minute[touched].items())]
        for name, touched in (("untouched, p99", False), ("touched, p99", True))
    }
    panels = [
        plot.Panel("memory of each process (marks: faults)", "MiB", memory, marks),
        plot.Panel("time of a request, per minute", "s", latency, marks),
        plot.Panel("load average of the machine", "", {"load": [(t / minute, x) for t, x in soak.load]}),
    ]
    return plot.svg("headrace drill soak", panels, "min")
