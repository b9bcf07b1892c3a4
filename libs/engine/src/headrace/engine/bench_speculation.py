"""What speculative decoding brings: tokens per second by batch size, without drafts, with all drafts verified, and with as many
as the scheduler finds worth it: `headrace bench engine --speculation`.

With `--profile` drafts are accepted by lot: in each block draft i has its own probability, profile[i] give or take the spread,
and the confidence head tells exactly that. All the work is done (draft, verification, sampling); only the decision is replaced.
So throughput for a given quality of drafts can be measured without a trained model. Without it acceptance is the model's own,
in exact mode.

The three engines take turns, a few steps each, so that all meet the same machine. Only steps in which the whole batch decodes
count. CPU seconds are those of this process: on a machine with other work they change less than wall time. On a CPU with one
thread the scheduler is given them too, as its clock, so that it does not take another process's work for the cost of a row.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from . import api
from .core import EngineCore
from .loader import load_model
from .runner import Runner
from .sampler import choose
from .sequence import Chosen
from .verify import Window

SLICE = 8  # steps at a turn
WARM_UP = 24  # steps that do not count: the scheduler learns what drafts are worth here
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"speculative": "dspark", "draft_budget": 1 << 30},
    "scheduled": {"speculative": "dspark", "draft_budget": None},
}


# ---------------------------------------------------------------- acceptance by lot


class LotDraft:
    """A model whose confidence head tells a lot's chances. chances: by slot, of its newest block."""

    def __init__(self, model, profile: list[float], spread: float, seed: int) -> None:
        if len(profile) != model.draft_block or not all(0 <= p <= 1 for p in profile):
            raise ValueError(f"the profile needs {model.draft_block} probabilities, one a draft; got {profile}")
        self._model, self._profile, self._spread = model, np.array(profile), spread
        self._rng = np.random.default_rng((seed, 0))
        self.chances: dict[int, list[float]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def draft(self, slots, anchors, positions, states, choose) -> Any:
        drafts = self._model.draft(slots, anchors, positions, states, choose)
        noise = self._rng.uniform(-self._spread, self._spread, (len(slots), len(self._profile)))
        chances = np.clip(self._profile + noise, 0.01, 0.99)
        self.chances.update(zip(slots, chances.tolist(), strict=True))
        return drafts._replace(confidence_logits=torch.from_numpy(np.log(chances / (1 - chances))))


class LotRunner(Runner):
    """A runner that draws every row's token as always, and then lets a lot say how many drafts stand."""

    def __init__(self, model: LotDraft, *args: Any, seed: int = 0, **options: Any) -> None:
        super().__init__(model, *args, **options)
        self._rng, self._chances = np.random.default_rng((seed, 1)), []

    def _window(self, s, rules) -> Window:
        self._chances.append(self.model.chances.get(s.sequence.slot, []))
        return super()._window(s, rules)

    def accept(self, logits: torch.Tensor, windows: list[Window]) -> list[list[Chosen]]:
        drawn = choose(logits, [draw for window in windows for draw in window.draws], self.model.eos_token_ids)
        out, start = [], 0
        for window, chances in zip(windows, self._chances, strict=True):
            count = len(window.drafts)
            lost = np.flatnonzero(self._rng.random(count) >= np.array(chances[:count]))
            stands = int(lost[0]) if len(lost) else count
            out.append([Chosen(token) for token in (*window.drafts[:stands], drawn[start + stands])])
            start += len(window.draws)
        self._chances = []
        return out


# ---------------------------------------------------------------- measuring


@dataclass(slots=True)
class Way:
    """One engine and what it has done in steps that count. Lists: one value a turn."""

    core: EngineCore
    tokens: int = 0
    steps: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    rates: list[float] = field(default_factory=list)  # tokens per CPU second
    over: bool = False


def measure(path: Any, args: argparse.Namespace) -> dict:
    model = load_model(path, numerics=args.numerics, batch_invariant=args.batch_invariant, device=args.device)
    usual = Runner.clock
    if args.device == "cpu" and torch.get_num_threads() == 1:
        Runner.clock = staticmethod(time.process_time)
    try:
        batches = {str(size): ways_of(model, size, args) for size in args.batch}
    finally:
        Runner.clock = staticmethod(usual)
    return {
        "model": str(args.model or args.preset), "device": args.device, "threads": torch.get_num_threads(),
        "profile": args.profile, "spread": args.spread, "prompt_tokens": args.prompt, "rollback_gate": args.rollback_gate,
        "numerics": args.numerics, "load": round(os.getloadavg()[0], 2), "batch": batches,
    }  # fmt: skip


def ways_of(model, size: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Figures of the three ways at one batch size, in turns."""
    ways = {name: Way(_engine(model, size, args, config)) for name, config in WAYS.items()}
    for way in ways.values():
        _fill(way.core, size, args)
        _turn(way, size, WARM_UP, count=False)
    end = time.monotonic() + args.seconds * len(ways)
    while time.monotonic() < end and not any(way.over for way in ways.values()):
        for way in ways.values():
            _turn(way, size, SLICE)
    if any(not way.rates for way in ways.values()):
        raise RuntimeError(f"batch {size}: no whole turn was made; raise --output ({args.output})")
    return {name: _figures(way) for name, way in ways.items()}


def _engine(model, size: int, args: argparse.Namespace, config: dict) -> EngineCore:
    length = args.prompt + max(args.output, 1024)
    blocks = size * (-(-length // model.spec.block_tokens) + 1)
    rows = max(2048, 8 * size + args.prompt)
    options = api.EngineConfig(
        num_blocks=blocks, max_num_seqs=size, max_num_batched_tokens=rows, prefix_caching=False,
        rollback_gate=args.rollback_gate, **config,
    )  # fmt: skip
    core = EngineCore(model, options)
    if args.profile and config:
        lots = LotDraft(model, args.profile, args.spread, args.seed)
        core.runner = LotRunner(lots, blocks, size, seed=args.seed)
    return core


def _fill(core: EngineCore, size: int, args: argparse.Namespace) -> None:
    rng = np.random.default_rng(args.seed)
    for i in range(size):
        ids = rng.integers(3, core.info.vocab_size, args.prompt).tolist()
        sampling = api.SamplingParams(temperature=args.temperature, seed=i, max_tokens=max(args.output, 1024), ignore_eos=True)
        core.submit(api.EngineRequest(f"r{i}", ids, [], sampling))
    done = 0
    while done < size:
        done += sum(isinstance(event, api.PromptDone) for event in _step(core))


def _turn(way: Way, size: int, steps: int, count: bool = True) -> None:
    tokens, wall, cpu = 0, time.perf_counter(), time.process_time()
    for _ in range(steps):
        events = [event for event in _step(way.core) if isinstance(event, api.Tokens)]
        if len(events) < size or any(event.finish for event in events):
            way.over = True
            return
        tokens += sum(len(event.ids) for event in events)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if count:
        way.tokens, way.steps = way.tokens + tokens, way.steps + steps
        way.wall, way.cpu = way.wall + wall, way.cpu + cpu
        way.rates.append(tokens / cpu)


def _step(core: EngineCore) -> list[api.Event]:
    events = core.step() or []
    for event in events:
        if isinstance(event, api.Failed):
            raise RuntimeError(f"{event.request}: {event.message}")
    return events


def _figures(way: Way) -> dict[str, float]:
    stats, spec = way.core.stats(), way.core.speculator
    out = {
        "tokens_per_second": way.tokens / way.wall,
        "tokens_per_cpu_second": statistics.median(way.rates),
        "tokens_per_step": way.tokens / way.steps / way.core.config.max_num_seqs,
        "steps": way.steps,
    }
    if spec is not None:
        out["mean_accepted_length"] = stats["draft_window_tokens"] / max(stats["draft_windows"], 1)
        out["verified_per_step"] = sum(spec.counts["verified"]) / max(stats["steps"], 1) / way.core.config.max_num_seqs
    return {name: round(value, 3) for name, value in out.items()}


def table(report: dict) -> str:
    names = ("model", "device", "threads", "profile", "spread", "prompt_tokens", "rollback_gate", "load")
    lines = [", ".join(f"{name} {report[name]}" for name in names)]
    lines.append(
        f"{'batch':>6}{'none':>10}{'full':>10}{'(length)':>10}{'scheduled':>11}{'(length)':>10}{'verified/seq':>14}"
        f"{'scheduled/best':>16}   tokens per CPU second"
    )
    for size, ways in report["batch"].items():
        rate = {name: figures["tokens_per_cpu_second"] for name, figures in ways.items()}
        best = max(rate["none"], rate["full"])
        full, own = ways["full"], ways["scheduled"]
        lines.append(
            f"{size:>6}{rate['none']:>10.0f}{rate['full']:>10.0f}{full['tokens_per_step']:>10.2f}{rate['scheduled']:>11.0f}"
            f"{own['tokens_per_step']:>10.2f}{own['verified_per_step']:>14.2f}{rate['scheduled'] / best:>16.2f}"
            f"   wall tok/s {ways['none']['tokens_per_second']:.0f}, {full['tokens_per_second']:.0f}, "
            f"{own['tokens_per_second']:.0f}"
        )
    return "\n".join(lines)
