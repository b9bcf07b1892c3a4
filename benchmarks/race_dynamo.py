"""Race the control plane against NVIDIA Dynamo's frontend: the same client, the same run, repetitions in turn.

    python benchmarks/race_dynamo.py PEERS [--repeat 3] [--json]

PEERS holds `dynamo/` (a venv, see below) and `ckpt/v3` (any small checkpoint with a tokenizer, for Dynamo's tokenising).
Both sides compute nothing: Headrace runs `--engine sim`, Dynamo two mock engines with its KV router on the TCP plane.
Prints, for each case and side, rates, latencies and CPU per request of every process, then the ratio of the medians
(Headrace over Dynamo; below 1 is better for times and CPU). An ordinary client: no TCP_QUICKACK.

    python3 -m venv PEERS/dynamo
    PEERS/dynamo/bin/pip install aiohttp msgspec prometheus-client pyzmq tqdm zstandard pydantic uvloop 'redis<9' \\
        transformers ai-dynamo-runtime==1.6.1
    PEERS/dynamo/bin/pip install --no-deps ai-dynamo==1.6.1
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import uvloop

from headrace.bus.testing import free_port
from headrace.gateway import bench

CASES = ((1, 8, 300), (32, 8, 2000), (32, 1024, 600))  # concurrency, words, requests


class Dynamo:
    """Frontend and mock engines as processes; the face that `bench.measure` wants: `port`, `processes`."""

    body = {"model": "mock"}

    def __init__(self, peers: Path) -> None:
        self.port, self._dir = free_port(), tempfile.mkdtemp(prefix="race-")
        python = peers / "dynamo/bin/python"
        plane = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
        env = os.environ | {"HF_HUB_OFFLINE": "1", "DYN_FILE_KV": f"{self._dir}/kv", "DYN_LOG": "error"}
        frontend = ["dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(self.port), *plane, "--router-mode", "kv"]
        mocker = ["dynamo.mocker", "--model-path", str(peers / "ckpt/v3"), "--model-name", "mock", *plane, "--num-workers", "2"]
        mocker += ["--speedup-ratio", "100000", "--max-model-len", "8192"]
        self.processes = []
        for name, command in (("frontend", frontend), ("engines", mocker)):
            log = open(f"{self._dir}/{name}.log", "w")  # noqa: SIM115
            popen = subprocess.Popen([str(python), "-m", *command], stdout=log, stderr=log, env=env)
            self.processes.append(bench.Process(name, popen.pid, popen))

    def wait_ready(self, timeout: float = 120.0) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=1) as reply:
                    if b"mock" in reply.read():
                        return
            except OSError:
                pass
            time.sleep(0.5)
        raise SystemExit(f"Dynamo is not ready after {timeout:g} s; its logs are in {self._dir}")

    def stop(self) -> None:
        for process in self.processes:
            process.popen.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.popen.wait(10)
            except subprocess.TimeoutExpired:
                process.popen.kill()


def middle(runs: list[dict[str, float]]) -> dict[str, float]:
    """Median of each figure."""
    return {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", type=Path, help="folder with dynamo/ and ckpt/v3")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of each case and side (3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    ours, theirs = bench.System("sim"), Dynamo(args.peers)
    ours.start()
    rows, offset = [], 0
    try:
        ours.wait_ready()
        theirs.wait_ready()
        for concurrency, words, count in CASES:
            runs: dict[str, list[dict[str, float]]] = {"headrace": [], "dynamo": []}
            for _ in range(args.repeat):
                for name, system in (("headrace", ours), ("dynamo", theirs)):
                    knobs = argparse.Namespace(requests=count, warmup=100, tokens=16, body=getattr(system, "body", {}))
                    runs[name].append(uvloop.run(bench.measure(system, concurrency, words, knobs, offset)))
                    offset += count + 100
            medians = {name: middle(side) for name, side in runs.items()}
            shared = [key for key in medians["headrace"] if key in medians["dynamo"] and medians["dynamo"][key]]
            ratio = {key: round(medians["headrace"][key] / medians["dynamo"][key], 3) for key in shared}
            rows.append({"concurrency": concurrency, "words": words, "requests": count, **medians, "ratio": ratio})
            if not args.json:
                print(f"\nconcurrency {concurrency}, {words}-word prompts, 16 tokens out, {count} requests x {args.repeat}")
                for name in ("headrace", "dynamo", "ratio"):
                    print(f"  {name:9}", json.dumps(rows[-1][name]))
    finally:
        ours.stop()
        theirs.stop()
    if args.json:
        print(json.dumps({"race": "dynamo 1.6.1", "cases": rows}))


if __name__ == "__main__":
    main()
