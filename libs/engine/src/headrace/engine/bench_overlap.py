"""What of the host's work the model waits for: `headrace bench engine --overlap`.

The same decode steps twice, in a thread of their own: planned when the step before is over (`waits`), and while it runs
(`ahead`). Runs of the two alternate. A step's `idle` is what passes in the model's thread between two steps, and what it does
there to join a plan to the step before: host time that is not hidden behind the model. Publishing is not in it, for that is
done beside the next step in both. Figures are medians over steps, then over runs: other work on the machine moves them little.

With `--speculation` steps draft and verify as many drafts as the scheduler finds worth it, by step times that are measured once
a batch size; `tokens_per_second` is then the tokens of a mean step over the seconds of a median one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from . import api
from .core import EngineCore
from .loader import load_model
from .pipeline import OneThread, Pipeline
from .speculation import Costs, Options, Speculator, StepCurve
from .stepcurve import measure as measure_steps

WAYS = {"waits": False, "ahead": True}  # name -> EngineConfig.async_scheduling
Step = Callable[[], list[api.Event] | None]
Curves = tuple[dict[int, float], dict[int, float]]


def measure(path: str | Path, args: argparse.Namespace) -> dict:
    model = load_model(path, numerics=args.numerics, batch_invariant=args.batch_invariant, device=args.device)
    batches = {}
    if args.speculation and not getattr(model, "draft_block", 0):
        raise ValueError("--speculation: this checkpoint has no draft")
    for size in args.batch:
        curves = _curves(model, size, args) if args.speculation else None
        runs = {way: [] for way in WAYS}
        for number in range(args.repeat + 1):
            for way in WAYS:
                run = one(model, size, WAYS[way], curves, args)
                if number:  # the first warms up
                    runs[way].append(run)
        batches[str(size)] = {way: _median(some) for way, some in runs.items()}
    shown = ("numerics", "device", "prompt", "output", "repeat")
    return {
        "model": str(args.model or args.preset), "threads": torch.get_num_threads(), "batch": batches,
    } | {name: getattr(args, name) for name in shown}  # fmt: skip


def _median(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}


def _config(model, size: int, ahead: bool, args: argparse.Namespace) -> api.EngineConfig:
    block = model.spec.block_tokens
    return api.EngineConfig(
        num_blocks=size * (-(-(args.prompt + args.output) // block) + 1), max_num_seqs=size, prefix_caching=False,
        max_num_batched_tokens=max(2048, size + args.prompt), async_scheduling=ahead,
    )  # fmt: skip


def _curves(model, size: int, args: argparse.Namespace) -> Curves:
    """Seconds of forward passes and of drafts, by size."""
    config = _config(model, size, False, args)
    return measure_steps(EngineCore(model, config).runner, size, config.max_num_batched_tokens, model.draft_block)


def one(model, size: int, ahead: bool, curves: Curves | None, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a step in which all decode, and of those that the model's thread was idle; tokens per second."""
    core = _filled(model, size, ahead, args)
    if curves:
        core.use(Speculator(Options(model.draft_block, gate=args.rollback_gate, exact=True), Costs(*map(StepCurve, curves))))
    with Pipeline(core) as pipeline:
        _begin(pipeline.step, size)
        del pipeline.waits[:]
        tokens, joins = core.ledger.counters["generated_tokens"], core.stats()["seconds_join"]
        spans = _decode(core, pipeline.step)
        step = statistics.median(spans)
        idle = statistics.median(pipeline.waits) + (core.stats()["seconds_join"] - joins) / len(spans)
    tokens = (core.ledger.counters["generated_tokens"] - tokens) / len(spans)
    return {"step_ms": 1e3 * step, "idle_ms": 1e3 * idle, "idle_percent": 100 * idle / step, "tokens_per_second": tokens / step}


def one_thread(model, size: int, args: argparse.Namespace) -> list[float]:
    """Milliseconds of each step in which all decode, by `pipeline.OneThread`."""
    core = _filled(model, size, True, args)
    steps = OneThread(core)
    _begin(steps.step, size)
    return [1e3 * span for span in _decode(core, steps.step)]


def _filled(model, size: int, ahead: bool, args: argparse.Namespace) -> EngineCore:
    """An engine with `size` requests."""
    rng, core = np.random.default_rng(args.seed), EngineCore(model, _config(model, size, ahead, args))
    params = api.SamplingParams(temperature=args.temperature, max_tokens=args.output, ignore_eos=True)
    for i in range(size):
        ids = rng.integers(3, core.info.vocab_size, args.prompt).tolist()
        core.submit(api.EngineRequest(f"r{i}", ids, [], params))
    return core


def _begin(step: Step, size: int) -> None:
    """Until all decode."""
    begun = 0
    while begun < size:
        begun += sum(isinstance(event, api.PromptDone) for event in step())
    step()


def _decode(core: EngineCore, step: Step) -> list[float]:
    """Seconds of each step until one ends an output."""
    ends = [time.perf_counter()]
    while core.has_work():
        events = step()
        ends.append(time.perf_counter())
        if any(isinstance(event, api.Tokens) and event.finish for event in events):
            break
    return [after - before for before, after in pairwise(ends)]


def table(report: dict) -> str:
    lines = [f"{'batch':>6}{'way':>8}{'step ms':>10}{'idle ms':>10}{'idle %':>8}{'tokens/s':>10}"]
    for size, ways in report["batch"].items():
        for way, run in ways.items():
            idle = f"{run['idle_ms']:>10.4f}{run['idle_percent']:>8.2f}"
            lines.append(f"{size:>6}{way:>8}{run['step_ms']:>10.3f}{idle}{run['tokens_per_second']:>10.0f}")
    return "\n".join(lines)
