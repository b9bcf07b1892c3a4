"""From a checkpoint to an image encoder: the tensors under `vision.`, `aligner.` and `image_`, and nothing else of it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ...checkpoint import Checkpoint, CheckpointError
from ...config import ConfigError, read_config
from ..v41.schema import vision_schema
from .encoder import ImageEncoder


def load_encoder(path: str | Path, *, device: str = "cpu", dtype: torch.dtype | None = None) -> ImageEncoder:
    """`dtype`: of weights and activations; None: fp32 on a CPU, BF16 elsewhere. Raises ConfigError (no vision_config, or one
    that contradicts itself) and CheckpointError, naming what is wrong."""
    config = read_config(path)
    vision = getattr(config, "vision", None)
    if vision is None:
        raise ConfigError(f"{path} has no vision_config: this checkpoint reads text only and needs no vision service")
    checkpoint = Checkpoint(path)
    schema = vision_schema(vision, config.hidden_size)
    expected = {
        name: (dtypes, shape)
        for tensor, spec in schema.items()
        for name, dtypes, shape in spec.stored(tensor, config.quantized)
    }
    checkpoint.check(expected, ignored=lambda _: True)
    target = torch.device(device)
    dtype = dtype or (torch.float32 if target.type == "cpu" else torch.bfloat16)
    with torch.device("meta"):
        encoder = ImageEncoder(vision, config.hidden_size)
    for name in schema:
        value = checkpoint.tensor(name).to(device=target, dtype=dtype, copy=True)
        if not value.isfinite().all():
            raise CheckpointError(f"{checkpoint.path}: {name} holds values that are not finite; the file is damaged")
        owner = encoder.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], nn.Parameter(value, requires_grad=False))
    left = [name for name, parameter in encoder.named_parameters() if parameter.is_meta]
    assert not left, f"parameters without a tensor: {left}"
    encoder.checkpoint_digest, encoder.image_token_id = checkpoint.digest(), config.image_token_id
    return encoder.eval()
