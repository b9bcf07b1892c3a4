"""`python -m headrace.bus.bench`: what a command costs over a real nats-server, through this bus and through plain nats-py.

Two processes on one host: a caller and an answerer. Printed per way: round trip with one command outstanding (p50,
p99), commands a second with 32 outstanding, and the caller's user + system CPU time per command in both. Messages are
decoded and encoded on both sides. The two ways take turns, so a loaded machine is equally unkind to both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import nats
import uvloop

from . import messages as m
from .connection import Bus, BusSettings
from .testing import NatsServer

Call = Callable[[], Awaitable[Any]]
PING = m.Ping("x" * 150)


async def answer(way: str, url: str) -> None:
    """The other process: answers until it is killed."""
    if way == "bus":
        bus = await Bus.connect(BusSettings(nats_url=url))
        await bus.serve("headrace.bench.bus.*", lambda message, subject, reply: bus.respond(reply, m.Done("ok")))
    else:
        client = await nats.connect(url)

        async def callback(msg: Any) -> None:
            m.decode(msg.data)
            await client.publish(msg.reply, m.encode(m.Done("ok")))

        await client.subscribe("headrace.bench.nats-py.ping", cb=callback)
        await client.flush()
    print("ready", flush=True)
    await asyncio.Event().wait()


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def measure(call: Call, count: int) -> dict[str, float]:
    times = []
    for _ in range(count // 10):
        await call()
    used = cpu()
    for _ in range(count):
        started = time.perf_counter()
        await call()
        times.append(time.perf_counter() - started)
    alone = cpu() - used

    async def work() -> None:
        for _ in range(count // 8):
            await call()

    used, started = cpu(), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(32)))
    seconds, busy, many = time.perf_counter() - started, cpu() - used, 32 * (count // 8)
    times.sort()
    return {
        "round_trip_p50_us": times[count // 2] * 1e6, "round_trip_p99_us": times[int(count * 0.99)] * 1e6,
        "cpu_alone_us": alone / count * 1e6, "commands_per_second_32": many / seconds, "cpu_32_us": busy / many * 1e6,
    }  # fmt: skip


async def compare(url: str, count: int, repeat: int) -> dict[str, dict[str, float]]:
    bus = await Bus.connect(BusSettings(nats_url=url))
    client = await nats.connect(url)
    data = m.encode(PING)

    async def plain() -> None:
        m.decode((await client.request("headrace.bench.nats-py.ping", data, timeout=5)).data)

    ways: dict[str, Call] = {"bus": lambda: bus.request("bench", "bus", "ping", PING, 5.0), "nats-py": plain}
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(repeat):
        for way, call in ways.items():
            runs[way].append(await measure(call, count))
    await bus.close()
    await client.close()
    return {way: {k: round(statistics.median(r[k] for r in got), 1) for k in got[0]} for way, got in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answer", nargs=2, metavar=("WAY", "URL"), help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--count", type=int, default=2000, help="commands one at a time, per repetition (2000)")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions; medians are shown (5)")
    args = parser.parse_args()
    if args.answer:
        uvloop.run(answer(*args.answer))
    with NatsServer() as server:
        command = [sys.executable, "-m", "headrace.bus.bench", "--answer"]
        others = [subprocess.Popen([*command, way, server.url], stdout=subprocess.PIPE) for way in ("bus", "nats-py")]
        try:
            for other in others:
                assert other.stdout is not None
                other.stdout.readline()
            result = uvloop.run(compare(server.url, args.count, args.repeat))
        finally:
            for other in others:
                other.kill()
                other.wait()
    if args.json:
        print(json.dumps({"bench": "bus"} | result))
    else:
        for way, got in result.items():
            print(f"{way:8}", ", ".join(f"{name} {value:,.1f}" for name, value in got.items()))


if __name__ == "__main__":
    main()
