"""`probe`: what a model in training can do already, in seconds: of held-out samples, the share of answers whose every token is
the likeliest one when the right tokens before it are given.

That is what greedy decoding would say, except behind a first mistake. An answer is a run of tokens that count fully in the
loss; a sample of `bindings` has several. Knows samples and logits; does not serve anything (`evaluate` does).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.engine.models.v41.config import ModelConfig
from headrace.engine.models.v41.training import Parts, TrainingModel
from headrace.recipe import Tokenizer

from . import evaluate
from .rounding import Rounded
from .runs import Run, dense_config
from .sample import Renderer
from .shards import Packer, decoded, pictures_of

KINDS = ("who_has", "short_needle", "needle_1500", "needle_alike", "bindings", "three_digits", "tool", "picture")
CONTEXT = 2048
TOKENS = 16384  # of one forward pass


def rows(tokenizer: Path, kinds: Sequence[str], count: int) -> dict[str, dict[str, np.ndarray]]:
    """Held-out samples of each kind, packed as training packs them; without kinds whose samples are all too long."""
    renderer, found = Renderer(Tokenizer.from_file(tokenizer)), {}
    for kind in kinds:
        packer = Packer([CONTEXT])
        for number in range(count):
            sample = evaluate.draw(kind, "probe", number)
            packer.add(*renderer.ids(sample), sample.pictures)
        if (arrays := packer.arrays().get(CONTEXT)) is not None:
            found[kind] = arrays
    return found


def answers(weights: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Numbers of answers from 1, 0 elsewhere, [B, T]: runs of full weight within a document."""
    full = weights >= 100
    begins = full.copy()
    begins[:, 1:] &= ~(full[:, :-1] & (documents[:, 1:] == documents[:, :-1]))
    return np.where(full, np.cumsum(begins.ravel()).reshape(full.shape), 0)


@torch.no_grad()
def share(model: TrainingModel, arrays: dict[str, np.ndarray], device: torch.device) -> tuple[float, int]:
    """(share of answers that are right in every token, answers)."""
    numbers = answers(arrays["weights"], arrays["documents"])
    wrong, pictures = set(), pictures_of([arrays])
    width = min(CONTEXT, -(-(int(np.flatnonzero(arrays["weights"].any(0))[-1]) + 1) // 128) * 128)  # no more padding than that
    step = max(1, TOKENS // CONTEXT)
    for at in range(0, len(numbers), step):
        parts = (arrays[name][at : at + step, :width].astype(np.int64) for name in ("ids", "documents"))
        ids, documents = (torch.from_numpy(part).to(device) for part in parts)
        images = [image for row in range(at, min(at + step, len(numbers))) for image in decoded(pictures.get(row, ()))]
        seen = torch.from_numpy(np.stack(images)).to(device) if images else None
        best = model(ids, documents=documents, images=seen).logits[:, :-1].argmax(-1)
        missed = (best != ids[:, 1:]).cpu().numpy()
        wrong |= set(np.unique(numbers[at : at + step, 1:width][missed]).tolist())
    every = int(numbers.max())
    return 1 - len(wrong - {0}) / max(1, every), every


@contextmanager
def plain(model: TrainingModel, config: ModelConfig) -> Iterable[None]:
    """The model uncompiled, for shapes that come once, with this config."""
    kept = model.parts, model.config
    model.parts, model.config = Parts(), config
    try:
        yield
    finally:
        model.parts, model.config = kept


@dataclass(slots=True)
class Probe:
    """Samples that another process draws meanwhile, and the line that says what a model makes of them."""

    made: Future | dict

    @classmethod
    def begin(cls, tokenizer: Path, kinds: Sequence[str], count: int) -> Probe:
        pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        probe = cls(pool.submit(rows, tokenizer, tuple(kinds), count))
        pool.shutdown(wait=False)
        return probe

    def __call__(self, model: TrainingModel, config: ModelConfig, device: torch.device) -> dict[str, float]:
        """Share by kind with this config's attention."""
        if isinstance(self.made, Future):
            self.made = self.made.result()
        with plain(model, config):
            return {kind: share(model, arrays, device)[0] for kind, arrays in self.made.items()}


def line(name: str, shares: dict[str, float]) -> str:
    return f"probe {name}: " + ", ".join(f"{kind} {value:.1%}" for kind, value in shares.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), help=f"default: {' '.join(KINDS)}")
    parser.add_argument("--count", type=int, default=100, help="samples of each kind (default: 100)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dense", action="store_true", help="attention to every entry, not to selected ones")
    parser.add_argument("--bf16", action="store_true", help="activations in bfloat16")


def main(args: argparse.Namespace) -> None:
    """Share of held-out answers whose every token is the likeliest, of a run's newest weights as they will be stored."""
    run, device = Run(args.run), torch.device(args.device)
    newest = run.newest()
    if newest is None:
        raise ValueError(f"{run.folder} has no weights yet; train a stage first")
    model = run.model(dtype=torch.bfloat16 if args.bf16 else torch.float32).to(device)
    model.load_state_dict(newest[1]["model"])
    config: Any = dense_config(run.config) if args.dense else run.config
    with Rounded(model)(), plain(model, config):
        for kind, arrays in rows(run.tokenizer, args.kinds, args.count).items():
            right, count = share(model, arrays, device)
            low, high = evaluate.wilson(round(right * count), count)
            print(f"{kind:16} {right:7.1%}  {low:.1%} to {high:.1%}  n {count}", flush=True)


__all__ = ["KINDS", "Probe", "answers", "line", "main", "rows", "share"]
