"""`headrace demo`: the whole system for one minute, and a proof that its cache works.

One streamed chat request with a long prompt, the same again: the texts must be equal, and the second must have computed fewer
prompt rows, because its prefix was found in a cache. Shows both timelines. What the model says does not matter here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import tempfile
import time
from pathlib import Path

import uvloop

from headrace.cli import up
from headrace.cli.chat import Answer, stream
from headrace.cli.console import Console
from headrace.cli.errors import CommandError
from headrace.cli.state import StateDir, default_path
from headrace.cli.system import Options, System
from headrace.cli.trace import collect, rows, table

EPILOG = """\
Exit status 0 only if both texts are equal and the second request computed fewer prompt rows than the first.
"""
MIN_PROMPT_TOKENS = 300
ROLES = ("gateway", "decode", "prefill", "kvstore")  # each must appear in a timeline
REQUEST_BUDGET = 120.0  # seconds for one request
QUESTION = "What does the passage say about the wheel, and why is the gate opened slowly?"
PASSAGE = """\
A head race is the channel that leads water from the river to the wheel. It begins at a weir, where the miller keeps a
gate, and it runs along the foot of the hill with hardly any fall, so that the water arrives high and quiet. In a wet
spring the gate is opened only by a hand's breadth; in a dry August it stands wide open and the miller still waits for
the pond to fill before he lets the stones turn. Nothing is ground in the race itself. All it does is to bring enough
water, at the right height, at the right time, and to bring it smoothly, because a wheel that is hit by a wave shakes
its bearings loose. The wheel hangs below the end of the race. Its buckets fill one after another at the top and empty
at the bottom, and the weight between the two is what turns the shaft. A wheel that is fed too fast spills what it
cannot carry; a wheel that is fed too slowly stops between two turns and has to be started by hand. So the race and
the wheel are built by different people and kept by different rules. The keeper of the race looks at the river and at
the pond; the keeper of the wheel looks at the stones and at the sacks that wait by the door. Between the two there is
one small gate with a notch for every finger of water, and whoever opens it says so first. When the keeper of the
wheel has lowered the stones, he calls, and only then does the keeper of the race lift the gate, slowly, one notch
after the other, until the wheel runs as it should. In the evening the gate is closed from the other side. What is
left in the race is not lost: it stands there over night, and in the morning the first turn of the wheel is made with
the water of the day before.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the result as one JSON object on stdout, progress on stderr")
    parser.add_argument("--max-tokens", type=up.count, default=24, metavar="N", help="tokens of each answer (default: 24)")
    parser.add_argument("--model", type=Path, metavar="PATH", help="checkpoint folder (default: as `up`)")
    up.add_size(parser)


def run(args: argparse.Namespace) -> int:
    options = Options(
        model=args.model,
        engine=args.engine,
        prefill=args.prefill,
        decode=args.decode,
        drafts=False,  # both answers must be equal, to the last bit
        drain_seconds=args.drain_seconds,
        config=args.config,
        port=0,
    )
    return uvloop.run(_demo(options, args.max_tokens, args.json))


async def _demo(options: Options, max_tokens: int, as_json: bool) -> int:
    console = Console()
    interrupts = (signal.SIGINT, signal.SIGTERM)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as folder:
        state = StateDir(folder)
        state.checkpoints = StateDir(default_path()).checkpoints  # made once, kept
        system = System(options, state, console)

        def interrupt() -> None:
            """The first ends the work, any later one what is still running: the stop itself is never cut short."""
            if task.cancelling():
                system.kill()
            else:
                task.cancel()

        for number in interrupts:
            loop.add_signal_handler(number, interrupt)
        try:
            await system.start()
            result = await _two_runs(system, max_tokens, console)
        except asyncio.CancelledError:
            console.say("interrupted")
            return up.INTERRUPTED
        finally:
            for number in interrupts:
                loop.add_signal_handler(number, system.kill)
            await system.stop()
    console.say("everything is stopped")
    print(json.dumps(result, indent=1) if as_json else report(result))
    return 0 if result["ok"] and not system.amiss else 1


async def _two_runs(system: System, max_tokens: int, console: Console) -> dict:
    console.say(f"ready: {system.url}; asking twice")
    runs = []
    for name in ("first", "second"):
        one = await _one_run(system, max_tokens)
        console.say(f"{name} request: {one['prompt_tokens']} prompt tokens, {one['computed_rows']} rows computed")
        runs.append(one)
    return judged(runs, system)


async def _one_run(system: System, max_tokens: int) -> dict:
    body = {
        "messages": [{"role": "user", "content": f"{PASSAGE}\n{QUESTION}"}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "seed": 7,
        "thinking": {"type": "disabled"},
    }
    answer, began, first = Answer(), time.monotonic(), 0.0
    try:
        async with asyncio.timeout(REQUEST_BUDGET):
            async for _ in stream(system.url, body, answer):
                first = first or time.monotonic()
    except TimeoutError:
        raise CommandError(f"no answer within {REQUEST_BUDGET:.0f} s") from None
    total = time.monotonic() - began
    events = await collect(system.nats.settings, answer.request_id)
    return {
        "request_id": answer.request_id,
        "text": answer.reasoning + answer.content,
        "finish_reason": answer.finish_reason,
        "usage": answer.usage,
        "prompt_tokens": answer.usage.get("prompt_tokens", 0),
        "computed_rows": computed_rows(events),
        "ttft_ms": round((first - began) * 1e3, 1),
        "total_ms": round(total * 1e3, 1),
        "timeline": [
            {"end_ms": round(row.at, 2), "ms": row.ms, "event": row.event, "role": row.role, "instance": row.where, **row.data}
            for row in rows(events)
        ],
        "events": events,
    }


def computed_rows(events: list[dict]) -> int:
    """Prompt rows that prefill computed, as its own trace event says; CommandError when no event does."""
    for event in events:
        if event["event"].startswith("prefill.") and "computed_rows" in event:
            return event["computed_rows"]
    raise CommandError("no trace event of prefill says how many rows it computed")


def judged(runs: list[dict], system: System) -> dict:
    """The result with its verdict: what was required, and which of it holds."""
    first, second = runs
    events = [run.pop("events") for run in runs]
    roles = {row["role"] for run in runs for row in run["timeline"]}
    timed = {row["role"] for run in runs for row in run["timeline"] if row["ms"]}
    processes = {child.name: child.pid for child in system.supervisor.children}
    checks = {
        f"prompt has at least {MIN_PROMPT_TOKENS} tokens": first["prompt_tokens"] >= MIN_PROMPT_TOKENS,
        "both texts are equal and not empty": first["text"] == second["text"] != "",
        "the second request computed fewer rows": second["computed_rows"] < first["computed_rows"],
        f"the timelines name {', '.join(ROLES)} with durations": roles >= set(ROLES) and timed >= set(ROLES),
        "NATS and every service were processes of their own": len(set(processes.values())) >= 1 + len(ROLES),
    }
    return {
        "ok": all(checks.values()),
        "checks": checks,
        "engine": system.options.engine,
        "model": str(system.model or system.options.engine),
        "random_words": system.random_words,
        "processes": processes,
        "runs": runs,
        "tables": [table(each) for each in events],
    }


def report(result: dict) -> str:
    """The result for people."""
    lines = []
    for number, (one, timeline) in enumerate(zip(result["runs"], result["tables"], strict=True), 1):
        cached = (one["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        lines += [
            "",
            f"Request {number}: {one['prompt_tokens']} prompt tokens, {one['computed_rows']} rows computed by prefill, "
            f"{cached} cached; first token after {one['ttft_ms']} ms, all {one['usage'].get('completion_tokens')} after "
            f"{one['total_ms']} ms",
            f"  text:  {one['text']!r}",
            f"  usage: {json.dumps(one['usage'])}",
            timeline,
        ]
    words = " The words are random: this checkpoint was never trained." if result["random_words"] else ""
    if result["engine"] == "sim":
        words = " SIMULATED: the time is modelled, the words are made up."
    lines += ["", f"Processes: {', '.join(f'{name} {pid}' for name, pid in result['processes'].items())}.{words}"]
    lines += [f"{'yes' if holds else 'NO '}  {check}" for check, holds in result["checks"].items()]
    return "\n".join(lines)
