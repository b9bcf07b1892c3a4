"""`headrace bench gateway`: what a request costs on its way through the bus, and how long it takes.

Starts NATS and every service as a process of its own, sends streamed chat requests over ordinary connections (no
TCP_QUICKACK), and prints requests and chunks a second, time to first token, time to the end, and user + system CPU time
of each process per request. With `--engine sim` the workers compute nothing, so
what is left is Headrace itself. Warm-up is excluded; every figure is the median of the repetitions.

`--prompts FILE` sends real prompts (a JSON string a line, as text completions) that end when the model ends them, and counts
their tokens. `--answers whole` asks for answers that are not streamed. With several `--tokens` the gateway's CPU time splits
into what a request costs and what each token out of it adds.

`--against NAME=VALUE` starts a second system with that variable in its environment, `--against-tree DIR` one that runs the
code of another checkout (an older commit, `git worktree add DIR COMMIT`). Both serve the same requests in turns, and ratios
(first / second, median of the turns) are printed, which a loaded machine bends little.

CPU time is inflated on a loaded machine, where cores and caches are shared: `loop_ms` is the time of a fixed Python loop
just before a case (a million additions), `load` the load average, so figures of two runs can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import uvloop

from headrace.bus.errors import StartError
from headrace.bus.testing import NatsServer, free_port

TICK = os.sysconf("SC_CLK_TCK")
WORDS = ["alpha", "beta", "gamma", "delta"]
HEAD = b"POST /v1/%s HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
LENGTH = re.compile(rb"\r\ncontent-length: ?(\d+)", re.IGNORECASE)


@dataclass
class Process:
    """One process under measurement."""

    name: str
    pid: int
    popen: subprocess.Popen | None = None

    def cpu(self) -> float:
        """User and system seconds so far: in nanoseconds of its living threads where the kernel counts them, else in ticks,
        which are too coarse for a few hundred requests."""
        root = Path(f"/proc/{self.pid}")
        if (root / "schedstat").exists():
            return sum(int((task / "schedstat").read_text().split()[0]) for task in (root / "task").iterdir()) / 1e9
        fields = (root / "stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICK


@dataclass
class System:
    """NATS and all services on free ports."""

    engine: str
    model: str = ""
    gateways: int = 1
    log: Any = subprocess.DEVNULL
    env: dict[str, str] = field(default_factory=dict)
    port: int = 0
    _shm: str = ""
    processes: list[Process] = field(default_factory=list)

    def start(self) -> None:
        self._nats = NatsServer().start()
        self.processes = [Process("nats", self._nats.process.pid)]  # type: ignore[union-attr]
        self.port = free_port()
        self._shm = tempfile.mkdtemp(prefix="headrace-bench-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        worker = ["--engine", self.engine, *(["--model", self.model] if self.model else [])]
        gateway = [
            "--port",
            str(self.port),
            "--request-seconds",
            "300",
            "--workers",
            str(self.gateways),
            *(["--model", self.model] if self.model else []),
        ]
        for role, flags in (("kvstore", []), ("decode", worker), ("prefill", worker), ("gateway", gateway)):
            if find_spec(f"headrace.{role}.__main__") is not None:
                self._spawn(role, flags)

    def _spawn(self, role: str, flags: list[str]) -> None:
        command = [sys.executable, "-m", f"headrace.{role}", "--nats-url", self._nats.url, "--shm-dir", self._shm, *flags]
        env = os.environ | {"OMP_NUM_THREADS": "1"} | self.env
        popen = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=env)
        self.processes.append(Process(role, popen.pid, popen))

    def wait_ready(self, timeout: float = 300.0) -> None:
        """Until the gateway says that it can serve. StartError names a process that ended."""
        from urllib.error import URLError
        from urllib.request import urlopen

        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for process in self.processes:
                if process.popen is not None and process.popen.poll() is not None:
                    raise StartError(f"{process.name} ended with {process.popen.returncode}; --verbose shows why")
            with contextlib.suppress(URLError, OSError), urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=1.0):
                return
            time.sleep(0.1)
        raise StartError(f"not ready after {timeout:g} s; --verbose shows why")

    def stop(self) -> None:
        """Whatever has started."""
        for process in reversed(self.processes):
            if process.popen is not None:
                process.popen.send_signal(signal.SIGTERM)
        for process in self.processes:
            if process.popen is not None:
                try:
                    process.popen.wait(10)
                except subprocess.TimeoutExpired:
                    process.popen.kill()
        if self.processes:
            self._nats.stop()
        if self._shm:
            shutil.rmtree(self._shm, ignore_errors=True)


class Client(asyncio.Protocol):
    """One connection that serves one request at a time."""

    def __init__(self, whole: bool = False) -> None:
        self._whole = whole  # answers are not streamed
        self.transport: Any = None
        self._done: asyncio.Future[None] | None = None
        self.first = 0.0
        self.chunks = 0
        self.tokens = 0
        self._tail = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        count = data.count(b'"content"') + data.count(b'"text"')
        if count and not self.first:
            self.first = time.perf_counter()
        self.chunks += count
        if self._whole:
            return self._take_whole(data)
        self._tail = (self._tail + data)[-512:]
        if self._tail.endswith(b"0\r\n\r\n") and self._done is not None and not self._done.done():
            if b"data: [DONE]" in self._tail:
                self.tokens += sum(int(found[1]) for found in TOKENS.finditer(self._tail))
                self._done.set_result(None)
            else:
                self._done.set_exception(RuntimeError(f"the stream did not end well: {self._tail!r}"))

    def _take_whole(self, data: bytes) -> None:
        """Of an answer with a length."""
        self._tail += data
        head, _, body = self._tail.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if length is None or len(body) < int(length[1]) or self._done is None or self._done.done():
            return
        if head.startswith(b"HTTP/1.1 200 "):
            self.tokens += sum(int(found[1]) for found in TOKENS.finditer(body))
            self._done.set_result(None)
        else:
            self._done.set_exception(RuntimeError(f"the answer is not well: {self._tail[:512]!r}"))

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"connection lost: {error}"))

    async def request(self, data: bytes) -> tuple[float, float, int]:
        """-> seconds to the first content, seconds to the end, content chunks."""
        self._done = asyncio.get_running_loop().create_future()
        self.first, self.chunks, self._tail = 0.0, 0, b""
        started = time.perf_counter()
        self.transport.write(data)
        await self._done
        ended = time.perf_counter()
        return (self.first or ended) - started, ended - started, self.chunks


def requests(words: int, tokens: int, start: int, extra: dict[str, Any]) -> Iterator[bytes]:
    """Requests with prompts that differ from the first word on; `extra` joins every body."""
    number = start
    text = " ".join(WORDS * (words // 4))
    while True:
        number += 1
        message = {"role": "user", "content": f"{number} {text}"}
        fields = {"messages": [message], "max_tokens": tokens, "stream": True, "ignore_eos": True}
        body = json.dumps(fields | extra).encode()
        yield HEAD % (b"chat/completions", len(body), body)


def completions(prompts: list[str], tokens: int, start: int, extra: dict[str, Any]) -> Iterator[bytes]:
    """Requests for these prompts, in turns, each with a seed of its own."""
    number = start
    while True:
        fields = {"prompt": prompts[number % len(prompts)], "max_tokens": tokens, "stream": True, "seed": number}
        body = json.dumps(fields | {"stream_options": {"include_usage": True}} | extra).encode()
        yield HEAD % (b"completions", len(body), body)
        number += 1


async def drive(
    port: int, concurrency: int, count: int, source: Iterator[bytes], whole: bool = False
) -> tuple[list[tuple[float, float, int]], int]:
    """What each request said of itself, and the tokens of those that told."""
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(lambda: Client(whole), "127.0.0.1", port))[1] for _ in range(concurrency)]
    results: list[tuple[float, float, int]] = []
    left = iter(range(count))

    async def work(client: Client) -> None:
        for _ in left:
            results.append(await client.request(next(source)))

    await asyncio.gather(*map(work, clients))
    for client in clients:
        client.transport.close()
    return results, sum(client.tokens for client in clients)


def calibrate() -> float:
    """Seconds of a fixed piece of Python."""
    started, x = time.perf_counter(), 0
    for i in range(1_000_000):
        x += i * i
    return time.perf_counter() - started


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def measure(system: System, concurrency: int, words: int, args: argparse.Namespace, offset: int) -> dict[str, float]:
    """One repetition of one case."""
    whole = getattr(args, "whole", False)
    extra = getattr(args, "body", {}) | ({"stream": False, "stream_options": None} if whole else {})
    prompts = getattr(args, "texts", [])
    source = completions(prompts, args.tokens, offset, extra) if prompts else requests(words, args.tokens, offset, extra)
    await drive(system.port, concurrency, args.warmup, source, whole)
    await asyncio.sleep(0.2)
    slow = calibrate()
    before = {p.name: p.cpu() for p in system.processes}
    started = time.perf_counter()
    results, tokens = await drive(system.port, concurrency, args.requests, source, whole)
    seconds = time.perf_counter() - started
    cpu = {p.name: (p.cpu() - before[p.name]) / args.requests * 1e3 for p in system.processes}
    ttft, e2e = [r[0] * 1e3 for r in results], [r[1] * 1e3 for r in results]
    return {
        "requests_per_second": args.requests / seconds, "chunks_per_second": sum(r[2] for r in results) / seconds,
        **({"tokens_per_second": tokens / seconds} if tokens else {}),
        "ttft_p50_ms": percentile(ttft, 0.5), "ttft_p99_ms": percentile(ttft, 0.99),
        "e2e_p50_ms": percentile(e2e, 0.5), "e2e_p99_ms": percentile(e2e, 0.99),
        **{f"cpu_{name}_ms": value for name, value in cpu.items()}, "cpu_total_ms": sum(cpu.values()),
        "loop_ms": slow * 1e3, "load": os.getloadavg()[0],
    }  # fmt: skip


async def run(system: System, args: argparse.Namespace, other: System | None = None) -> list[dict[str, Any]]:
    cases, offset = [], 0
    words = [0] if args.texts else args.words
    for answers, count, concurrency, tokens in itertools.product(args.answers, words, args.concurrency, args.tokens):
        knobs = argparse.Namespace(**vars(args) | {"tokens": tokens, "whole": answers == "whole"})
        runs, others = [], []
        for turn in range(args.repeat):
            pair = [(system, runs), *([(other, others)] if other is not None else [])]
            for one, results in pair if turn % 2 == 0 else reversed(pair):
                results.append(await measure(one, concurrency, count, knobs, offset))
            offset += args.requests + args.warmup
        case = {"concurrency": concurrency, "words": count, "tokens": tokens, "requests": args.requests, "answers": answers}
        case |= medians(runs)
        if others:
            case["against"] = medians(others)
            case["ratio"] = medians([ratios(*pair) for pair in zip(runs, others, strict=True)])
        cases.append(case)
    return cases


def per_token(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The gateway's CPU time in microseconds, of cases that differ in tokens out: what each token adds (the line through the
    fewest and the most), and what a request costs without any."""
    found = []
    alike = ("answers", "words", "concurrency")
    for key, group in itertools.groupby(cases, key=lambda case: tuple(case[name] for name in alike)):
        few, *_, many = sorted([*group] * 2, key=lambda case: case["tokens"])
        if few["tokens"] == many["tokens"]:
            continue
        line: dict[str, Any] = dict(zip(alike, key, strict=True))
        for name in ("this", "against") if "against" in few else ("this",):
            low, high = ((case if name == "this" else case["against"])["cpu_gateway_ms"] * 1e3 for case in (few, many))
            each = (high - low) / (many["tokens"] - few["tokens"])
            line[name] = {"token_us": round(each, 2), "request_us": round(low - each * few["tokens"], 1)}
        found.append(line)
    return found


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}


def ratios(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {key: one[key] / other[key] for key in one if other.get(key)}


def show(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        what = f"{case['words']}-word prompts," if case["words"] else "given prompts, at most"
        what = f"{case['answers']} answers, {what}"
        print(f"\nconcurrency {case['concurrency']}, {what} {case['tokens']} tokens out"
              f" (load {case['load']:.1f}, loop {case['loop_ms']:.0f} ms)")  # fmt: skip
        rate = f", {case['tokens_per_second']:.0f} tokens/s" if "tokens_per_second" in case else ""
        print(f"  {case['requests_per_second']:.1f} requests/s, {case['chunks_per_second']:.0f} chunks/s{rate}")
        print(f"  first token p50 {case['ttft_p50_ms']:.2f} ms, p99 {case['ttft_p99_ms']:.2f} ms;"
              f" end p50 {case['e2e_p50_ms']:.2f} ms, p99 {case['e2e_p99_ms']:.2f} ms")  # fmt: skip
        each = ", ".join(f"{k[4:-3]} {v:.3f}" for k, v in case.items() if k.startswith("cpu_") and k != "cpu_total_ms")
        print(f"  CPU ms per request: {each}; all {case['cpu_total_ms']:.3f}")
        if "ratio" in case:
            ratio, what = case["ratio"], "tokens" if "tokens_per_second" in case else "requests"
            name = f"{what}_per_second"
            print(f"  against the other: {ratio[name]:.3f} x its {case['against'][name]:.1f} {what}/s,"
                  f" first token p50 {ratio['ttft_p50_ms']:.3f} x, end p50 {ratio['e2e_p50_ms']:.3f} x,"
                  f" CPU {ratio['cpu_total_ms']:.3f} x")  # fmt: skip
            each = ", ".join(f"{k[4:-3]} {v:.3f} x" for k, v in ratio.items() if k.startswith("cpu_") and k != "cpu_total_ms")
            print(f"  CPU of each against the other: {each}")
    for line in per_token(cases):
        for name, of in (("this", ""), ("against", " of the other")):
            if name in line:
                print(f"\n{line['answers']} answers, {line['words']} words, concurrency {line['concurrency']}:"
                      f" CPU of the gateway{of} {line[name]['request_us']:.0f} us a request"
                      f" and {line[name]['token_us']:.1f} us a token out")  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def kinds(text: str) -> list[str]:
        found = text.split(",")
        if not set(found) <= {"streamed", "whole"}:
            raise ValueError
        return found

    def variable(text: str) -> dict[str, str]:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ValueError
        return {name: value}

    def tree(text: str) -> dict[str, str]:
        sources = sorted(Path(text).resolve().glob("*/*/src"))
        if not sources:
            raise ValueError
        return {"PYTHONPATH": os.pathsep.join(map(str, sources))}

    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--engine", choices=("sim", "v41"), default="sim", help="sim: workers that compute nothing (default)")
    parser.add_argument("--model", default="", help="checkpoint folder (engine v41)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--requests", type=int, default=2000, help="measured requests per repetition (2000)")
    parser.add_argument("--warmup", type=int, default=200, help="requests before each (200)")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions; medians are shown (3)")
    parser.add_argument("--concurrency", type=numbers, default=[1, 32], metavar="N,N", help="requests at a time (1,32)")
    parser.add_argument("--words", type=numbers, default=[8, 1024], metavar="N,N", help="words in a prompt (8,1024)")
    parser.add_argument("--tokens", type=numbers, default=[16], metavar="N,N", help="tokens out (16)")
    parser.add_argument("--answers", type=kinds, default=["streamed"], metavar="KIND,KIND", help="streamed (default), whole")
    parser.add_argument("--gateways", type=int, default=1, help="gateway processes on the port (1)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="send these (a JSON string a line), not words")
    second = parser.add_mutually_exclusive_group()
    second.add_argument("--against", type=variable, metavar="NAME=VALUE", help="a second system, with this in its environment")
    second.add_argument("--against-tree", type=tree, dest="against", metavar="DIR", help="a second system, of another checkout")
    parser.add_argument("--verbose", action="store_true", help="show the logs of the services")
    args = parser.parse_args(argv)
    args.texts = [json.loads(line) for line in args.prompts.read_text().splitlines()] if args.prompts else []
    log = None if args.verbose else subprocess.DEVNULL
    system = System(args.engine, args.model, args.gateways, log)
    other = System(args.engine, args.model, args.gateways, log, args.against) if args.against else None
    systems = [system, *([other] if other else [])]
    try:
        for one in systems:
            one.start()
            one.wait_ready()
        cases = uvloop.run(run(system, args, other))
    except (StartError, ConnectionError, RuntimeError) as error:
        print(f"headrace bench gateway: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        for one in systems:
            one.stop()
    if args.json:
        print(json.dumps({"bench": "gateway", "engine": args.engine, "cases": cases, "per_token": per_token(cases)}))
    else:
        show(cases)


if __name__ == "__main__":
    main()
