"""What speculative decoding brings: tokens per second by batch size, without drafts, with all drafts verified, and with as many
as the scheduler finds worth it: `headrace bench engine --speculation`.

With `--profile` drafts are accepted by lot: in each block draft i has its own probability, profile[i] give or take the spread,
and the confidence head tells exactly that. All the work is done (draft, verification, sampling); only the decision is replaced.
So throughput for a given quality of drafts can be measured without a trained model. Without it acceptance is the model's own,
in exact mode.

With `--prompts` the three engines serve the same requests, `batch` at a time, and give the same answers (this is checked), so
what differs is the time alone. A run serves each prompt once, and as many more as fill two batches; the first does not count.
Figures are medians of `--repeat` runs, and of the ratio of each run, whose range is given too.

With `--ahead` each step is planned while the one before it runs on its device; without, behind it, so that processor time can
be told apart. The three engines take turns, a few steps each, so that all meet the same machine. Only steps in which the whole
batch decodes count. CPU seconds are those of this process: on a machine with other work they change less than wall time. On a
CPU with one thread the scheduler is given them too, as its clock, so that it does not take another process's work for the cost
of a row.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import api
from .core import EngineCore
from .loader import load_model
from .pipeline import OneThread
from .runner import Runner
from .sampler import choose
from .sequence import Chosen
from .verify import Window

PARTS = ("schedule", "join", "forward", "logits", "sample", "draft", "post")  # of a step, as `EngineCore.stats` has them
SLICE = 8  # steps at a turn
WARM_UP = 24  # steps that do not count: the scheduler learns what drafts are worth here
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"speculative": "dspark", "draft_budget": 1 << 30, "rollback_gate": 1.0},
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

    def accept(self, logits: torch.Tensor, windows: list[Window], told: torch.Tensor | None = None) -> list[list[Chosen]]:
        if not any(window.drafts for window in windows):  # nothing to decide: it must not cost what no engine pays
            self._chances = []
            return super().accept(logits, windows, told)
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
    step: Callable[[], list[api.Event] | None]
    tokens: int = 0
    steps: int = 0
    wall: float = 0.0
    cpu: float = 0.0  # of all threads
    rates: list[float] = field(default_factory=list)  # tokens per CPU second
    parts: dict[str, float] = field(default_factory=dict)  # seconds of PARTS
    over: bool = False


def measure(path: Any, args: argparse.Namespace) -> dict:
    model = load_model(path, numerics=args.numerics, batch_invariant=args.batch_invariant, device=args.device)
    usual = Runner.clock
    if args.device == "cpu" and torch.get_num_threads() == 1:
        Runner.clock = staticmethod(time.process_time)
    measured = serve if args.prompts else ways_of
    try:
        batches = {}
        for size in args.batch:
            print(f"batch {size}: each of {', '.join(WAYS)} in turns", file=sys.stderr)
            batches[str(size)] = measured(model, size, args)
    finally:
        Runner.clock = staticmethod(usual)
    return {
        "model": str(args.model or args.preset), "device": args.device, "threads": torch.get_num_threads(),
        "prompts": str(args.prompts or ""), "calibration": args.calibration,
        "profile": args.profile, "spread": args.spread, "prompt_tokens": args.prompt, "rollback_gate": args.rollback_gate,
        "numerics": args.numerics, "load": round(os.getloadavg()[0], 2), "batch": batches,
    }  # fmt: skip


def ways_of(model, size: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Figures of the three ways at one batch size, in turns."""
    cores = {name: _engine(model, size, args, config) for name, config in WAYS.items()}
    ways = {name: Way(core, OneThread(core).step if args.ahead else core.step) for name, core in cores.items()}
    for way in ways.values():
        _fill(way.core, size, args)
        _turn(way, size, WARM_UP, count=False)
    gc.collect()
    gc.freeze()  # as services do: else each step pays for looking through what the process has loaded
    end = time.monotonic() + args.seconds * len(ways)
    while (time.monotonic() < end or not all(way.rates for way in ways.values())) and not any(w.over for w in ways.values()):
        for way in ways.values():
            _turn(way, size, SLICE)
    if any(not way.rates for way in ways.values()):
        raise RuntimeError(f"batch {size}: no whole turn was made; raise --output ({args.output})")
    return {name: _figures(way) for name, way in ways.items()}


# ---------------------------------------------------------------- the same requests, served by each


def serve(model, size: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Figures of the three ways, each of which serves the same requests."""
    prompts = read_prompts(args.prompts, args.model)
    longest = max(map(len, prompts))
    cores = {name: _engine(model, size, args, config, longest) for name, config in WAYS.items()}
    runs: dict[str, list[Served]] = {name: [] for name in WAYS}
    for number in range(args.repeat + 1):
        todo = _requests(prompts, max(len(prompts), 2 * size), number, args)
        turn = _serve_in_turns(cores, todo)
        if any(one.answers != turn["none"].answers for one in turn.values()):
            raise RuntimeError(f"batch {size}: answers with drafts differ from those without")
        if number:  # the first warms up
            for name, one in turn.items():
                runs[name].append(one)
    ratios = [
        min(none.cpu, full.cpu) / own.cpu for none, full, own in zip(*(runs[name] for name in WAYS), strict=True)
    ]  # fmt: skip
    if args.fit:
        table = cores["full"].speculator.calibration.temperatures()
        Path(args.fit).write_text(json.dumps({"temperatures": table}) + "\n")
    out = {name: _served_figures(cores[name], ones) for name, ones in runs.items()}
    out["scheduled"] |= {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return {name: {key: round(value, 3) for key, value in figures.items()} for name, figures in out.items()}


@dataclass(slots=True)
class Served:
    """What one engine did in one run."""

    answers: dict[str, list[int]] = field(default_factory=dict)
    wall: float = 0.0
    cpu: float = 0.0
    steps: int = 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers.values()))


def read_prompts(file: Any, model: Any) -> list[list[int]]:
    """One prompt a line: a JSON list of token ids, or a JSON string, in which special tokens are what they spell."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    lines = [json.loads(line) for line in Path(file).read_text().splitlines() if line]
    return [tokenizer.encode(line, add_special_tokens=False).ids if isinstance(line, str) else line for line in lines]


def _requests(prompts: list[list[int]], count: int, run: int, args: argparse.Namespace) -> list[api.EngineRequest]:
    out = []
    for i in range(count):
        sampling = api.SamplingParams(temperature=args.temperature, seed=i + 1000 * run, max_tokens=args.output)
        out.append(api.EngineRequest(f"{run}-{i}", prompts[i % len(prompts)], [], sampling))
    return out


def _serve_in_turns(cores: dict[str, EngineCore], todo: list[api.EngineRequest]) -> dict[str, Served]:
    out = {name: Served({request.request: [] for request in todo}) for name in cores}
    for core in cores.values():
        for request in todo:
            core.submit(request)
    while any(core.has_work() for core in cores.values()):
        for name, core in cores.items():
            one, wall, cpu = out[name], time.perf_counter(), time.process_time()
            for _ in range(SLICE):
                if not core.has_work():
                    break
                one.steps += 1
                for event in _events(core.step()):
                    if isinstance(event, api.Tokens):
                        one.answers[event.request] += event.ids
            one.wall, one.cpu = one.wall + time.perf_counter() - wall, one.cpu + time.process_time() - cpu
    return out


def _served_figures(core: EngineCore, runs: list[Served]) -> dict[str, float]:
    out = {
        "tokens_per_second": statistics.median(one.tokens / one.wall for one in runs),
        "tokens_per_cpu_second": statistics.median(one.tokens / one.cpu for one in runs),
        "tokens_per_step": sum(one.tokens for one in runs) / sum(one.steps for one in runs) / core.config.max_num_seqs,
        "steps": sum(one.steps for one in runs),
    }
    return out | _speculation_figures(core)


def _speculation_figures(core: EngineCore) -> dict[str, float]:
    stats, spec = core.stats(), core.speculator
    if spec is None:
        return {}
    return {
        "mean_accepted_length": stats["draft_window_tokens"] / max(stats["draft_windows"], 1),
        "verified_per_step": sum(spec.counts["verified"]) / max(stats["steps"], 1) / core.config.max_num_seqs,
    }


# ---------------------------------------------------------------- engines and steps


def _engine(model, size: int, args: argparse.Namespace, config: dict, prompt: int = 0) -> EngineCore:
    length = max(prompt, args.prompt) + max(args.output, 1024)
    blocks = size * (-(-length // model.spec.block_tokens) + 1)
    rows = max(2048, 8 * size + args.prompt)
    options = api.EngineConfig(
        num_blocks=blocks, max_num_seqs=size, max_num_batched_tokens=rows, prefix_caching=False,
        draft_calibration=args.calibration, **{"rollback_gate": args.rollback_gate} | config,
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
        done += sum(isinstance(event, api.PromptDone) for event in _events(core.step()))


def _turn(way: Way, size: int, steps: int, count: bool = True) -> None:
    """A turn in which a pass was captured does not count: that is done once."""
    captured, before = _captured(way.core), way.core.stats()
    tokens, wall, cpu = 0, time.perf_counter(), time.process_time()
    for _ in range(steps):
        events = [event for event in _events(way.step()) if isinstance(event, api.Tokens)]
        if len(events) < size or any(event.finish for event in events):
            way.over = True
            return
        tokens += sum(len(event.ids) for event in events)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if count and _captured(way.core) == captured:
        after = way.core.stats()
        for part in PARTS:
            way.parts[part] = way.parts.get(part, 0.0) + after[f"seconds_{part}"] - before.get(f"seconds_{part}", 0.0)
        way.tokens, way.steps = way.tokens + tokens, way.steps + steps
        way.wall, way.cpu = way.wall + wall, way.cpu + cpu
        way.rates.append(tokens / cpu)


def _captured(core: EngineCore) -> int:
    """Passes that the model has captured for its device."""
    return len(getattr(core.runner.model, "captured", ()))


def _events(events: list[api.Event] | None) -> list[api.Event]:
    """Of a step. RuntimeError instead of a figure when something failed."""
    for event in events or ():
        if isinstance(event, api.Failed):
            raise RuntimeError(f"{event.request}: {event.message}")
    return events or []


def _figures(way: Way) -> dict[str, float]:
    out = {
        "tokens_per_second": way.tokens / way.wall,
        "tokens_per_cpu_second": statistics.median(way.rates),
        "tokens_per_step": way.tokens / way.steps / way.core.config.max_num_seqs,
        "steps": way.steps,
    }
    out |= {f"{part}_ms": 1e3 * seconds / way.steps for part, seconds in way.parts.items()}
    return {name: round(value, 3) for name, value in (out | _speculation_figures(way.core)).items()}


def table(report: dict) -> str:
    names = ["model", "device", "threads", "profile", "spread", "prompt_tokens", "rollback_gate", "load"]
    if report["prompts"]:
        names[3:6] = ["prompts", "calibration"]
    lines = [", ".join(f"{name} {report[name]}" for name in names)]
    lines.append(
        f"{'batch':>6}{'none':>10}{'full':>10}{'(length)':>10}{'scheduled':>11}{'(length)':>10}{'verified/seq':>14}"
        f"{'scheduled/best':>16}   tokens per CPU second"
    )
    for size, ways in report["batch"].items():
        rate = {name: figures["tokens_per_cpu_second"] for name, figures in ways.items()}
        share = ways["scheduled"].get("ratio", rate["scheduled"] / max(rate["none"], rate["full"]))
        spread = f" ({ways['scheduled']['least']:.3f} to {ways['scheduled']['most']:.3f})" if report["prompts"] else ""
        full, own = ways["full"], ways["scheduled"]
        lines.append(
            f"{size:>6}{rate['none']:>10.0f}{rate['full']:>10.0f}{full['tokens_per_step']:>10.2f}{rate['scheduled']:>11.0f}"
            f"{own['tokens_per_step']:>10.2f}{own['verified_per_step']:>14.2f}{share:>16.3f}{spread}"
            f"   wall tok/s {ways['none']['tokens_per_second']:.0f}, {full['tokens_per_second']:.0f}, "
            f"{own['tokens_per_second']:.0f}"
        )
    return "\n".join(lines)
