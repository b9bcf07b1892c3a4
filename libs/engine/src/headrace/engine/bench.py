"""How fast the engine is, and where a step's time goes: `headrace bench engine --preset nano --json`.

For each batch size: as many cold prompts are computed (no prefix cache), then all of them decode together, greedy. Prefill
counts prompt tokens per second until the last prompt is done; decode counts tokens per second over steps in which every
sequence takes part. Median of `--repeat` runs after one that warms up and does not count. The parts of the forward pass are
timed in a run of their own, for hooks cost time too. `load` is the load average when a batch size began: figures of two runs
can be compared only when both had the cores to themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from . import accuracy, api, bench_grammar, bench_overlap, bench_speculation
from .agreeing import agreeing_checkpoint
from .core import EngineCore
from .loader import load_model
from .make_checkpoint import PRESETS, make_checkpoint

STEP_PARTS = ("schedule", "restore", "forward", "pack", "logits", "sample", "post")  # of one step, in order
FORWARD_PARTS = ("attn", "ffn", "engram")  # modules of a layer; what is left is norms, residual streams and bookkeeping


def main(argv: list[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.grammar:
        report = bench_grammar.measure(bench_grammar.vocabulary(args.model), args.repeat)
        print(json.dumps(report, indent=1) if args.json else bench_grammar.table(report))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        make = agreeing_checkpoint if args.speculation else make_checkpoint
        path = args.model or make(preset=args.preset, seed=args.seed, out=Path(scratch) / args.preset)
        if args.accuracy:
            report, show = accuracy.measure(path, seed=args.seed, batch_invariant=args.batch_invariant), accuracy.table
        elif args.overlap:
            report, show = bench_overlap.measure(path, args), bench_overlap.table
        elif args.speculation:
            report, show = bench_speculation.measure(path, args), bench_speculation.table
        else:
            report, show = measure(path, args), table
    print(json.dumps(report, indent=1) if args.json else show(report))
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--preset", choices=sorted(PRESETS), default="nano", help="a random checkpoint (default nano)")
    source.add_argument("--model", help="a checkpoint directory instead")
    parser.add_argument("--accuracy", action="store_true", help="instead of speed, measure what class `bounded` changes")
    parser.add_argument("--speculation", action="store_true", help="instead, tokens/s with drafts and without (DSpark)")
    parser.add_argument("--overlap", action="store_true", help="instead, the host's work that the model waits for")
    parser.add_argument("--grammar", action="store_true", help="instead, the cost of structured output, without a model")
    parser.add_argument(
        "--profile", type=_shares, default=[], metavar="P,P...",
        help="with --speculation: accept by lot, draft i with this probability if all before it are (default: the model's own)",
    )  # fmt: skip
    parser.add_argument(
        "--prompts", metavar="FILE",
        help="with --speculation and --model: serve these (one JSON string or list of ids a line) by each way",
    )  # fmt: skip
    parser.add_argument(
        "--calibration", default="auto", metavar="FILE",
        help="with --speculation: the draft's temperatures; none: all 1 (default auto: calibration.json of the checkpoint)",
    )  # fmt: skip
    parser.add_argument("--fit", metavar="FILE", help="with --prompts: write temperatures that fit what was served here")
    parser.add_argument("--spread", type=float, default=0.2, help="with --profile: probabilities differ by up to so much")
    parser.add_argument("--seconds", type=float, default=4.0, help="with --speculation: for each way and batch (default 4)")
    parser.add_argument("--ahead", action="store_true", help="with --speculation and without --prompts: plan steps ahead")
    parser.add_argument("--rollback-gate", type=float, default=0.3, help="with --speculation: of the schedule (default 0.3)")
    parser.add_argument("--batch", type=_sizes, default=[1, 8, 32], metavar="N,N...", help="batch sizes (default 1,8,32)")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens (default 128)")
    parser.add_argument("--output", type=int, default=16, help="tokens to generate (default 16)")
    parser.add_argument("--repeat", type=int, default=3, help="runs per batch size; the median counts (default 3)")
    parser.add_argument("--numerics", choices=("bounded", "exact"), default="bounded")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=0, help="torch threads (default: torch's own choice)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of a table")
    return parser


def _sizes(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _shares(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def measure(path: str | Path, args: argparse.Namespace) -> dict:
    model = load_model(path, numerics=args.numerics, batch_invariant=args.batch_invariant, device=args.device)
    rng = np.random.default_rng(args.seed)
    batches = {}
    for size in args.batch:
        load = _load()
        _say(size, "warm-up")
        _run(model, size, args, rng)
        runs = []
        for number in range(args.repeat):
            _say(size, f"run {number + 1} of {args.repeat}")
            runs.append(_run(model, size, args, rng))
        median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        _say(size, "parts of the forward pass")
        parts = _forward_parts(model, size, args, rng)
        batches[str(size)] = _figures(median, size, args) | {"forward_ms": parts, "load": load}
    return {
        "model": str(args.model or args.preset), "numerics": args.numerics, "batch_invariant": args.batch_invariant,
        "device": args.device, "threads": torch.get_num_threads(), "prompt_tokens": args.prompt, "output_tokens": args.output,
        "repeat": args.repeat, "cores": len(os.sched_getaffinity(0)),
        "block_bytes": model.spec.block_bytes, "vocab_size": model.vocab_size, "batch": batches,
    }  # fmt: skip


def _say(size: int, what: str) -> None:
    print(f"batch {size}: {what}", file=sys.stderr)


def _load() -> float:
    """The load average of the last minute, with a warning when it is more than the cores."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores:
        print(f"warning: load average {load:.1f} on {cores} cores: other work makes every time longer", file=sys.stderr)
    return round(load, 2)


def _engine(model, size: int, args: argparse.Namespace) -> EngineCore:
    blocks = size * (-(-(args.prompt + args.output) // model.spec.block_tokens) + 1)
    config = api.EngineConfig(
        num_blocks=blocks, max_num_seqs=size, max_num_batched_tokens=max(2048, size + args.prompt), prefix_caching=False
    )
    return EngineCore(model, config)


def _fill(engine: EngineCore, size: int, args: argparse.Namespace, rng: np.random.Generator) -> None:
    sampling = api.SamplingParams(temperature=args.temperature, max_tokens=args.output, ignore_eos=True)
    for i in range(size):
        ids = rng.integers(3, engine.info.vocab_size, args.prompt).tolist()
        engine.submit(api.EngineRequest(f"r{i}", ids, [], sampling))


def _step(engine: EngineCore) -> list[api.Event]:
    """One step. RuntimeError instead of a figure when something failed."""
    events = engine.step() or []
    for event in events:
        if isinstance(event, api.Failed):
            raise RuntimeError(f"{event.request}: {event.message}")
    return events


def _prefill(engine: EngineCore, size: int) -> None:
    done = 0
    while done < size:
        done += sum(isinstance(event, api.PromptDone) for event in _step(engine))


def _run(model, size: int, args: argparse.Namespace, rng: np.random.Generator) -> dict[str, float]:
    """Seconds, and CPU seconds (a busy machine changes those little): of prefill, of decode steps and their parts; steps."""
    engine = _engine(model, size, args)
    _fill(engine, size, args, rng)
    began, cpu = time.perf_counter(), time.process_time()
    _prefill(engine, size)
    out = {"prefill": time.perf_counter() - began, "prefill_cpu": time.process_time() - cpu}
    out |= {"decode": 0.0, "decode_cpu": 0.0, "steps": 0}
    before = engine.stats()
    while True:
        began, cpu = time.perf_counter(), time.process_time()
        events = _step(engine)
        if sum(isinstance(event, api.Tokens) for event in events) < size:
            return out
        out["decode"] += time.perf_counter() - began
        out["decode_cpu"] += time.process_time() - cpu
        out["steps"] += 1
        after = engine.stats()
        parts = {part: after[f"seconds_{part}"] - before[f"seconds_{part}"] for part in STEP_PARTS}
        out |= parts | {"between": out["decode"] - sum(parts.values())}  # of this run: medians of several don't add up
        if any(isinstance(event, api.Tokens) and event.finish for event in events):
            return out


def _figures(run: dict[str, float], size: int, args: argparse.Namespace) -> dict:
    steps = run["steps"]
    return {
        "prefill_tokens_per_second": round(size * args.prompt / run["prefill"], 1),
        "decode_tokens_per_second": round(size * steps / run["decode"], 1),
        "prefill_cpu_ms_per_token": round(1e3 * run["prefill_cpu"] / (size * args.prompt), 4),
        "decode_step_ms": round(1e3 * run["decode"] / steps, 3),
        "decode_step_cpu_ms": round(1e3 * run["decode_cpu"] / steps, 3),
        "step_ms": {part: round(1e3 * run[part] / steps, 4) for part in (*STEP_PARTS, "between")},
    }


def _forward_parts(model, size: int, args: argparse.Namespace, rng: np.random.Generator) -> dict[str, float]:
    """Milliseconds of a decode step's forward pass in each kind of module, from hooks in a run of its own."""
    seconds, began, hooks = defaultdict(float), {}, []

    def start(module, *_):
        began[id(module)] = time.perf_counter()

    for name, module in getattr(model, "named_modules", tuple)():  # a family without modules has one part
        part = name.rpartition(".")[2]
        if part in FORWARD_PARTS:

            def stop(module, *_, part=part):
                seconds[part] += time.perf_counter() - began[id(module)]

            hooks += [module.register_forward_pre_hook(start), module.register_forward_hook(stop)]
    try:
        engine = _engine(model, size, args)
        _fill(engine, size, args, rng)
        _prefill(engine, size)
        seconds.clear()
        before, steps = engine.stats()["seconds_forward"], min(8, args.output - 2)
        for _ in range(steps):
            _step(engine)
        whole = engine.stats()["seconds_forward"] - before
    finally:
        for hook in hooks:
            hook.remove()
    parts = {part: seconds[part] for part in FORWARD_PARTS if part in seconds}
    parts["other"] = whole - sum(parts.values())
    return {part: round(1e3 * value / steps, 4) for part, value in parts.items()}


def table(report: dict) -> str:
    head = ", ".join(f"{name} {report[name]}" for name in ("model", "numerics", "device", "threads", "prompt_tokens"))
    titles = f"{'batch':>6}{'prefill tok/s':>15}{'decode tok/s':>14}{'step ms':>9}{'CPU ms':>9}   where a decode step goes (ms)"
    lines = [head, titles]
    for size, batch in report["batch"].items():
        parts = ", ".join(f"{name} {value:.2f}" for name, value in batch["step_ms"].items())
        inside = ", ".join(f"{name} {value:.2f}" for name, value in batch["forward_ms"].items())
        figures = f"{batch['prefill_tokens_per_second']:>15.0f}{batch['decode_tokens_per_second']:>14.0f}"
        lines.append(f"{size:>6}{figures}{batch['decode_step_ms']:>9.2f}{batch['decode_step_cpu_ms']:>9.2f}   {parts}")
        lines.append(f"{'':>56}forward: {inside}; load {batch['load']:.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
