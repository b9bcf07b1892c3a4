"""From a V4.1 checkpoint to a model on a GPU: tensors as they are stored, in the groups that products want."""

from __future__ import annotations

import numpy as np
import torch

from headrace.kernels.engram import engram_gather

from ....checkpoint import Checkpoint
from ....config import ConfigError
from ....loader import LoadOptions
from ..config import ModelConfig
from ..engram import NgramHash, RowReader
from ..loader import check_tensors, row_reader, token_map
from . import weights
from .draft import Draft
from .graph import staged
from .model import V41Gpu, runs
from .weights import Weights

TABLE_BYTES = 16 << 30  # an Engram table up to this size lies in GPU memory; a larger one stays in the file's memory map


def load(checkpoint: Checkpoint, config: ModelConfig, options: LoadOptions, graphs: bool = True) -> V41Gpu:
    """ConfigError when the kernels are not made for the model's dimensions, ValueError for options that a GPU has not."""
    why = runs(config)
    if why:
        raise ConfigError(f"device {options.device!r}: {why}; this model runs on device 'cpu'")
    if options.kv_store != "quantized":
        raise ValueError(f"kv_store {options.kv_store!r} needs device 'cpu'; on a GPU it is 'quantized'")
    if options.dtype not in (None, torch.bfloat16):
        raise ValueError(f"dtype {options.dtype} needs device 'cpu'; on a GPU activations are torch.bfloat16")
    check_tensors(checkpoint, config)
    device = torch.device(options.device)
    w = Weights(checkpoint, config, device)
    readers = {layer: _reader(checkpoint, config, layer, device) for layer in config.engram_layer_ids}
    return V41Gpu(
        config,
        device,
        [weights.layer(w, index) for index in range(config.num_hidden_layers)],
        w.tensor("embed.weight", torch.bfloat16),
        w.norm("norm.weight"),
        w.linear("head.weight"),
        NgramHash(config, token_map(checkpoint)) if config.engram_layer_ids else None,
        readers,
        Draft.read(w),
        numerics=options.numerics,
        batch_invariant=options.batch_invariant,
        keep_rows=options.keep_rows,
        graphs=graphs,
    )


def _reader(checkpoint: Checkpoint, config: ModelConfig, layer: int, device: torch.device) -> RowReader:
    """Rows of a table: gathered on the device where it fits there, else from the file."""
    name = f"layers.{layer}.engram.embed.weight"
    table = checkpoint.tensor(name)
    if not config.quantized or device.type != "cuda" or table.nbytes > TABLE_BYTES:
        return row_reader(checkpoint, config, name)
    values = table.view(torch.uint8).to(device)
    scales = checkpoint.tensor(weights.scale_name(name)).view(torch.uint8).to(device)

    def read(rows: np.ndarray) -> torch.Tensor:
        index = staged(rows, device).to(device, non_blocking=True)
        return engram_gather(values, scales, index.view(1, -1)).view(-1, config.engram_head_dim)

    return read
