"""Which faults there are, each with a name, what it does, and how it is done.

Knows: the moments of docs/tracing.md at which processes die and stop, the messages that get lost, doubled and late, the outages
of the bus. A row with `armed` needs the fault points of a system of the drill's own; the others are signals by pid and can be
done to the system that `headrace up` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from headrace.cli.console import Console
from headrace.cli.drill import netns
from headrace.cli.drill.client import Ask, Client
from headrace.cli.drill.load import Mix
from headrace.cli.drill.partition import CUT_SECONDS, partition
from headrace.cli.drill.rounds import STOPPED, Fault, Result, Round, Summary, one_round
from headrace.cli.drill.target import Borrowed, Own, Target
from headrace.cli.drill.watch import Watch
from headrace.cli.errors import CommandError
from headrace.cli.program import program
from headrace.cli.state import StateDir

LEASE = 1.0  # seconds: of a hand-off, in the drill's own system
MIX = Mix(prompts=(300, 350, 400), outputs=(12, 16, 20))  # three to four chunks each
SEES = Mix(prompts=(20, 30), outputs=(8, 12), sees=True)  # a picture each
LONG = Mix(prompts=(100, 200, 300), outputs=(60,))  # streams that are under way for a while
STREAM_SECONDS = 2.0
NATS_AWAY = 5.0  # seconds
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 8, "max_num_batched_tokens": 128, "num_blocks": 200,
    "decode": {"ticket_seconds": LEASE, "sim_step_seconds": 0.02},
    "prefill": {"sim_prefill_seconds": 0.0004},
    "gateway": {"request_seconds": 30.0, "queue_seconds": 20.0, "bus_grace_seconds": 10.0},
    "kvstore": {"capacity_bytes": "64MiB"},
}  # fmt: skip
EXACT = {"numerics": "exact", "batch_invariant": True, "threads": 1}
MOMENTS = {
    "prefill": ("accepted", "bound", "chunk:1", "chunk:2", "chunk:3", "written", "committed"),
    "decode": ("admit", "bound", "admitted", "first_token", "finished"),
    "kvstore": ("lookup", "stored"),
    "gateway": ("received", "admitted", "accepted", "first_token", "finished"),
    "vision": ("granted", "identified", "encoding", "encoded"),
}
STOPS = {
    "prefill": ("accepted", "bound", "chunk:2", "written", "committed"),
    "decode": ("admit", "bound", "admitted", "first_token", "finished"),
    "kvstore": ("lookup", "stored"),
    "gateway": ("admitted", "first_token"),
    "vision": ("granted", "identified", "encoding", "encoded"),
}
VICTIMS = {"prefill": "prefill-2", "decode": "decode-2", "kvstore": "kvstore", "gateway": "gateway", "vision": "vision-2"}


@dataclass(frozen=True)
class Row:
    name: str
    what: str
    fault: Fault
    armed: bool = True
    mix: Mix = MIX
    cannot: Callable[[], str] = lambda: ""  # why it can't be done here; "" when it can


def _at(role: str, verb: str, moment: str) -> Row:
    """Kill or stop a process where it traces an event."""
    event, victim = f"{role}.{moment}", VICTIMS[role]
    number = signal.SIGKILL if verb == "kill" else signal.SIGSTOP

    async def fault(this: Round, asks: list[Ask]) -> None:
        pid, this.unanswered = this.target.pids()[victim], moment in ("admit", "accepted")
        await this.target.arm(victim, f"{verb}={event}")
        this.send(asks)
        await this.hit(victim, number, pid)
        if verb == "stop":
            await this.resume(victim)

    what = f"SIGKILL to a {role} at `{event}`" if verb == "kill" else f"{role} stopped for {STOPPED:g} s at `{event}`"
    return Row(f"{role}-{verb}-{moment.replace(':', '')}", what, fault, mix=SEES if role == "vision" else MIX)


def _signal(role: str, verb: str) -> Row:
    """Kill or stop a process from outside, while streams are under way."""
    number = signal.SIGKILL if verb == "kill" else signal.SIGSTOP

    async def fault(this: Round, asks: list[Ask]) -> None:
        victim = this.target.names(role)[-1]
        before = await _store_failures(this) if role == "kvstore" else 0.0
        this.send(asks)
        await this.tokens(5)
        await this.hit(this.serving(role) or victim, number)
        if role == "kvstore":
            await _without_store(this, before)
        if verb == "stop":
            await this.resume(this.victim)

    what = {"kill": f"SIGKILL to a {role}", "stop": f"a {role} stopped for {STOPPED:g} s"}[verb]
    return Row(f"{role}-{verb}", f"{what} in mid-stream", fault, armed=False, mix=LONG)


async def _store_failures(this: Round) -> float:
    names = ("headrace_kvstore_client_fetch_failures_total", "headrace_kvstore_client_write_failures_total")
    return sum([await this.counters(("prefill", "decode"), name) for name in names])


async def _without_store(this: Round, before: float) -> None:
    """More prompts, until a worker has noticed that the store does not answer."""
    for extra in MIX.asks(4, int(time.time() * 1000)):
        await this.client.ask(extra)
        if await _store_failures(this) > before:
            this.noticed_at, this.noticed_by = time.monotonic(), "a worker's question to the store failed"
            return


def _messages(name: str, what: str, victim: str, faults: str, mix: Mix = MIX) -> Row:
    """Messages of one process that get lost, doubled or late, or a hand-off that is slow."""

    async def fault(this: Round, asks: list[Ask]) -> None:
        await this.target.arm(victim, faults)
        this.at = time.monotonic()
        this.send(asks)
        await asyncio.wait(this.tasks, timeout=40.0)
        this.over = time.monotonic()

    return Row(name, what, fault, mix=mix)


def _partition(name: str, what: str, into: bool, out: bool) -> Row:
    """A prefill in a network namespace, and silence on its wire."""

    async def fault(this: Round, asks: list[Ask]) -> None:
        await partition(this, asks, into, out)

    return Row(f"partition-{name}", f"{what} for {CUT_SECONDS:g} s, over tcp, in mid-hand-off", fault, cannot=netns.cannot)


async def _nats_restart(this: Round, asks: list[Ask]) -> None:
    await _bus_fault(this, asks, lambda: this.hit("nats", signal.SIGKILL))


async def _nats_outage(this: Round, asks: list[Ask]) -> None:
    async def away() -> None:
        assert isinstance(this.target, Own)
        this.at = time.monotonic()
        await this.target.outage("nats", NATS_AWAY)
        this.over = time.monotonic()

    await _bus_fault(this, asks, away)


async def _nats_stop(this: Round, asks: list[Ask]) -> None:
    async def still() -> None:
        await this.hit("nats", signal.SIGSTOP)
        await this.resume("nats")

    await _bus_fault(this, asks, still)


async def _bus_fault(this: Round, asks: list[Ask], act: Callable[[], Awaitable[Any]]) -> None:
    """Something happens to NATS in mid-stream; /ready is watched meanwhile."""
    this.send(asks)
    await this.tokens(3)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3)) as session:
        acting = asyncio.create_task(act())
        try:
            await this.target.until(lambda: this.at or acting.done(), 10.0, "nothing happened to NATS")
            await this.not_ready(session, 2.0)
        finally:
            await acting


ROWS: list[Row] = [
    *(_at(role, "kill", moment) for role, moments in MOMENTS.items() for moment in moments),
    *(_at(role, "stop", moment) for role, moments in STOPS.items() for moment in moments),
    *(_signal(role, verb) for role in ("prefill", "decode", "kvstore", "gateway") for verb in ("kill", "stop")),
    _messages("flush-delayed", f"every flush of a prefill takes {0.6 * LEASE:g} s", "prefill-2", f"hold=flush:{0.6 * LEASE}"),
    _messages("flush-stuck", f"every flush of a prefill takes {2 * LEASE:g} s, two leases", "prefill-2",
              f"hold=flush:{2 * LEASE}"),
    _messages("commit-lost", "a prefill's commits are all lost", "prefill-2", "lose=decode.commit"),
    _messages("commit-twice", "a prefill's commits come twice", "prefill-2", "repeat=decode.commit"),
    _messages("write-late", f"a prefill sleeps {3 * LEASE:g} s before a write and does it all the same: its clock stood too",
              "prefill-2", f"freeze=write:{3 * LEASE}:1"),
    _messages("store-commit-lost", "a prefill's commits at the kvstore are all lost", "prefill-2", "lose=kvstore.commit"),
    _messages("output-lost", "a third of a decode's output messages is lost", "decode-2", "lose=out:33%", LONG),
    _messages("output-twice", "a decode's output comes twice", "decode-2", "repeat=out", LONG),
    _messages("output-late", "a third of a decode's output is late and overtaken", "decode-2", "delay=out:0.2:33%", LONG),
    _messages("answers-lost", "half of a decode's answers are lost", "decode-2",
              "lose=Admitted:50%,lose=Bound:50%,lose=Verdict:50%"),
    _messages("commands-twice", "every command of a gateway comes twice", "gateway", "repeat=admit,repeat=run,repeat=cancel"),
    *(_partition(name, what, into, out) for name, what, into, out in (
        ("in", "nothing reaches a prefill", True, False), ("out", "nothing comes from a prefill", False, True),
        ("both", "a prefill is cut off", True, True))),
    Row("nats-kill", "SIGKILL to NATS in mid-stream: it starts again, empty", _nats_restart, armed=False, mix=LONG),
    Row("nats-stop", f"NATS stopped for {STOPPED:g} s in mid-stream", _nats_stop, armed=False, mix=LONG),
    Row("nats-outage", f"NATS away for {NATS_AWAY:g} s in mid-stream", _nats_outage, mix=LONG),
]  # fmt: skip


def chosen(names: list[str]) -> list[Row]:
    """Rows whose names fit; CommandError for a name that fits none."""
    if names == ["all"]:
        return ROWS
    out = []
    for pattern in names:
        found = [row for row in ROWS if fnmatch.fnmatch(row.name, pattern)]
        if not found:
            raise CommandError(f"there is no fault {pattern!r}; `{program()} drill --list` names them")
        out += [row for row in found if row not in out]
    return out


def listed() -> list[dict[str, Any]]:
    return [{"name": row.name, "what": row.what, "needs": "its own system" if row.armed else ""} for row in ROWS]


def list_text() -> str:
    width = max(len(row.name) for row in ROWS)
    lines = [f"{row.name:<{width}}  {row.what}{'' if row.armed else '  (also with --running)'}" for row in ROWS]
    return "\n".join(lines)


async def run(console: Console, names: list[str], engine: str, model: Path | None, rounds: int, running: StateDir | None
              ) -> dict[str, Any]:  # fmt: skip
    """Do the rows; -> the result."""
    rows = chosen(names)
    if running is not None:
        summaries = await _at_target(console, Borrowed(console, running), rows, rounds)
    else:
        summaries = []
        settings = SETTINGS | (EXACT if engine == "v41" else {})
        if blind := [row for row in rows if not row.mix.sees]:
            target = Own(console, settings, engine=engine, model=model, preset="w16", prefill=2, decode=2)
            summaries += await _at_target(console, target, blind, rounds)
        if seeing := [row for row in rows if row.mix.sees]:  # only what computes has eyes
            options = {"engine": "v41", "preset": "nano-vision", "prefill": 2, "decode": 2, "vision": 2}
            summaries += await _at_target(console, Own(console, SETTINGS | EXACT, **options), seeing, rounds)
    return {
        "ok": all(s.ok for s in summaries), "engine": engine, "rounds": rounds, "own": running is None,
        "rows": [s.as_dict() for s in summaries],
    }  # fmt: skip


async def _at_target(console: Console, target: Target, rows: list[Row], rounds: int) -> list[Summary]:
    summaries = []
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(target, Own) and any(row.cannot is netns.cannot for row in rows) and not netns.cannot():
            target.wire = stack.enter_context(netns.Wire())
            target.also("decode", host=target.wire.here)
        await stack.enter_async_context(target)
        watch = Watch()
        await watch.start(target.bus)
        long = LONG if target.owned else await paced(target)
        for row in rows:
            mix = long if row.mix is LONG else row.mix
            summaries.append(await _row(console, target, watch, replace(row, mix=mix), rounds))
        await watch.stop()
    return summaries


async def paced(target: Target) -> Mix:
    """Streams that take about STREAM_SECONDS at a system whose speed is not ours to choose."""
    async with Client(target.url, target.model()) as client:
        seen = await client.ask(LONG.asks(1, int(time.time()))[0])
    if seen.end != "answer":
        raise CommandError(f"{target.url} does not answer as it should before any fault: {seen.story()} {seen.message}")
    each = max(1e-5, (seen.ended - seen.first) / LONG.outputs[0])
    return replace(LONG, outputs=(min(8000, max(LONG.outputs[0], int(STREAM_SECONDS / each))),))


async def _row(console: Console, target: Target, watch: Watch, row: Row, rounds: int) -> Summary:
    summary = Summary(row.name, row.what, [])
    summary.skipped = row.cannot()
    if row.armed and not target.owned:
        summary.skipped = "needs a system of the drill's own (fault points)"
    if summary.skipped:
        console.say(f"{row.name}: skipped: {summary.skipped}")
        return summary
    for number in range(rounds):
        began = time.monotonic()
        result: Result = await one_round(target, watch, row.fault, row.mix, int(time.time() * 1000))
        summary.rounds.append(result)
        noticed = f"noticed after {result.noticed:.2f} s" if result.noticed >= 0 else "nothing to notice"
        console.say(f"{row.name} {number + 1}: {noticed}, {time.monotonic() - began:.1f} s in all")
        for problem in result.problems:
            console.alert(f"    {problem}")
        if result.problems and not await _still_usable(target):
            break
    return summary


async def _still_usable(target: Target) -> bool:
    """After a round that went wrong: whether another one makes sense."""
    try:
        await target.ready(30.0)
    except CommandError:
        return False
    return True


def table(result: dict[str, Any]) -> str:
    """Markdown, one line per fault."""
    lines = [
        "| fault | done | noticed by | p50 s | p100 s | clients saw | held up s | whole after s | ok |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if row["skipped"]:
            lines.append(f"| {row['name']} | {row['what']} | skipped: {row['skipped']} | | | | | | - |")
            continue
        seen = ", ".join(f"{count} {end}" for end, count in row["clients"].items())
        times = ["-" if row[key] is None else f"{row[key]:.2f}" for key in ("noticed_p50", "noticed_p100")]
        lines.append(
            f"| {row['name']} | {row['what']} | {row['noticed_by'] or '-'} | {times[0]} | {times[1]} | {seen} | "
            f"{row['held_up']:.1f} | {row['recovered']:.1f} | {'yes' if row['ok'] else 'NO'} |"
        )
    lines += [f"\n{row['name']}: {problem}" for row in result["rows"] for problem in row["problems"]]
    done = [row for row in result["rows"] if not row["skipped"]]
    good = sum(row["ok"] for row in done)
    lines.append(f"\n{good} of {len(done)} faults recovered in {_rounds(result['rounds'])}, {_where(result)}")
    return "\n".join(lines)


def _rounds(count: int) -> str:
    return "one round each" if count == 1 else f"{count} rounds each"


def _where(result: dict[str, Any]) -> str:
    return f"engine {result['engine']}" if result["own"] else "in the running system"
