"""One round of one fault: clients ask, something breaks, and then everything must be as before.

Knows: how to wait for the moment, what counts as noticed, when a round is good. Does not know which faults there are.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from headrace.bus import BusError
from headrace.cli.drill.client import Ask, Client, Seen
from headrace.cli.drill.figures import quantile
from headrace.cli.drill.load import Answers, Mix
from headrace.cli.drill.target import POLL, Target
from headrace.cli.drill.watch import Watch, to_unix
from headrace.cli.errors import CommandError
from headrace.cli.process_stat import process_state

CLIENTS = 6  # requests of a round
MOMENT = 15.0  # seconds until a process has reached the moment at which its fault is armed
RECOVER = 30.0  # seconds until every process is ready again
WHOLE = 25.0  # seconds until every pool is whole: two leases of the kvstore, the longest there are, with slack
STOPPED = 3.0  # seconds that a process is stopped: longer than any lease of the drill's system
LATE = 0.25  # seconds by which this process may notice the end of another later than the system did
SETTLE = 0.1  # seconds for the last trace events


@dataclass
class Result:
    """What one round showed. Seconds; `noticed` is -1 where nothing in the system reacted, or had to."""

    noticed: float = -1.0
    by: str = ""  # the reaction, in words
    ends: list[str] = field(default_factory=list)
    held_up: float = 0.0  # the client whose request took longest beyond its undisturbed time
    recovered: float = 0.0  # from the end of the fault until everything was ready and whole
    problems: list[str] = field(default_factory=list)


@dataclass
class Round:
    """What a fault may use while it happens. It sets `at` (time.monotonic()) at the moment of the fault, `over` at its end."""

    target: Target
    client: Client
    watch: Watch
    seens: list[Seen] = field(default_factory=list)
    tasks: list[asyncio.Task] = field(default_factory=list)
    at: float = 0.0
    over: float = 0.0
    noticed_at: float = 0.0  # set by faults that know better than the trace
    noticed_by: str = ""
    victim: str = ""
    gateway_died: bool = False  # then connections may break; else each request has an answer or an error object
    unanswered: bool = False  # the victim may go before it has answered its first command: then it is only asked elsewhere

    def send(self, asks: list[Ask]) -> None:
        """Let the clients ask."""
        for ask in asks:
            seen = Seen(ask)
            self.seens.append(seen)
            self.tasks.append(asyncio.create_task(self.client.ask(ask, seen=seen)))

    async def tokens(self, count: int) -> None:
        """Wait until some client has had so many tokens: streams are under way."""

        def streaming() -> bool:
            return any(len(seen.ids) >= count and not seen.ended for seen in self.seens)

        await self.target.until(streaming, MOMENT, "no stream is under way")

    def serving(self, role: str) -> str:
        """A process of this role that serves a stream which is under way; "" when the trace knows none."""
        names = self.target.instance_names()
        for seen in self.seens:
            if seen.ids and not seen.ended:
                served = (names.get(instance, "") for instance in self.watch.served_by(seen.request))
                if found := next((name for name in served if name.startswith(role)), ""):
                    return found
        return ""

    async def hit(self, name: str, number: int, pid: int = 0) -> int:
        """Kill or stop a process now; -> its pid. With `pid`: it does that itself, so only wait until it has."""
        before = 0.0 if pid else time.monotonic()
        pid = pid or self.target.signal(name, number)
        states = ("T",) if number == signal.SIGSTOP else ("", "Z")

        def done() -> bool:
            return process_state(pid) in states or self.target.pids().get(name) != pid

        end = time.monotonic() + MOMENT
        while not done():
            if time.monotonic() > end:
                raise CommandError(f"{name} never came to the point at which it should have ended or stopped")
            if all(task.done() for task in self.tasks):  # none of these requests came by it
                self.send([replace(seen.ask, seed=seen.ask.seed + len(self.seens)) for seen in self.seens[:2]])
            await asyncio.sleep(POLL)
        self.over = time.monotonic()
        self.at, self.victim = before or self.over, name
        self.gateway_died = self.gateway_died or (name == "gateway" and number == signal.SIGKILL)
        return pid

    async def resume(self, name: str, seconds: float = STOPPED) -> None:
        """Leave a process stopped for so long, then let it go on."""
        await asyncio.sleep(seconds)
        self.target.signal(name, signal.SIGCONT)
        self.over = time.monotonic()

    async def not_ready(self, session: aiohttp.ClientSession, limit: float) -> None:
        """Wait until the gateway says that it is not ready; that is how a lost bus is noticed."""
        while time.monotonic() < self.at + limit:
            async with session.get(f"{self.client.url}/ready") as answer:
                if answer.status != 200:
                    self.noticed_at, self.noticed_by = time.monotonic(), "/ready of the gateway says 503"
                    return
            await asyncio.sleep(0.01)

    async def counters(self, roles: tuple[str, ...], name: str) -> float:
        """Sum of a metric over all processes of some roles."""
        total = 0.0
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            for process in [name for role in roles for name in self.target.names(role)]:
                presence = self.target.presence(process)
                if presence is not None and presence.http:
                    async with session.get(presence.http + "/metrics") as answer:
                        text = await answer.text()
                    total += sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))
        return total


Fault = Callable[[Round, list[Ask]], Awaitable[None]]


async def one_round(target: Target, watch: Watch, fault: Fault, mix: Mix, number: int) -> Result:
    """Do a fault once and judge it."""
    result = Result()
    asks = mix.asks(CLIENTS, number)
    async with Client(target.url, target.model()) as client:
        this = Round(target, client, watch)
        try:
            await fault(this, asks)
            await asyncio.gather(*this.tasks)
            await target.ready(RECOVER)
            if target.owned:
                for name in target.names():
                    await target.arm(name, "")
            await target.whole(WHOLE)
            result.recovered = time.monotonic() - max(this.over, max((s.ended for s in this.seens), default=0.0))
            await asyncio.sleep(SETTLE)
            _notice(this, result)  # only now: clients of a gateway that died end before anybody else can notice
            await _judge(this, client, result)
        except (CommandError, BusError, OSError) as error:
            result.problems.append(str(error))
        finally:
            for task in this.tasks:
                task.cancel()
            await asyncio.gather(*this.tasks, return_exceptions=True)
            for name in target.pids():
                target.signal(name, signal.SIGCONT)
    result.ends = [seen.story() for seen in this.seens]
    return result


def _notice(this: Round, result: Result) -> None:
    """Who reacted first, and how long after the fault."""
    if this.noticed_at:
        result.noticed, result.by = max(0.0, this.noticed_at - this.at), this.noticed_by
        return
    event = this.watch.first_reaction(to_unix(this.at) - LATE, this.unanswered) if this.at else None
    if event is not None:
        result.noticed = max(0.0, event.ts - to_unix(this.at))
        why = _why(event.data) if event.reacts else "another worker is asked"
        result.by = f"{event.name}: {why}"


def _why(data: dict[str, Any]) -> str:
    """The reason that an event gives, without the names of instances."""
    text = str(data.get("why") or data.get("message") or data.get("code") or "")
    text = " ".join("X" if "-" in word and len(word) > 24 else word for word in text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


async def _judge(this: Round, client: Client, result: Result) -> None:
    """Ends, tokens, and whether the same requests go through now; these are the undisturbed answers too."""
    answers = Answers()
    try:
        await answers.learn(client, [seen.ask for seen in this.seens], 3)
    except CommandError as error:
        result.problems.append(f"afterwards: {error}")
        return
    for seen in this.seens:
        want = answers.by_ask[seen.ask]
        if seen.wrong(want):
            result.problems.append(f"wrong tokens in {seen.request}: {seen.ids} instead of {want}")
        if seen.end == "broken" and not this.gateway_died:
            who = seen.request or "a request"
            result.problems.append(f"the connection of {who} broke, and no gateway died: {seen.message}")
        if seen.end == "hung":
            result.problems.append(f"{seen.request or 'a request'} never ended")
    usual = sorted(x.seconds for x in await asyncio.gather(*(client.ask(seen.ask) for seen in this.seens)))
    result.held_up = max(0.0, max(seen.seconds for seen in this.seens) - usual[-1])


@dataclass
class Summary:
    """All rounds of a fault."""

    name: str
    what: str
    rounds: list[Result]
    skipped: str = ""

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def problems(self) -> list[str]:
        return [problem for result in self.rounds for problem in result.problems]

    def as_dict(self) -> dict[str, Any]:
        noticed = [r.noticed for r in self.rounds if r.noticed >= 0]
        by = Counter(r.by for r in self.rounds if r.noticed >= 0)
        ends = Counter(end for r in self.rounds for end in r.ends)
        return {
            "name": self.name, "what": self.what, "skipped": self.skipped, "ok": self.ok, "rounds": len(self.rounds),
            "noticed_p50": quantile(noticed, 0.5) if noticed else None, "noticed_p100": max(noticed) if noticed else None,
            "noticed_by": by.most_common(1)[0][0] if by else "", "clients": dict(ends.most_common()),
            "held_up": max((r.held_up for r in self.rounds), default=0.0),
            "recovered": max((r.recovered for r in self.rounds), default=0.0), "problems": self.problems,
        }  # fmt: skip
