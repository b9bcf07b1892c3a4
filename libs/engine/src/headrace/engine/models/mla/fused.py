"""The compiled path of decode rows: weights laid out for `fused_loops`, and one call for all rows of a step.

Used for segments of a single row on a CPU with bf16 weights and a bf16 store; chunks of prompts, other stores, batch
invariance and machines without numba keep to torch. Weights are a copy of their own in one array, which is why a model above
`LARGEST` does without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.kernels import cpu

from ...batch import Segment
from ...cache import KVPool
from .cache import BLOCK_TOKENS
from .config import ModelConfig

if TYPE_CHECKING:
    from .model import MlaModel

LARGEST = 1 << 30  # bytes of weights that are worth a second copy; above, a step is its products and calls cost nothing


class Weights:
    """Collects a layer's weights in the order of loading: arrays, and the line of offsets into them."""

    def __init__(self) -> None:
        self.lines: list[dict[str, int]] = []
        self._bf16: list[torch.Tensor] = []
        self._fp32: list[torch.Tensor] = []
        self._ends = [0, 0]

    def layer(self) -> None:
        self.lines.append({})

    def add(self, name: str, *tensors: torch.Tensor, wide: bool = False) -> None:
        """Tensors behind each other under one name; `wide`: as fp32."""
        self.lines[-1].setdefault(name, self._ends[wide])
        for tensor in tensors:
            (self._fp32 if wide else self._bf16).append(tensor.to(torch.float32 if wide else torch.bfloat16).flatten())
            self._ends[wide] += tensor.numel()

    @property
    def nbytes(self) -> int:
        return 2 * self._ends[0] + 4 * self._ends[1]

    def arrays(self, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(offsets [layers, names], bf16 bits, fp32)."""
        from headrace.kernels.cpu.rows import bits16

        at = np.array([[line.get(name, -1) for name in names] for line in self.lines], np.int64)
        fp32 = torch.cat(self._fp32) if self._fp32 else torch.zeros(0)
        return at, bits16(torch.cat(self._bf16)), fp32.numpy()


NAMES = ("w_a", "w_q", "w_uk", "w_uv", "w_o", "w_in", "w_out", "experts", "norm_in", "norm_q", "norm_kv", "norm_post", "gate",
         "bias")  # fmt: skip


def usable(store: str, dtype: torch.dtype) -> bool:
    return store == "bf16" and dtype == torch.bfloat16 and cpu.available()


class FusedRows:
    """Runs single rows."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        from .fused_loops import dims, forward

        self._forward = forward
        self._at, self._w16, self._w32 = weights.arrays(NAMES)
        self._dims = dims(config)

    def run(self, model: MlaModel, segments: Sequence[Segment], kv: KVPool) -> torch.Tensor:
        """One row of each segment -> hidden vectors before the final norm, fp32 [R, hidden]; entries are written."""
        positions = np.array([segment.start for segment in segments], np.int64)
        floors = np.array([segment.write_floor for segment in segments], np.int64)
        blocks = int(positions.max()) // BLOCK_TOKENS + 1
        tables = np.zeros((len(segments), blocks), np.int64)
        for row, segment in enumerate(segments):
            needed = segment.start // BLOCK_TOKENS + 1
            tables[row, :needed] = segment.block_table[:needed]
        ids = torch.tensor([segment.ids[0] for segment in segments])
        x = torch.nn.functional.embedding(ids, model.embed).float()
        turns = torch.view_as_real(model.rope.upto(int(positions.max()) + 1)).numpy()
        pool = kv.data.numpy().view(np.uint16)
        groups = np.array([group.offset // 2 for group in kv.spec.groups], np.int64)
        self._forward(x.numpy(), positions, floors, tables, pool, groups, turns, self._at, self._w16, self._w32, self._dims)
        return x
