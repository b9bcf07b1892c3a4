"""`headrace drill disturbed`: thousands of requests under random faults, each compared token by token with an undisturbed run.

Knows: which faults are drawn, how requests end, which tokens are right. In numerics class `exact` with a batch-invariant engine
a request has the same tokens wherever, whenever and beside whatever it runs, so any difference is a wrong token.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.bus import BusError
from headrace.cli.console import Console
from headrace.cli.drill.client import Client, Seen
from headrace.cli.drill.load import Answers, Mix
from headrace.cli.drill.rows import EXACT, SETTINGS
from headrace.cli.drill.target import Own
from headrace.cli.drill.watch import Watch
from headrace.cli.errors import CommandError

CLIENTS = 12
CANCELS = 0.08  # share of clients that leave after some tokens
SPREAD = 8  # each different request is asked about this often
PAUSE = 0.5  # seconds between the end of one fault and the next, on average
AT_A_TIME = 2  # faults
REFUSED = 0.2  # seconds until a client whose connection was refused tries again
STOPPED = (0.3, 2.5)  # seconds that a process is stopped
ARMED = 2.0  # seconds that messages are disturbed
AS_BEFORE = 60.0  # seconds until a killed process must be ready again
MIXES = {
    "sim": Mix(prompts=(3, 100, 200, 400), outputs=(4, 12, 24)),
    "v41": Mix(prompts=(5, 64, 129, 200), outputs=(4, 8, 12), temperature=0.8),
}
MESSAGES = (
    ("decode", "lose=out:30%"), ("decode", "repeat=out"), ("decode", "delay=out:0.15:30%"),
    ("decode", "lose=Bound:50%,lose=Admitted:30%"), ("decode", "lose=Verdict:60%"), ("prefill", "lose=commit:60%"),
    ("prefill", "repeat=commit,repeat=bind"), ("prefill", "lose=writer_done:60%"), ("prefill", "hold=flush:0.6"),
    ("prefill", "freeze=write:1.5:1"), ("prefill", "lose=Accepted:40%"), ("gateway", "lose=cancel:60%"),
    ("gateway", "repeat=admit,repeat=run"), ("gateway", "lose=run:30%"), ("kvstore", "lose=KvFound:50%"),
)  # fmt: skip


@dataclass
class Disturbed:
    target: Own
    client: Client
    answers: Answers
    rng: random.Random
    left: int
    refused: int = 0
    missed: int = 0  # faults that could not be done
    ends: Counter = field(default_factory=Counter)
    faults: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def one_client(self) -> None:
        asks = list(self.answers.by_ask)
        while self.left > 0:
            self.left -= 1
            ask = self.rng.choice(asks)
            cancel_at = self.rng.randrange(1, ask.max_tokens) if self.rng.random() < CANCELS else None
            while (seen := await self.client.ask(ask, cancel_at)).refused:  # nobody listens: it was not asked at all
                self.refused += 1
                await asyncio.sleep(REFUSED)
            self._count(seen)

    def _count(self, seen: Seen) -> None:
        if self.answers.wrong(seen):
            self.wrong.append(f"{seen.request}: {seen.ids} instead of {self.answers.by_ask[seen.ask]}")
        self.ends[seen.story()] += 1
        if seen.end == "hung":
            self.problems.append(f"{seen.request or 'a request'} never ended")

    async def disturb(self) -> None:
        """One fault after the other, until it is cancelled; each waited for until every process is ready again."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / PAUSE))
            try:
                self.faults[await self._fault()] += 1
                await self.target.ready(AS_BEFORE)
            except (CommandError, BusError) as error:  # the process that was to be armed had just died, say
                self.missed += 1
                if "not ready" in str(error) and str(error).startswith("after"):
                    self.problems.append(str(error))

    async def _fault(self) -> str:
        draw, name = self.rng.random(), self.rng.choice(self.target.names())
        role = name.partition("-")[0]
        if draw < 0.05:
            self.target.signal("nats", signal.SIGKILL)
            return "SIGKILL to nats"
        if draw < 0.35:
            pid = self.target.signal(name, signal.SIGKILL)
            await self.target.until(lambda: self.target.pids().get(name) != pid, 5.0, f"{name} did not die")
            return f"SIGKILL to {role}"
        if draw < 0.6:
            self.target.signal(name, signal.SIGSTOP)
            await asyncio.sleep(self.rng.uniform(*STOPPED))
            self.target.signal(name, signal.SIGCONT)
            return f"SIGSTOP to {role}"
        role, text = self.rng.choice(MESSAGES)
        name = self.rng.choice(self.target.names(role))
        await self.target.arm(name, text)
        await asyncio.sleep(ARMED)
        await self.target.arm(name, "")
        return f"{role} {text}"


async def run(console: Console, engine: str, model: Path | None, requests: int, seed: int) -> dict[str, Any]:
    """All of it; -> the result."""
    settings = SETTINGS | (EXACT if engine == "v41" else {})
    own = Own(console, settings, engine=engine, model=model, preset="w16", prefill=2, decode=2)
    async with own as target, Client(target.url, target.model()) as client:
        answers, watch = Answers(), Watch()
        await watch.start(target.bus)
        asks = MIXES[engine].asks(max(1, requests // SPREAD), seed)
        console.say(f"asking {len(asks)} different requests undisturbed")
        await answers.learn(client, asks, 6)
        console.say(f"{requests} requests by {CLIENTS} clients, disturbed")
        work = Disturbed(target, client, answers, random.Random(seed), requests)
        began = time.monotonic()
        retries = await _all(work, watch, console)
        seconds = time.monotonic() - began
        try:
            await target.ready(AS_BEFORE)
            await target.whole(20.0)
        except CommandError as error:
            work.problems.append(f"at the end: {error}")
        await watch.stop()
    return {
        "ok": not work.wrong and not work.problems, "engine": engine, "model": str(own.system.model or engine), "seed": seed,
        "requests": requests, "different": len(asks), "seconds": round(seconds, 1), "ends": dict(work.ends.most_common()),
        "retries": retries, "refused": work.refused, "missed": work.missed,
        "faults": dict(work.faults.most_common()), "wrong": work.wrong, "problems": work.problems,
    }  # fmt: skip


async def _all(work: Disturbed, watch: Watch, console: Console) -> dict[str, int]:
    """Clients until none is left, and faults meanwhile; -> trace events that tell of another worker taking over."""
    seen: Counter = Counter()

    async def tell() -> None:
        while True:
            await asyncio.sleep(20.0)
            console.say(f"{work.left} requests left, {sum(work.faults.values())} faults, {len(work.wrong)} wrong")

    watch.on_event = lambda event: seen.update([event.name] if event.name in ("gateway.retry", "gateway.migrate") else [])
    side = [asyncio.create_task(work.disturb()) for _ in range(AT_A_TIME)] + [asyncio.create_task(tell())]
    try:
        await asyncio.gather(*(work.one_client() for _ in range(CLIENTS)))
    finally:
        for task in side:
            task.cancel()
        await asyncio.gather(*side, return_exceptions=True)
        for name in work.target.pids():
            work.target.signal(name, signal.SIGCONT)
    for name in work.target.names():
        try:
            await work.target.arm(name, "")
        except (CommandError, BusError) as error:
            work.problems.append(f"at the end: {error}")
    return dict(seen)


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    faults = sum(result["faults"].values())
    lines = [
        f"engine {result['engine']}, {result['requests']} requests ({result['different']} different), {faults} faults in "
        f"{result['seconds']:.0f} s, seed {result['seed']}",
        "", "| how requests ended | count |", "|---|---|",
        *(f"| {end} | {count} |" for end, count in result["ends"].items()),
        f"| **wrong tokens** | **{len(result['wrong'])}** |",
        "", "| fault | count |", "|---|---|",
        *(f"| {name} | {count} |" for name, count in result["faults"].items()),
        "", "another worker took over: " + (", ".join(f"{k} {v}" for k, v in result["retries"].items()) or "never")
        + f"; connections refused while the gateway was away (asked again, not counted above): {result['refused']}",
    ]  # fmt: skip
    lines += [f"WRONG {text}" for text in result["wrong"][:20]] + [f"PROBLEM {text}" for text in result["problems"][:20]]
    return "\n".join(lines)
