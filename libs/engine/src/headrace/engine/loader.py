"""From a checkpoint directory to a model that can run, whatever its family.

Knows what is the same for all: the config says the family, the family makes the model (`models/<family>/loader.py`),
the checkpoint's digest becomes part of the layout id. Knows no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from . import models
from .batch import Model
from .checkpoint import Checkpoint
from .config import read_config
from .device import check_device


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Arguments of `load_model` as a family's `load` gets them."""

    kv_store: str
    numerics: str
    batch_invariant: bool
    device: str
    keep_rows: int | None
    dtype: torch.dtype | None


def load_model(
    path: str | Path,
    *,
    kv_store: str = "quantized",
    numerics: str = "bounded",
    batch_invariant: bool = False,
    device: str = "cpu",
    keep_rows: int | None = None,
    dtype: torch.dtype | None = None,
) -> Model:
    """Load a checkpoint of any family that `models` lists.

    kv_store: "quantized" (the family's own records) or "fp32" (parity, no quantisation anywhere); a family may know
    more. numerics: "bounded" or "exact". keep_rows: bounded only, rows of a prompt that decoder layers run on (default
    window + 12). dtype: of weights and activations (None: what the family prefers on this device). Raises ConfigError
    or CheckpointError naming what is wrong, both values where there are two.
    """
    check_device(device)
    config = read_config(path)
    checkpoint = Checkpoint(path)
    options = LoadOptions(kv_store, numerics, batch_invariant, device, keep_rows, dtype)
    model = models.module(config.family, "loader").load(checkpoint, config, options)
    model.checkpoint_digest, model.folder = checkpoint.digest(), Path(path)
    # Weights decide what cached bytes mean, too: with the digest in the layout id no block hash, state or store entry of one
    # checkpoint can answer for another.
    model.spec = replace(model.spec, layout_id=f"{model.spec.layout_id}-{model.checkpoint_digest[:16]}")
    return model
