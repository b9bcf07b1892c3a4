"""`headrace drill`: faults on purpose, and a table of what came of them.

Knows: which drills there are and their flags. Does not know how any of them works: `rows` has the single faults, `disturbed`
the comparison of thousands of requests, `soak` the hour under load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import uvloop

from headrace.bus import log as logs
from headrace.cli import state
from headrace.cli.console import Console
from headrace.cli.errors import CommandError

EPILOG = """\
What there is:
  {program} drill                          every fault, three rounds each, at a system of its own on free ports
  {program} drill --list                   names of all faults, and what each does
  {program} drill nats-outage kvstore-kill these only; `decode*` all whose names fit
  {program} drill all --running            only faults that need no armed process, at the system that `{program} up` runs
  {program} drill disturbed --requests 2000    requests under random faults, compared token by token with undisturbed runs
  {program} drill soak --minutes 60        load at 70 % of what the system can do, a fault every 10 s: memory, pools, latency

A row is good when every client had its answer or an error object within its deadline, no token was a wrong one, every
process runs again, every pool is whole again, and the same requests go through afterwards. Exit status 0 only if every row is.
Rows that need root or network namespaces are skipped without them, and say so.
"""
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="*", default=["all"], metavar="NAME", help="faults (default: all), `disturbed` or `soak`")
    parser.add_argument("--list", action="store_true", help="name the faults")
    parser.add_argument("--json", action="store_true", help="the result as JSON on stdout, progress on stderr")
    parser.add_argument("--engine", choices=("sim", "v41"), default="sim", help="sim needs no checkpoint (default: sim)")
    parser.add_argument("--model", type=Path, metavar="PATH", help="checkpoint for engine v41 (default: a random `w16`)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="times that each fault is done (default: 3)")
    parser.add_argument("--running", action="store_true", help="at the system that runs here, instead of one of its own")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of requests and random faults (default: 1)")
    parser.add_argument("--requests", type=int, default=2000, metavar="N", help="disturbed: how many (default: 2000)")
    parser.add_argument("--minutes", type=float, default=60.0, metavar="M", help="soak: how long (default: 60)")
    parser.add_argument("--load", type=float, default=0.7, metavar="X", help="soak: share of the capacity (default: 0.7)")
    parser.add_argument("--faults-every", type=float, default=10.0, metavar="S", help="soak: seconds (default: 10)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="soak: where soak.json and soak.svg go (default: nowhere)")
    state.add_argument(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    logs.configure("error", "console")  # lost connections are what this is about
    result, text = uvloop.run(_until_interrupted(_drill(args)))
    if result is None:
        return INTERRUPTED
    print(json.dumps(result, indent=1) if args.json else text)
    return 0 if result.get("ok", True) else 1


def _check(args: argparse.Namespace) -> None:
    for name, low in (("rounds", 1), ("requests", 1), ("minutes", 0.5), ("faults_every", 1.0)):
        if getattr(args, name) < low:
            raise CommandError(f"--{name.replace('_', '-')} is {getattr(args, name):g}; at least {low:g}")
    if not 0 < args.load <= 1.5:
        raise CommandError(f"--load is {args.load:g}; a share of the capacity, as 0.7")
    if args.model and args.engine == "sim":
        raise CommandError("--model needs --engine v41; engine sim computes nothing")
    special = {"soak", "disturbed"} & set(args.what)
    if special and len(args.what) > 1:
        raise CommandError(f"`{special.pop()}` is a drill of its own; name it alone")
    if special and args.running:
        raise CommandError(f"`{special.pop()}` arms fault points, so it needs a system of its own; leave --running out")


async def _drill(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    console = Console()
    if args.what == ["soak"]:
        from headrace.cli.drill import soak, soak_report

        if args.engine != "sim":
            raise CommandError("soak is about processes and memory; it runs with --engine sim only")
        result = await soak.run(console, args.minutes, args.load, args.faults_every, args.seed, args.out)
        return result, soak_report.table(result)
    if args.what == ["disturbed"]:
        from headrace.cli.drill import disturbed

        result = await disturbed.run(console, args.engine, args.model, args.requests, args.seed)
        return result, disturbed.table(result)
    from headrace.cli.drill import rows

    if args.list:
        return {"rows": rows.listed()}, rows.list_text()
    result = await rows.run(console, args.what, args.engine, args.model, args.rounds, args.state_dir if args.running else None)
    return result, rows.table(result)


async def _until_interrupted(work: Any) -> tuple[dict[str, Any] | None, str]:
    """Ctrl-C and SIGTERM take the drill's own system down in order."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return None, ""
