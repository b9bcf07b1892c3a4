"""How fast bytes move between two processes: `python -m headrace.transfer.bench [--json]`.

The owner is a child process; this one writes, commits and reads. Every size is written `--repeat` times, each with a commit at
its end, so a time is what a hand-off sees: until the owner could know. `blocks` is the paged case: scattered records.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from headrace.transfer import Memory, Peer, connect

BLOCK_BYTES = 113_920  # one 128-token block record of V4.1
SIZES = (64, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
BLOCKS = (1, 36, 602)  # 602 blocks are a prompt of 77k tokens
GENERATION = 1


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--kinds", default="shm,tcp", help="transports to measure (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=20, help="times per size (default: %(default)s)")
    parser.add_argument("--owner", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        if args.owner:
            runner.run(_own(args.owner))
            return
        rows = runner.run(_measure(args.kinds.split(","), args.repeat))
    if args.json:
        print(json.dumps({"bench": "transfer", "block_bytes": BLOCK_BYTES, "rows": rows}))
        return
    print(f"{'transport':10}{'what':8}{'bytes':>12}{'p50 us':>10}{'p99 us':>10}{'GB/s':>8}")
    for row in rows:
        print("{kind:10}{what:8}{nbytes:>12,}{p50_us:>10.1f}{p99_us:>10.1f}{gb_per_s:>8.2f}".format(**row))


async def _own(shm_dir: str) -> None:
    """The child: owns memory until its standard input closes."""
    memory = Memory("bench-owner", shm_dir=shm_dir)
    nbytes = max(SIZES[-1], 2 * BLOCKS[-1] * BLOCK_BYTES)
    memory.register("kv", nbytes, readable=True)
    memory.register("mailbox", 64)
    await memory.start()
    memory.arm(GENERATION, {"kv": [(0, nbytes)], "mailbox": [(0, 64)]})
    print(memory.address().hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await memory.close()


async def _measure(kinds: list[str], repeat: int) -> list[dict]:
    shm_dir = tempfile.mkdtemp(prefix="headrace-bench-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    owner = subprocess.Popen(  # noqa: ASYNC220 - started before anything is measured
        [sys.executable, "-m", "headrace.transfer.bench", "--owner", shm_dir],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        address = bytes.fromhex(owner.stdout.readline().strip())
        rows = []
        for kind in kinds:
            peer = await connect(address, "bench~-~0", kinds=(kind,))
            for nbytes in SIZES:
                pieces = [(0, nbytes)]
                rows.append(await _row(peer, "write", pieces, repeat))
                rows.append(await _row(peer, "read", pieces, repeat))
            for count in BLOCKS:
                blocks = random.Random(0).sample(range(2 * BLOCKS[-1]), count)
                rows.append(await _row(peer, "blocks", [(block * BLOCK_BYTES, BLOCK_BYTES) for block in blocks], repeat))
            await peer.close()
        return rows
    finally:
        owner.stdin.close()
        owner.wait(10)
        owner.stdout.close()
        shutil.rmtree(shm_dir, ignore_errors=True)


async def _row(peer: Peer, what: str, ranges: list[tuple[int, int]], repeat: int) -> dict:
    total = sum(nbytes for _, nbytes in ranges)
    local = bytearray(os.urandom(1 << 16)) * (total // (1 << 16) + 1)
    views, start = [], 0
    for _, nbytes in ranges:
        views.append(memoryview(local)[start : start + nbytes])
        start += nbytes
    times = []
    for i in range(repeat + 2):
        deadline = time.monotonic() + 60
        started = time.perf_counter()
        if what == "read":
            await peer.read("kv", ranges, deadline=deadline, into=views)
        else:
            await peer.write(
                "kv", [(offset, view) for (offset, _), view in zip(ranges, views, strict=True)], GENERATION, deadline
            )
            await peer.commit("mailbox", 0, i + 1, GENERATION, deadline)
        times.append(time.perf_counter() - started)
    times = sorted(times[2:])  # the first ones map pages and open windows
    p50 = statistics.median(times)
    return {
        "kind": peer.kind,
        "what": what,
        "pieces": len(ranges),
        "nbytes": total,
        "p50_us": round(p50 * 1e6, 1),
        "p99_us": round(times[min(len(times) - 1, int(len(times) * 0.99))] * 1e6, 1),
        "gb_per_s": round(total / p50 / 1e9, 3),
    }


def _loop_factory():
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    main()
