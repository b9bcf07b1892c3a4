"""`measure`: what can be said about a checkpoint without a server, written beside its weights as `measured.json`.

losses       nats a token on held-out slots, by kind
export       KL of the stored weights' predictions from those of the unrounded ones (needs --run): on held-out samples in the
             shares of the anneal stage, and by kind; and what the unrounded ones' losses are
classes      `bounded` against `exact`: logit error, and the share of greedy answers that differ
draft        how many drafts greedy decoding accepts, per kind; the confidence head's calibration, before and after a table of
             temperatures that is fitted on one half and judged on the other (`calibration.json`)
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from headrace.engine import LLM, SamplingParams
from headrace.engine.loader import load_model
from headrace.engine.models.v41.training import TrainingModel
from headrace.recipe import Tokenizer

from . import mix
from .runs import Run
from .sample import PROMPT_WEIGHT, Renderer, Sample

KINDS = ("story_chat", "three_digits", "tool_simple", "small_talk", "why", "table", "books")  # books: free prose
BINS = 10
LONGEST = 1024  # tokens of a sequence that is looked at


def sequence(renderer: Renderer, sample: Sample) -> tuple[torch.Tensor, int]:
    """(ids [1, T], where the target begins) of a sample."""
    ids, weights = renderer.ids(sample)
    return torch.tensor([list(ids)[:LONGEST]]), next(i for i, w in enumerate(weights) if w > PROMPT_WEIGHT + 1e-3)


def sequences(renderer: Renderer, kind: str, count: int) -> list[tuple[torch.Tensor, int]]:
    """Held-out ones of a kind."""
    return [sequence(renderer, mix.draw(kind, "measure", number, held_out=True)) for number in range(count)]


def mixed(renderer: Renderer, tokens: int) -> list[tuple[torch.Tensor, int]]:
    """About so many held-out tokens in the shares of the anneal stage, every kind once at least; texts only. What does not fit
    into LONGEST counts with its beginning."""
    found = []
    for kind, share in mix.available(mix.ANNEAL).items():
        number, said = 0, 0
        while said < tokens * share and number < 1000:
            sample = mix.draw(kind, "mixed", number, held_out=True)
            number += 1
            if sample.pictures:
                break
            found.append(sequence(renderer, sample))
            said += found[-1][0].shape[1]
    return found


@torch.no_grad()
def mean_loss(model: TrainingModel, data: list[tuple[torch.Tensor, int]]) -> float:
    """Nats a target token."""
    total, count = 0.0, 0
    for ids, start in data:
        logits = model(ids).logits[0, max(start, 1) - 1 : -1]
        total += F.cross_entropy(logits, ids[0, max(start, 1) :], reduction="sum").item()
        count += logits.shape[0]
    return total / count


@torch.no_grad()
def divergence(one: TrainingModel, two: TrainingModel, data: list[tuple[torch.Tensor, int]]) -> tuple[float, float]:
    """KL(one || two) in nats a token, and the share of positions where both choose the same token."""
    total, same, count = 0.0, 0, 0
    for ids, _ in data:
        p, q = (torch.log_softmax(m(ids).logits[0], -1) for m in (one, two))
        total += (p.exp() * (p - q)).sum().item()
        same += (p.argmax(-1) == q.argmax(-1)).sum().item()
        count += ids.shape[1]
    return total / count, same / count


# ------------------------------------------------------------------ numerics classes


@torch.no_grad()
def classes(path: Path, model: TrainingModel, renderer: Renderer, count: int) -> dict[str, float]:
    """Bounded against exact on prompts with far context."""
    prompts = [list(renderer.prompt_ids(mix.draw("short_needle", "classes", n, held_out=True))) for n in range(count)]
    rows = load_model(path, numerics="bounded").spec.keep_rows
    errors = []
    for ids in prompts:
        tensor = torch.tensor([ids])
        exact = model(tensor).logits[0, -1]
        bounded = model(tensor, decoder_floor=torch.tensor([max(0, len(ids) - rows)])).logits[0, -1]
        errors.append(((exact - bounded).abs().max() / exact.abs().max()).item())
    params = SamplingParams(temperature=0.0, max_tokens=24)
    answers = [[a.choices[0].ids for a in LLM(path, numerics=n).generate(prompts, params)] for n in ("exact", "bounded")]
    changed = sum(a != b for a, b in zip(*answers, strict=True))
    return {"bounded_logit_error_median": float(torch.tensor(errors).median()), "bounded_changed_answers": changed / count}


# ------------------------------------------------------------------ draft


@torch.no_grad()
def drafts(llm: LLM, model: TrainingModel, renderer: Renderer, kind: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(accepted bool [A, block], confidence logits [A, block]) at every third token of greedy answers."""
    samples = [mix.draw(kind, "draft", n, held_out=True) for n in range(count)]
    prompts = [
        list(renderer.prompt_ids(s)) if s.conversation else list(renderer.ids(s)[0][:96]) for s in samples
    ]  # fmt: skip
    answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=96))
    block, hits, logits = model.config.dspark_block_size, [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + list(answer.choices[0].ids)])
        anchors = torch.tensor([range(len(prompt), ids.shape[1] - block, 3)])
        if not anchors.numel():  # a short answer has no whole block
            continue
        out = model(ids, extras=("taps",))
        drafted = model.draft(ids, out.taps, anchors)
        hits.append(drafted.logits.argmax(-1) == drafted.tokens)
        logits.append(drafted.confidence_logits)
    if not hits:
        return torch.zeros(0, block, dtype=torch.bool), torch.zeros(0, block)
    return torch.cat(hits), torch.cat(logits)


def calibration_error(probability: torch.Tensor, hit: torch.Tensor) -> float:
    """Expected calibration error over equal bins."""
    bins = (probability * BINS).long().clamp_max(BINS - 1)
    error = 0.0
    for b in range(BINS):
        here = bins == b
        if here.any():
            error += here.float().mean().item() * abs(probability[here].mean().item() - hit[here].float().mean().item())
    return error


def conditional(hits: torch.Tensor, place: int) -> torch.Tensor:
    """Which blocks reach a place: all drafts before it were accepted."""
    return hits[:, :place].all(1)


def temperatures(hits: torch.Tensor, logits: torch.Tensor) -> list[float]:
    """One temperature a place that minimises the log loss of the confidence."""
    grid = torch.exp(torch.linspace(math.log(0.25), math.log(8.0), 80))
    best = []
    for place in range(hits.shape[1]):
        reached = conditional(hits, place)
        if reached.sum() < 20:
            best.append(best[-1] if best else 1.0)
            continue
        x, y = logits[reached, place], hits[reached, place].float()
        losses = torch.stack([F.binary_cross_entropy_with_logits(x / t, y) for t in grid])
        best.append(round(float(grid[losses.argmin()]), 4))
    return best


def draft_numbers(by_kind: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> tuple[dict[str, float], list[float]]:
    """What the draft achieves, and the calibration table."""
    by_kind = {kind: pair for kind, pair in by_kind.items() if len(pair[0])}
    numbers = {f"draft_accepted_{k}": hits.float().cumprod(1).sum(1).mean().item() for k, (hits, _) in by_kind.items()}
    hits, logits = (torch.cat([pair[i] for pair in by_kind.values()]) for i in (0, 1))
    order = torch.randperm(len(hits), generator=torch.Generator().manual_seed(0))
    fit, judge = order[::2], order[1::2]
    table = temperatures(hits[fit], logits[fit])
    for name, scale in (("before", [1.0] * len(table)), ("after", table)):
        probability, hit = [], []
        for place, t in enumerate(scale):
            reached = conditional(hits[judge], place)
            probability.append(torch.sigmoid(logits[judge][reached, place] / t))
            hit.append(hits[judge][reached, place])
        numbers[f"confidence_error_{name}_the_table"] = calibration_error(torch.cat(probability), torch.cat(hit))
    return numbers, table


# ------------------------------------------------------------------ command


def measure(path: Path, run: Run | None, count: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Everything above for one checkpoint."""
    renderer = Renderer(Tokenizer.from_file(path / "tokenizer.json"))
    model = TrainingModel.of(load_model(path))
    numbers: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "sequences_of_each_kind": count}
    data = {kind: sequences(renderer, kind, count) for kind in kinds}
    for kind, pairs in data.items():
        numbers[f"loss_{kind}"] = mean_loss(model, pairs)
    if run is not None:
        plain = run.model()
        plain.load_state_dict(run.newest()[1]["model"])
        numbers["export_kl"], numbers["export_same_token"] = divergence(plain, model, mixed(renderer, LONGEST * count))
        for kind, pairs in data.items():
            numbers[f"export_kl_{kind}"] = divergence(plain, model, pairs)[0]
            numbers[f"loss_unrounded_{kind}"] = mean_loss(plain, pairs)
    numbers |= classes(path, model, renderer, count)
    if model.config.num_nextn_predict_layers:
        llm = LLM(path)
        drafted, table = draft_numbers({kind: drafts(llm, model, renderer, kind, count) for kind in kinds})
        numbers |= drafted
        (path / "calibration.json").write_text(json.dumps({"temperatures": table}))
    return numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--run", type=Path, help="the run it was exported from, for the export's KL")
    parser.add_argument("--count", type=int, default=50, help="sequences of each kind (default: 50)")
    parser.add_argument("--kinds", nargs="+", help=f"default: {' '.join(KINDS)}, as far as their texts are here")
    parser.add_argument("--threads", type=int, help="CPU threads")


def main(args: argparse.Namespace) -> None:
    """Measure a checkpoint offline: losses, KL of the export, numerics classes, draft and its calibration."""
    if args.threads:
        torch.set_num_threads(args.threads)
    kinds = args.kinds or mix.available(dict.fromkeys(KINDS, 1.0))
    numbers = measure(args.checkpoint, Run(args.run) if args.run else None, args.count, tuple(kinds))
    (args.checkpoint / "measured.json").write_text(json.dumps(numbers, indent=1))
    for name, value in numbers.items():
        print(f"{name:40} {value:.4g}")
