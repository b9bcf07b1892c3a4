"""What the released layout makes of weights: FP8 in 32x32 blocks, FP4 experts, FP8 table rows, BF16 for the rest.

Training with rounded weights (straight-through gradients) makes the export nearly lossless. Values are rounded exactly as
`make_checkpoint.store` and the loader round them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from headrace.engine.models.v41.schema import BLOCK, checkpoint_schema
from headrace.kernels.quantize import round_fp4_ue8m0, round_fp8_ue8m0

Round = Callable[[torch.Tensor], torch.Tensor]


def fp8_blocks(x: torch.Tensor) -> torch.Tensor:
    """[..., out, in] rounded in blocks of 32x32."""
    out, width = x.shape[-2:]
    padded = F.pad(x, (0, -width % BLOCK, 0, -out % BLOCK))
    blocks = padded.unflatten(-2, (-1, BLOCK)).unflatten(-1, (-1, BLOCK)).transpose(-3, -2)  # [..., R, C, 32, 32]
    rounded = round_fp8_ue8m0(blocks.flatten(-2), BLOCK * BLOCK).view(blocks.shape).transpose(-3, -2)
    return rounded.reshape(padded.shape)[..., :out, :width]


def experts_in(x: torch.Tensor) -> torch.Tensor:
    """w_in [2, E + 1, I, d]: the last expert is the shared one."""
    return torch.cat([round_fp4_ue8m0(x[:, :-1], BLOCK), fp8_blocks(x[:, -1:])], dim=1)


def experts_out(x: torch.Tensor) -> torch.Tensor:
    """w_out [d, E + 1, I]."""
    return torch.cat([round_fp4_ue8m0(x[:, :-1], BLOCK), fp8_blocks(x[:, -1]).unsqueeze(1)], dim=1)


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def rules(model: nn.Module) -> dict[str, Round]:
    """Parameter name -> how the export rounds it; parameters that stay fp32 are left out."""
    by_kind: dict[str, Round] = {"fp8": fp8_blocks, "bf16": bf16, "fp8_rows": lambda x: round_fp8_ue8m0(x, BLOCK)}
    schema, found = checkpoint_schema(model.config), {}
    for name, _ in model.named_parameters():
        if name.endswith((".w_in", ".w_out")):
            found[name] = experts_in if name.endswith(".w_in") else experts_out
        elif schema[name.removeprefix("image_encoder.")].kind in by_kind:
            found[name] = by_kind[schema[name.removeprefix("image_encoder.")].kind]
    return found


class Rounded:
    """`with rounded: forward and backward` on rounded weights; the optimiser's values come back behind it."""

    def __init__(self, model: nn.Module, only: str = "") -> None:
        """only: a pattern of parameter names."""
        chosen = {name: rule for name, rule in rules(model).items() if re.search(only, name)}
        self.pairs = [(model.get_parameter(name), rule) for name, rule in chosen.items()]

    @contextmanager
    def __call__(self, active: bool = True) -> Iterator[None]:
        if not active:
            yield
            return
        with torch.no_grad():
            kept = [parameter.detach().clone() for parameter, _ in self.pairs]
            for parameter, rule in self.pairs:
                parameter.copy_(rule(parameter))
        try:
            yield
        finally:
            with torch.no_grad():
                for (parameter, _), value in zip(self.pairs, kept, strict=True):
                    parameter.copy_(value)
