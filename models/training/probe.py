"""The first minute on a device: how many tokens a forward pass may hold, and whether compiling pays.

Memory grows linearly with tokens, so two small passes tell it. The result is kept in the run's folder
(`probe-<stage>.json`) and used again, for compiling costs a minute and a wrong size the whole run.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from .runs import Run
from .shards import Shards

SHARE = 0.8  # of the device's memory that may be used


def probe(run: Run, options: argparse.Namespace, shards: Shards) -> dict[str, Any]:
    """Set `options.micro_tokens` and `options.compile`; without a CUDA device nothing is changed."""
    if not torch.cuda.is_available() or not str(options.device).startswith("cuda"):
        return {}
    file = run.folder / f"probe-{options.stage}.json"
    found = json.loads(file.read_text()) if file.exists() else _measure(run, options, shards)
    file.write_text(json.dumps(found, indent=1))
    options.micro_tokens, options.compile = found["micro_tokens"], found["compile"]
    print(f"probe: {json.dumps(found)}", flush=True)
    return found


def fitting(total: float, small: tuple[int, float], large: tuple[int, float], most: int, context: int) -> int:
    """Tokens that fit into SHARE of `total` bytes, from (tokens, peak bytes) of two passes; whole rows, a power of two of them,
    at most `most`."""
    slope = (large[1] - small[1]) / (large[0] - small[0])
    base = small[1] - slope * small[0]
    room = (SHARE * total - base) / max(slope, 1e-9)
    rows = max(1, int(min(room, most) // context))
    return (1 << (rows.bit_length() - 1)) * context


def _measure(run: Run, options: argparse.Namespace, shards: Shards) -> dict[str, Any]:
    from .train import Trainer  # it imports this module

    context = max(shards.rows)
    wanted, compile_ = options.compile, argparse.Namespace(**vars(options) | {"compile": False})
    trainer = Trainer(run, options.stage, shards, compile_)
    peaks = []
    for rows in (2, 4):
        peaks.append((rows * context, _step(trainer, rows * context)[1]))
    total = torch.cuda.get_device_properties(trainer.device).total_memory
    micro = fitting(total, *peaks, options.tokens, context)
    while True:
        try:
            eager = min(_step(trainer, micro)[0] for _ in range(3))
            break
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            if micro <= context:
                raise
            micro //= 2
    found = {"micro_tokens": micro, "compile": False, "bytes": peaks, "eager_tokens_a_second": micro / eager}
    del trainer
    torch.cuda.empty_cache()
    if wanted:
        try:
            found |= _compiled(run, options, shards, micro)
        except Exception as error:  # whatever the compiler meets: eager works
            found["compile_error"] = str(error)[:500]
    found["compile"] = found.get("compiled_tokens_a_second", 0) > 1.1 * found["eager_tokens_a_second"]
    return found


def _compiled(run: Run, options: argparse.Namespace, shards: Shards, micro: int) -> dict[str, Any]:
    from .train import Trainer

    trainer = Trainer(run, options.stage, shards, options)
    begun = time.monotonic()
    _step(trainer, micro)
    took = time.monotonic() - begun
    return {"compile_seconds": took, "compiled_tokens_a_second": micro / min(_step(trainer, micro)[0] for _ in range(3))}


def _step(trainer: Any, tokens: int) -> tuple[float, float]:
    """(seconds, peak bytes) of a forward and backward pass over so many tokens of the longest rows; gradients are dropped."""
    context = max(trainer.shards.rows)
    values = trainer.shards.rows[context]
    rows = [n % len(values["ids"]) for n in range(tokens // context)]
    ids, weights, documents = (
        torch.from_numpy(values[name][rows].astype(kind)).to(trainer.device)
        for name, kind in (("ids", "int64"), ("weights", "float32"), ("documents", "int64"))
    )
    trainer.configure()
    images = trainer._images([]) if trainer.run.config.vision is not None else None
    if images is not None:  # the spans stay, shown as the tokens that they are
        ids = ids.masked_fill(ids == trainer.run.config.image_token_id, 3)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begun = time.monotonic()
    total, _ = trainer.losses(ids, weights / 100, documents, images)
    total.backward()
    torch.cuda.synchronize()
    took = time.monotonic() - begun
    for parameter in trainer.model.parameters():
        parameter.grad = None
    return took, float(torch.cuda.max_memory_allocated())
