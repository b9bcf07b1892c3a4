"""`headrace up`: a whole system in the foreground until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import signal
import sys
from pathlib import Path
from typing import NoReturn

import uvloop

from headrace.bus.service import leave
from headrace.cli import state
from headrace.cli.checkpoint import PRESETS
from headrace.cli.console import BOLD, Console, paint
from headrace.cli.errors import CommandError
from headrace.cli.program import program
from headrace.cli.system import DEFAULT_PORT, Options, System

EPILOG = """\
A service that dies is named, with what its log says of the reason, and started again. Logs: .headrace/logs/. Settings of
the services: a YAML file (--config) or HEADRACE_* variables; `{program} decode --help` lists them.
"""
INTERRUPTED = 130  # exit status of a command that was interrupted while starting, or once more while it drained


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="checkpoint folder (default: the bundled model of a clone, else a random one, made once)",
    )
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        help="a random checkpoint of this size, whose words mean nothing (default: nano, where no model is bundled)",
    )
    parser.add_argument(
        "--port",
        type=port,
        metavar="N",
        help=f"port of the API; 0: any free one (default: {DEFAULT_PORT}, or a free one)",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address of the API (default: 127.0.0.1, this machine only)",
    )
    parser.add_argument(
        "--gateway-workers",
        type=count,
        default=1,
        metavar="N",
        help="gateway processes that share the port (default: 1)",
    )
    parser.add_argument(
        "--both", action="store_true", help="decode workers compute prompts too, without a hand-off; no prefill worker starts"
    )
    parser.add_argument(
        "--no-drafts", dest="drafts", action="store_false",
        help="decode without the checkpoint's draft (default: with it, where there is one; exact acceptance)",
    )  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="show the logs of all services here too")
    add_size(parser)
    state.add_argument(parser)


def add_size(parser: argparse.ArgumentParser) -> None:
    """Flags that `up` and `demo` share."""
    parser.add_argument(
        "--engine",
        choices=("v41", "sim"),
        default="v41",
        help="v41 computes, checkpoints of every family (V4.1, V4, MLA) and not only of the one that it is named after; "
        "sim only keeps the time and makes words up (default: v41)",
    )
    parser.add_argument("--prefill", type=count, default=1, metavar="N", help="prefill workers (default: 1)")
    parser.add_argument("--decode", type=count, default=1, metavar="N", help="decode workers (default: 1)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings of the services, as YAML")
    parser.add_argument(
        "--drain-seconds",
        type=seconds,
        default=20.0,
        metavar="S",
        help="how long Ctrl-C waits for running requests (default: 20)",
    )


def port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise ValueError
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 86_400:  # also not a number
        raise ValueError
    return value


def count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 64:
        raise ValueError
    return value


def run(args: argparse.Namespace) -> NoReturn:
    options = Options(
        model=args.model,
        preset=args.preset,
        engine=args.engine,
        host=args.host,
        port=args.port,
        prefill=args.prefill,
        decode=args.decode,
        both=args.both,
        drafts=args.drafts,
        gateway_workers=args.gateway_workers,
        drain_seconds=args.drain_seconds,
        config=args.config,
    )
    leave(uvloop.run(_up(options, args.state_dir, args.verbose)))


async def _up(options: Options, where: state.StateDir, verbose: bool) -> int:
    console = Console()
    if options.config and not options.config.is_file():
        raise CommandError(f"there is no settings file {options.config}")
    system = System(options, where, console)
    stop = asyncio.Event()
    interrupts = 0

    def interrupt() -> None:
        nonlocal interrupts
        interrupts += 1
        stop.set()
        if interrupts > 1:
            system.kill()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    follower = asyncio.create_task(_follow(where, console)) if verbose else None
    try:
        if not await _start_unless(system, stop):
            console.say("stopped before it was ready")
            return INTERRUPTED
        print(ready_message(system), flush=True)
        await stop.wait()
        console.say("draining: running requests finish, new ones are refused; Ctrl-C again ends everything at once")
    finally:
        await system.stop()
        if follower:
            follower.cancel()
    if system.killed:
        console.say("everything was ended at once")
        return INTERRUPTED
    console.say("stopped")
    return int(bool(system.amiss))


async def _start_unless(system: System, stop: asyncio.Event) -> bool:
    """Start; False when `stop` was set meanwhile."""
    starting, stopping = asyncio.create_task(system.start()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return False
        await starting
        return True
    finally:
        stopping.cancel()


def ready_message(system: System) -> str:
    """That it works, where, what its words are worth, and two ways to ask it something."""
    words = (
        "its words are random: the checkpoint was never trained" if system.random_words else "checkpoint " + str(system.model)
    )
    if system.bundled:
        words = f"the bundled {system.bundled.name}: a small model to try things with; its README.md says what it can"
    if system.options.engine == "sim":
        words = "SIMULATED: the time is modelled, the words are made up"
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32, "stream": True}
    body["thinking"] = {"type": "disabled"}  # else so short an answer is all reasoning
    curl = f"curl -N {system.url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    ready = paint(f"Headrace is ready: {system.url}", BOLD, sys.stdout)
    chat = ["chat", "Why is the sky blue?"]
    if system.state.path != state.StateDir(state.default_path()).path:
        chat += ["--state-dir", str(system.state.path)]
    return f"{ready}  ({words}). Ctrl-C drains it. In another terminal:\n  {program()} {shlex.join(chat)}\n  {curl}"


async def _follow(where: state.StateDir, console: Console) -> None:
    """Copy what the services log to stderr, each line after its process's name."""
    positions: dict[Path, int] = {}
    while True:
        for log in sorted(where.logs.glob("*.log")):
            with log.open("rb") as file:
                file.seek(positions.get(log, 0))
                data = file.read(1 << 20)
            end = data.rfind(b"\n") + 1
            positions[log] = positions.get(log, 0) + end
            for line in data[:end].decode(errors="replace").splitlines():
                console.show(f"{log.stem:<10} {line}")
        await asyncio.sleep(0.2)
