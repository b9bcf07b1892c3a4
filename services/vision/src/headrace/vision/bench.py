"""`headrace bench vision`: what images cost those who send none, and what the encoder does by itself.

A whole system (gateway, vision, prefill, decode, NATS as processes) with a random checkpoint whose encoder takes some tenths
of a second an image. Text-only requests run at a fixed pace; in every other round some clients send new images as fast as they
are answered, so that vision never rests. Rounds alternate, so drift of the machine meets both kinds alike.

`--through vision` (default): images are identified and encoded for somebody else's prefill, which is the bench itself: what is
measured is vision beside text. `--through requests`: whole requests with images, whose prompts (some 200 tokens each) take
their turns at the same prefill worker too.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from zlib import crc32

import aiohttp

from headrace.bus import messages as m
from headrace.bus.cores import usable_cores
from headrace.transfer import Links, Memory
from headrace.worker.staging import Staging
from headrace.worker.visionclient import VisionClient

VISION = {  # a small ViT on images of the released size: 1,521 patches at least
    "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 352, "max_image_tokens": 1024,
    "min_pixels": 295936,
}  # fmt: skip
WORDS = ("head", "race", "leads", "water", "wheel", "turns", "while", "tail", "carries", "away", "again", "mill")


def picture(rng: random.Random, side: int = 560) -> str:
    from PIL import Image

    image = Image.frombytes("RGB", (side // 8, side // 8), rng.randbytes(3 * (side // 8) ** 2)).resize((side, side))
    out = io.BytesIO()
    image.save(out, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


class Load:
    """Requests to one gateway."""

    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int) -> None:
        self.session, self.url, self.rng = session, url, random.Random(seed)
        self.images = 0

    async def post(self, content: Any, tokens: int) -> float:
        """Seconds until the whole answer is here."""
        body = {
            "messages": [{"role": "user", "content": content}], "max_tokens": tokens, "ignore_eos": True,
            "thinking": {"type": "disabled"},
        }  # fmt: skip
        began = time.perf_counter()
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as response:
            data = await response.read()
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {data[:300]!r}")
        return time.perf_counter() - began

    async def text(self, seconds: float, pace: float) -> list[float]:
        """Text-only requests, one every `pace` seconds whatever became of the one before."""
        end, running = time.perf_counter() + seconds, []
        while time.perf_counter() < end:
            running.append(asyncio.ensure_future(self.post(" ".join(self.rng.choices(WORDS, k=12)), 8)))
            await asyncio.sleep(pace)
        return list(await asyncio.gather(*running))

    async def image(self, once: bool = False) -> None:
        """New images, for ever."""
        while not (once and self.images):
            url = await asyncio.to_thread(picture, self.rng)
            await self.post([{"type": "image_url", "image_url": {"url": url}}], 1)
            self.images += 1


class Elsewhere:
    """Asks vision as a gateway and a prefill worker of another system would."""

    def __init__(self, cluster: Any, vision: Any, width: int) -> None:
        self.bus, self.vision = cluster.gateway.bus, vision
        self.memory = Memory("bench-elsewhere", cluster.shm_dir, ["shm"])
        self.links = Links(self.memory.incarnation, ["shm"], cluster.shm_dir)
        staging = Staging(self.memory, "images", 64 << 20, lambda sender, grant: None)
        self.client = VisionClient(
            self.bus, "bench-elsewhere", staging, self.memory.address, lambda _: vision, 4 * width, "float32"
        )
        rng = random.Random(1)
        self.files = [base64.b64decode(picture(rng).partition(",")[2]) for _ in range(16)]
        self.images = 0

    async def image(self) -> None:
        """New images, for ever: each under a namespace of its own, so nothing is known of it."""
        while True:
            self.images += 1
            name, namespace = f"bench-{self.images}", self.images.to_bytes(16, "little")
            await self._one(name, namespace, self.files[self.images % len(self.files)])

    async def _one(self, name: str, namespace: bytes, data: bytes) -> None:
        where = self.vision.instance
        room = await self.bus.request(
            "vision", where, "deposit", m.Deposit(name, self.memory.incarnation, "bench-elsewhere", len(data)), 5.0
        )
        if not isinstance(room, m.Deposited):
            return await asyncio.sleep(0.05)
        peer = await self.links.get(room.memory, 5.0)
        await peer.write("intake", [(room.offset, data)], room.generation, time.monotonic() + 5)
        ask = m.Identify(name, 0, namespace, 60.0, grant=room.grant, generation=room.generation, checksum=crc32(data))
        found: Any = m.Working()
        while isinstance(found, m.Working):
            found = await self.bus.request("vision", where, "identify", ask, 5.0)
        if not isinstance(found, m.Identified):
            raise RuntimeError(f"identify: {found}")
        span = m.ImageSpan(0, found.tokens, found.digest)
        await self.client.fetch(where, name, namespace, [span], time.monotonic() + 60)

    async def stop(self) -> None:
        await self.client.stop()
        await self.links.close()
        await self.memory.close()


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def cpu_seconds(session: aiohttp.ClientSession, url: str) -> float:
    """CPU time of a service so far."""
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("process_cpu_seconds_total "))


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    from headrace.engine.make_checkpoint import PRESETS, write_checkpoint
    from headrace.worker.testing import Cluster

    rounds: dict[str, list[list[float]]] = {"quiet": [], "images": []}
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_checkpoint(PRESETS["nano"], 1, Path(folder) / "model", vision=VISION))
        worker = ("--model", model, "--threads", "1", "--num-blocks", "512", "--max-num-seqs", "16")
        async with Cluster() as cluster, aiohttp.ClientSession() as session:
            started = await asyncio.gather(
                cluster.start("decode", *worker, timeout=300),
                cluster.start("prefill", *worker, "--kvstore-wait", "0.05", timeout=300),
                cluster.start("vision", "--model", model, "--threads", "1", "--nice", str(args.nice), timeout=300),
                cluster.start("gateway", "--model", model, "--port", "0", timeout=300),
            )
            vision, url = cluster.find(started[2]).http, cluster.find(started[3]).http
            while (await session.get(f"{url}/ready")).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            load = Load(session, url, args.seed)
            await load.text(2.0, args.pace)
            await load.image(once=True)
            elsewhere = Elsewhere(cluster, cluster.find(started[2]), PRESETS["nano"]["hidden_size"])
            source: Any = elsewhere if args.through == "vision" else load
            busy = took = 0.0
            source.images = 0
            for number in range(2 * args.rounds):
                kind = ("quiet", "images")[number % 2]
                clients = [asyncio.ensure_future(source.image()) for _ in range(args.clients if kind == "images" else 0)]
                if clients:
                    await asyncio.sleep(1.0)  # until the encoder has its hands full
                before, began = await cpu_seconds(session, vision), time.perf_counter()
                rounds[kind].append(await load.text(args.seconds, args.pace))
                if clients:
                    busy, took = busy + await cpu_seconds(session, vision) - before, took + time.perf_counter() - began
                for client in clients:
                    client.cancel()
                failed = [r for r in await asyncio.gather(*clients, return_exceptions=True) if isinstance(r, RuntimeError)]
                if failed:
                    raise failed[0]
                await asyncio.sleep(1.0 if clients else 0.0)
            await elsewhere.stop()
    out: dict[str, Any] = {"cores": usable_cores(), "load_1min": os.getloadavg()[0], "rounds": args.rounds, "nice": args.nice}
    out["through"] = args.through
    for kind, measured in rounds.items():
        every = [value for values in measured for value in values]
        out[kind] = {
            "requests": len(every), "p50_ms": 1e3 * statistics.median(every),
            "p99_ms": 1e3 * quantile(every, 0.99), "p99_ms_of_rounds": [1e3 * quantile(values, 0.99) for values in measured],
        }  # fmt: skip
    pairs = list(zip(out["quiet"]["p99_ms_of_rounds"], out["images"]["p99_ms_of_rounds"], strict=True))
    out["images_done"], out["vision_cores"] = source.images, busy / took if took else 0.0
    out["p50_ratio"] = out["images"]["p50_ms"] / out["quiet"]["p50_ms"]
    out["p99_ratio"] = out["images"]["p99_ms"] / out["quiet"]["p99_ms"]
    out["p99_ratio_median_of_rounds"] = statistics.median(loaded / quiet for quiet, loaded in pairs)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="pairs of a round without and one with images (default: 5)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a round (default: 8)")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds between two text requests (default: 0.1)")
    parser.add_argument("--through", choices=("vision", "requests"), default="vision", help="where images go (default: vision)")
    parser.add_argument("--clients", type=int, default=4, help="that send images (default: 4)")
    parser.add_argument("--nice", type=int, default=10, help="steps that vision stands back (default: 10, as served)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="figures to keep")
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    if args.json:
        return print(json.dumps(found, indent=1))
    print(f"{found['cores']} cores, load {found['load_1min']:.1f}; nice {found['nice']}; images through {found['through']}")
    for kind in ("quiet", "images"):
        row = found[kind]
        print(f"{kind:<8} {row['requests']:>5} text requests   p50 {row['p50_ms']:7.1f} ms   p99 {row['p99_ms']:7.1f} ms")
    print(f"images done {found['images_done']}; vision had {found['vision_cores']:.2f} cores in the rounds with images")
    print(
        f"text latency with images over without: p50 x{found['p50_ratio']:.2f}, p99 x{found['p99_ratio']:.2f} "
        f"(median of rounds x{found['p99_ratio_median_of_rounds']:.2f})"
    )


if __name__ == "__main__":
    main()
