"""What the released layout makes of weights: FP8 in 32x32 blocks, FP4 experts, FP8 table rows, BF16 for the rest.

Training with rounded weights (straight-through gradients) makes the export nearly lossless. Values are rounded exactly as
`make_checkpoint.store` and the loader round them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from headrace.engine.models.v41.schema import BLOCK, checkpoint_schema
from headrace.kernels.quantize import round_fp4_ue8m0, round_fp8_ue8m0

FP8, FP8_ROWS, FP4, BF16 = "fp8", "fp8_rows", "fp4", "bf16"  # kinds of rounding; FP8: blocks of 32x32


def rules(model: nn.Module) -> dict[str, list[tuple[torch.Tensor, str]]]:
    """Parameter name -> its parts (views) and how the export rounds each; parameters that stay fp32 are left out."""
    schema, found = checkpoint_schema(model.config), {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if name.endswith((".w_in", ".w_out")):  # [2, E + 1, I, d] and [d, E + 1, I]: the last expert is the shared one
            found[name] = [(value[:, :-1], FP4), (value[:, -1], FP8)]
        elif (kind := schema[name.removeprefix("image_encoder.")].kind) in (FP8, FP8_ROWS, BF16):
            found[name] = [(value, kind)]
    return found


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """[..., out, in], padded to whole blocks -> [blocks, 32 * 32]."""
    padded = F.pad(x, (0, -x.shape[-1] % BLOCK, 0, -x.shape[-2] % BLOCK))
    return padded.unflatten(-2, (-1, BLOCK)).unflatten(-1, (-1, BLOCK)).transpose(-3, -2).reshape(-1, BLOCK * BLOCK)


def _unblocked(blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    out, width = like.shape[-2:]
    grid = blocks.view(*like.shape[:-2], -(-out // BLOCK), -(-width // BLOCK), BLOCK, BLOCK)
    return grid.transpose(-3, -2).flatten(-2).flatten(-3, -2)[..., :out, :width]


def _together(values: list[torch.Tensor], kind: str) -> list[torch.Tensor]:
    """All values of a kind rounded in one go: a device spends its time on the number of operations, not on their size."""
    if kind == BF16:
        flat = [value.reshape(-1) for value in values]
        rounded = torch.cat(flat).bfloat16().float()
    else:
        flat = [_blocks(value) if kind == FP8 else value.reshape(-1, BLOCK) for value in values]
        rounding = round_fp4_ue8m0 if kind == FP4 else round_fp8_ue8m0
        rounded = rounding(torch.cat(flat), BLOCK * BLOCK if kind == FP8 else BLOCK)
    parts = zip(values, rounded.split([f.shape[0] for f in flat]), strict=True)
    return [_unblocked(part, value) if kind == FP8 else part.view(value.shape) for value, part in parts]


class Rounded:
    """`with rounded: forward and backward` on rounded weights; the optimiser's values come back behind it."""

    def __init__(self, model: nn.Module, only: str = "") -> None:
        """only: a pattern of parameter names."""
        chosen = {name: parts for name, parts in rules(model).items() if re.search(only, name)}
        self.whole = [model.get_parameter(name) for name in chosen]
        self.by_kind: dict[str, list[torch.Tensor]] = {}
        for value, kind in (part for parts in chosen.values() for part in parts):
            self.by_kind.setdefault(kind, []).append(value)

    @contextmanager
    def __call__(self, active: bool = True) -> Iterator[None]:
        if not active:
            yield
            return
        with torch.no_grad():
            kept = torch._foreach_mul(self.whole, 1.0)
            for kind, values in self.by_kind.items():
                torch._foreach_copy_(values, _together(values, kind))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.whole, kept)
