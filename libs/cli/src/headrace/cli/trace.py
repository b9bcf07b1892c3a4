"""`headrace trace`: the life of one request, put together from what every process remembers of it.

Knows: gathering events, ordering them, showing them. Does not know: which events there are; a process may send any.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from dataclasses import dataclass

import uvloop

from headrace.bus import Bus, BusError, BusSettings, Peers, gather, subjects
from headrace.cli import state
from headrace.cli.errors import CommandError

EPILOG = """\
The id is the server's (`id` of an answer) or the one that you sent as X-Request-Id. Works after the request ended, as
long as the processes that took part live and remember it. As it happens, for every request: {program} trace --follow
"""
SETTLE = 0.6  # seconds in which every living process has answered a hello
BAR = 28  # characters of a full-width bar
ANSWER_ID = re.compile(r"(?:chatcmpl|cmpl|resp|msg)[-_]([^\W_]+)(?:_\w+)?")
HIDDEN = {"ts", "request", "event", "instance", "ms"}


@dataclass
class Row:
    """One event: it ended at `at` ms after the request's first moment and lasted `ms` (0: a moment)."""

    at: float
    ms: float
    event: str
    where: str
    data: dict

    @property
    def role(self) -> str:
        return self.event.split(".")[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request", nargs="?", default="", metavar="REQUEST_ID", help="the server's id or the client's")
    parser.add_argument("--json", action="store_true", help="events as JSON, one array (with --follow: one object a line)")
    parser.add_argument(
        "--follow", action="store_true", help="show events as they happen, of one request or of all, until Ctrl-C"
    )
    parser.add_argument("--nats-url", default="", help="another bus (default: that of the system here, else HEADRACE_NATS_URL)")
    state.add_argument(parser)


def run(args: argparse.Namespace) -> int:
    if not args.request and not args.follow:
        raise CommandError("which request? Name its id, or use --follow to watch all of them")
    settings = state.bus_settings(args.state_dir, args.nats_url)
    settings.nats_connect_seconds = 3.0
    if args.follow:
        return uvloop.run(_follow(settings, args.request, args.json))
    events = uvloop.run(collect(settings, args.request))
    if not events:
        raise CommandError(
            f"nobody remembers a request {args.request!r}: the id is wrong, or its processes have restarted since"
        )
    print(json.dumps(events, indent=1) if args.json else table(events))
    return 0


async def collect(settings: BusSettings, request: str, instances: list[tuple[str, str]] | None = None) -> list[dict]:
    """Events of `request`, by time, from `instances` (role, instance) or from everybody on the bus."""
    try:
        bus = await Bus.connect(settings, name="headrace-trace")
    except BusError as error:
        raise CommandError(str(error)) from None
    try:
        if instances is None:
            peers = Peers(bus)
            await peers.start()
            await asyncio.sleep(SETTLE)
            instances = [(presence.role, presence.instance) for presence in peers.all()]
            await peers.stop()
        return await gather(bus, instances, request) or await gather(bus, instances, bare(request))
    finally:
        await bus.close()


def bare(request: str) -> str:
    """The server's own name inside the `id` of an answer: `chatcmpl-X` -> `X`."""
    found = ANSWER_ID.fullmatch(request)
    return found[1] if found else request


def rows(events: list[dict]) -> list[Row]:
    """Events by the moment at which they began; times relative to the earliest."""
    if not events:
        return []
    zero = min(e["ts"] * 1000 - e.get("ms", 0.0) for e in events)
    made = [
        Row(
            e["ts"] * 1000 - zero,
            e.get("ms", 0.0),
            e["event"],
            e["instance"],
            {k: v for k, v in e.items() if k not in HIDDEN},
        )
        for e in events
    ]
    return sorted(made, key=lambda row: (row.at, row.at - row.ms))


def table(events: list[dict]) -> str:
    """A timeline for people: when, how long, a bar over the request's whole life, what, and with which values."""
    lines = rows(events)
    total = max((row.at for row in lines), default=0.0) or 1.0
    requests = sorted({event["request"] for event in events})
    width = max(len(row.event) for row in lines)
    out = [
        f"request {', '.join(requests)}: {total:.1f} ms, {len(lines)} events",
        f"{'end ms':>9} {'took ms':>9}  {'':<{BAR}}  event",
    ]
    for row in lines:
        took = f"{row.ms:9.2f}" if row.ms else " " * 9
        data = values(row.data)
        out.append(f"{row.at:9.2f} {took}  {bar(row, total)}  {row.event:<{width}}  {data}".rstrip())
    return "\n".join(out)


def bar(row: Row, total: float) -> str:
    """`   ███·   `: the part of the whole that the event took; a moment is one dot."""
    end = min(BAR - 1, int(row.at / total * BAR))
    begin = min(end, int((row.at - row.ms) / total * BAR))
    mark = "·" if row.ms / total * BAR < 0.5 else "█" * (end - begin + 1)
    return f"{' ' * (end - len(mark) + 1)}{mark}".ljust(BAR)


def values(data: dict) -> str:
    """`rows=128 kind=block`; what is empty is left out."""
    return " ".join(f"{key}={short(value)}" for key, value in data.items() if value not in ("", None))


def short(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


async def _follow(settings: BusSettings, request: str, as_json: bool) -> int:
    """Print trace events as they are published. Ends with Ctrl-C."""
    bus = await Bus.connect(settings, name="headrace-trace")
    began: dict[str, float] = {}  # request -> first seen

    def show(payload: bytes, subject: str, reply: str) -> None:
        event = json.loads(payload)
        wanted = (request, bare(request))
        if request and event["request"] not in began and not {event["request"], event.get("client_id")}.intersection(wanted):
            return
        if len(began) > 10_000:
            began.clear()
        zero = began.setdefault(event["request"], event["ts"])
        if as_json:
            print(payload.decode(), flush=True)
            return
        took = f"{event['ms']:8.2f} ms" if "ms" in event else " " * 11
        data = values({key: value for key, value in event.items() if key not in HIDDEN})
        print(f"{event['request']} {(event['ts'] - zero) * 1000:+9.2f} ms {took}  {event['event']}  {data}", flush=True)

    await bus.subscribe_bytes(subjects.TRACE, show)
    print("watching; Ctrl-C ends it", file=sys.stderr)
    try:
        await asyncio.Event().wait()
    finally:
        await bus.close()
    return 0
