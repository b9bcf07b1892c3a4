"""What the store costs a worker: `python -m headrace.kvstore.bench [--json]`.

NATS and the store run as processes of their own; this one is a worker that writes blocks through, looks prefixes up
and reads them. `lookup` and `release` are bus round trips, `write` is reserve + copy + commit with checksums
compared, `read` is lookup + copy + checksums + release.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from zlib import crc32

import uvloop

from headrace.bus import Bus, BusSettings, Peers
from headrace.bus import messages as m
from headrace.bus.testing import NatsServer, eventually
from headrace.kv.hashing import ROOT
from headrace.transfer import Links, Memory

BLOCK_BYTES = 113_920
NAMESPACE = bytes(16)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--blocks", type=int, default=602, help="blocks of a prompt (default: %(default)s, 77k tokens)")
    parser.add_argument("--batch", type=int, default=64, help="blocks per write grant (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=20, help="times (default: %(default)s)")
    parser.add_argument("--transport", default="shm", choices=["shm", "tcp"], help="(default: %(default)s)")
    args = parser.parse_args(argv)
    rows = uvloop.run(_measure(args.blocks, args.batch, args.repeat, args.transport))
    if args.json:
        print(json.dumps({"bench": "kvstore", "transport": args.transport, "rows": rows}))
        return
    print(f"{'what':10}{'blocks':>8}{'p50 ms':>10}{'p99 ms':>10}{'GB/s':>8}")
    for row in rows:
        print("{what:10}{blocks:>8}{p50_ms:>10.3f}{p99_ms:>10.3f}{gb_per_s:>8.2f}".format(**row))


async def _measure(blocks: int, batch: int, repeat: int, transport: str) -> list[dict]:
    shm_dir = tempfile.mkdtemp(prefix="headrace-bench-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    capacity = 4 * blocks * BLOCK_BYTES
    with NatsServer() as nats:
        store = subprocess.Popen(  # noqa: ASYNC220 - started before anything is measured
            [sys.executable, "-m", "headrace.kvstore", "--nats-url", nats.url, "--shm-dir", shm_dir, "--log-level", "warning",
             "--capacity-bytes", str(capacity)]
        )  # fmt: skip
        bus = await Bus.connect(BusSettings(nats_url=nats.url), name="bench")
        peers = Peers(bus)
        memory = Memory("bench", shm_dir=shm_dir, kinds=(transport,))
        links = Links(memory.incarnation, (transport,), shm_dir)
        try:
            await peers.start()
            await eventually(lambda: peers.by_role("kvstore"), timeout=30)
            return await _rows(bus, peers.by_role("kvstore")[0].instance, memory, links, blocks, batch, repeat)
        finally:
            await links.close()
            await memory.close()
            await peers.stop()
            await bus.close()
            store.terminate()
            store.wait(20)
            shutil.rmtree(shm_dir, ignore_errors=True)


async def _rows(bus: Bus, store: str, memory: Memory, links: Links, blocks: int, batch: int, repeat: int) -> list[dict]:
    local = memoryview(bytearray(os.urandom(1 << 16)) * (blocks * BLOCK_BYTES // (1 << 16) + 1))
    parts = [local[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] for i in range(blocks)]
    times: dict[str, list[float]] = {"write": [], "lookup": [], "release": [], "read": []}

    async def ask(verb: str, message: m.Message) -> m.Message:
        answer = await bus.request("kvstore", store, verb, message, timeout=10.0)
        if isinstance(answer, m.Refused):
            raise RuntimeError(f"{verb} was refused: {answer.code}: {answer.message}")
        return answer

    async def write(keys: list[bytes], data: list[memoryview], parents: list[bytes]) -> None:
        granted = await ask(
            "reserve",
            m.KvReserve(
                "bench", memory.incarnation, NAMESPACE, b"".join(keys), [len(d) for d in data], parents=b"".join(parents)
            ),
        )
        peer, deadline = await links.get(granted.memory), time.monotonic() + 10
        checksums = await asyncio.to_thread(lambda: [crc32(d) for d in data])
        await peer.write("arena", list(zip(granted.offsets, data, strict=True)), granted.generation, deadline)
        await peer.flush(deadline, granted.generation)
        stored = await ask("commit", m.KvCommit(granted.grant, granted.generation, checksums))
        assert stored.stored == len(keys), stored

    async def read(keys: list[bytes]) -> None:
        started = time.perf_counter()
        found = await ask("lookup", m.KvLookup("bench", NAMESPACE, b"".join(keys), b"".join(keys)))
        looked = time.perf_counter()
        assert len(found.blocks) == len(keys)
        peer = await links.get(found.memory)
        await peer.read("arena", [(b.offset, b.nbytes) for b in found.blocks], deadline=time.monotonic() + 10, into=parts)
        sums = await asyncio.to_thread(lambda: [crc32(part) == b.checksum for part, b in zip(parts, found.blocks, strict=True)])
        copied = time.perf_counter()
        assert all(sums) and (await ask("release", m.KvRelease(found.handle))).valid
        ended = time.perf_counter()
        times["lookup"].append(looked - started)
        times["release"].append(ended - copied)
        times["read"].append(ended - started)

    for turn in range(repeat):
        keys = [turn.to_bytes(8, "big") + i.to_bytes(8, "big") for i in range(blocks)]
        parents = [ROOT, *keys[:-1]]
        for start in range(0, blocks, batch):
            one = slice(start, start + batch)
            started = time.perf_counter()
            await write(keys[one], parts[one], parents[one])
            times["write"].append(time.perf_counter() - started)
        await read(keys)
    sizes = {"write": min(batch, blocks), "lookup": 0, "release": 0, "read": blocks}
    return [_row(what, times[what], size, blocks) for what, size in sizes.items()]


def _row(what: str, times: list[float], copied: int, blocks: int) -> dict:
    times = sorted(times)
    p50 = statistics.median(times)
    return {
        "what": what,
        "blocks": copied or blocks,
        "p50_ms": round(p50 * 1e3, 3),
        "p99_ms": round(times[min(len(times) - 1, int(len(times) * 0.99))] * 1e3, 3),
        "gb_per_s": round(copied * BLOCK_BYTES / p50 / 1e9, 3),
    }


if __name__ == "__main__":
    main()
