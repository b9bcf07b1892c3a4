"""Parts of an MLA block on rows [T, ...]: products, norm, rotary embedding, gate and experts.

Nothing here knows sequences, caches or checkpoints. T: rows, d: hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch.nn import functional as F

from headrace.kernels import cpu

from .config import ModelConfig, Rope

LATENT_EPS = 1e-6  # of the norms inside attention; config.json's rms_norm_eps is that of the others
PACKED_ROWS = 32  # rows that a packed weight is laid out for; fewer and more are as fast as their own layout


class Linear:
    """[T, in] -> [T, out] by a weight [out, in].

    `tile` > 0 multiplies that many rows at a time (see `device.row_rule`). `pack`: a bf16 weight is kept in the order in
    which the CPU's matrix library reads it, which few rows gain most from (the released order is copied on every call).
    """

    __slots__ = ("packed", "shape", "tile", "weight")

    def __init__(self, weight: torch.Tensor, tile: int = 0, pack: bool = False) -> None:
        self.shape, self.tile, self.weight, self.packed = weight.shape, tile, weight, None
        if pack and weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
            self.weight = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        if self.tile and x.shape[0] > self.tile:
            return torch.cat([F.linear(rows, self.weight) for rows in x.split(self.tile)])
        return F.linear(x, self.weight)


def loops_for(x: torch.Tensor) -> ModuleType | None:
    """The compiled loops (`chunk_loops`) where they can work on rows like x: bf16 on a CPU with numba."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or not cpu.available():
        return None
    from . import chunk_loops

    return chunk_loops


def bits(x: torch.Tensor) -> np.ndarray:
    """A bf16 CPU tensor as uint16 on the same memory."""
    return x.view(torch.int16).numpy().view(np.uint16)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / rms(x), normalised in fp32 and rounded before the weight, as the published code does."""
    loops = loops_for(x)
    if loops is not None and x.dim() == 2 and x.is_contiguous():
        out = torch.empty_like(x)
        loops.norm(bits(x), 0, x.shape[1], bits(weight), eps, bits(out))
        return out
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


# ------------------------------------------------------------------ rotary embedding


def yarn_scale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature, 1 without extension."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_scale(config: ModelConfig) -> float:
    """What multiplies scores: 1 / sqrt(head dim), times the squared temperature of mscale_all_dim."""
    rope = config.rope
    scale = config.qk_head_dim**-0.5
    return scale * yarn_scale(rope.factor, rope.mscale_all_dim) ** 2 if rope.yarn and rope.mscale_all_dim else scale


def rope_frequencies(rope: Rope, dim: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies fp32 [dim / 2] and the factor of the rotated parts."""
    frequencies = 1.0 / (rope.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if not rope.yarn:
        return frequencies, 1.0

    def correction(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.rope_theta))

    low, high = correction(rope.beta_fast), correction(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    factor = rope.attention_factor
    if not factor:
        both = rope.mscale and rope.mscale_all_dim
        factor = yarn_scale(rope.factor, rope.mscale if both else 1.0)
        factor /= yarn_scale(rope.factor, rope.mscale_all_dim) if both else 1.0
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp), factor


class RopeTable:
    """factor * exp(i * position * frequency) as complex64, grown in whole pages so that a value never depends on who
    asked first."""

    PAGE = 4096

    def __init__(self, rope: Rope, dim: int) -> None:
        self.frequencies, self.factor = rope_frequencies(rope, dim)
        self.table = torch.empty(0, dim // 2, dtype=torch.complex64)

    def __call__(self, positions: torch.Tensor, limit: int) -> torch.Tensor:
        """int64 [T], all below `limit` -> [T, 1, dim / 2]."""
        return self.upto(limit).index_select(0, positions).unsqueeze(1)

    def upto(self, limit: int) -> torch.Tensor:
        """Of all positions below `limit`, and some more: [positions, dim / 2]."""
        while self.table.shape[0] < limit:
            page = torch.arange(self.table.shape[0], self.table.shape[0] + self.PAGE, dtype=torch.float32)
            angles = page[:, None] * self.frequencies
            self.table = torch.cat([self.table, torch.polar(torch.full_like(angles, self.factor), angles)])
        return self.table


# ------------------------------------------------------------------ feed-forward


@dataclass(slots=True)
class MLP:
    """w_out (silu(gate x) * (up x)). w_in [2 I, d]: gate above up; w_out [d, I]."""

    w_in: Linear
    w_out: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.w_out(activate(self.w_in(x)))


def activate(wide: torch.Tensor) -> torch.Tensor:
    """[..., 2 I] -> [..., I]."""
    gate, up = wide.chunk(2, dim=-1)
    return F.silu(gate) * up


@dataclass(slots=True)
class Gate:
    """weight [E, d] and bias [E] (noaux_tc only) in fp32."""

    config: ModelConfig
    weight: Linear
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, d] -> expert ids [T, k], fp32 weights [T, k]. The bias chooses but does not weigh."""
        c = self.config
        scores = self.weight(x.float())
        scores = scores.sigmoid() if c.scoring_func == "sigmoid" else scores.softmax(dim=-1)
        choice = scores if self.bias is None else scores + self.bias
        if c.topk_method != "greedy" and c.topk_group < c.n_group:
            choice = self._inside_groups(choice)
        chosen = torch.topk(choice, c.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, chosen)
        if c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * c.routed_scaling_factor

    def _inside_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """-inf outside of the best groups: by the sum of their two best experts (V3) or by their best one (V2)."""
        c = self.config
        grouped = choice.unflatten(1, (c.n_group, -1))
        if c.topk_method == "noaux_tc":
            strength = grouped.topk(2, dim=-1).values.sum(-1)
        else:
            strength = grouped.amax(-1)
        best = torch.topk(strength, c.topk_group, dim=-1).indices
        outside = torch.ones_like(strength, dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(1)


@dataclass(slots=True)
class MoE:
    """Routed experts, and the shared ones as one MLP.

    Rows are sorted by expert, each expert's padded to a multiple of `row_multiple`, and multiplied expert by expert.
    A row's sum runs over its experts in the gate's order, whatever else is in the batch.
    """

    gate: Gate
    experts: list[MLP]
    shared: MLP | None
    row_multiple: int = 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        loops = loops_for(x)
        if loops is not None and self.row_multiple == 1:
            return self._between_loops(loops, x)
        chosen, weights = self.gate(x)
        top_k = chosen.shape[1]
        by_expert = chosen.flatten().sort(stable=True)
        counts = torch.bincount(by_expert.values, minlength=len(self.experts)).tolist()
        outputs = self._run(x.index_select(0, by_expert.indices // top_k), counts)
        picked = torch.empty_like(outputs).index_copy_(0, by_expert.indices, outputs).unflatten(0, (-1, top_k))
        routed = (picked.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)
        return routed if self.shared is None else routed + self.shared(x)

    def _between_loops(self, loops: ModuleType, x: torch.Tensor) -> torch.Tensor:
        """The same: routing and sums compiled, products of the matrix library."""
        c, rows = self.gate.config, x.shape[0]
        bias = np.empty(0, np.float32) if self.gate.bias is None else self.gate.bias.numpy()
        weights, place = np.empty((rows, c.num_experts_per_tok), np.float32), np.empty((rows, c.num_experts_per_tok), np.int64)
        counts, by_expert = np.empty(len(self.experts), np.int64), x.new_empty(place.size, x.shape[1])
        loops.deal(bits(x), self.gate.weight.weight.numpy(), bias, loops.dims(c), weights, place, counts, bits(by_expert))
        outputs, out = self._run(by_expert, counts.tolist()), torch.empty_like(x)
        shared = x.new_empty(0, x.shape[1]) if self.shared is None else self.shared(x)
        loops.collect(bits(outputs), place, weights, bits(shared), bits(out))
        return out

    def _run(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Rows sorted by expert, `counts` of each -> the same rows after their expert."""
        parts = []
        for expert, rows in zip(self.experts, x.split(counts), strict=True):
            count = rows.shape[0]
            if count:
                padding = -count % self.row_multiple
                parts.append(expert(F.pad(rows, (0, 0, 0, padding)) if padding else rows)[:count])
        return torch.cat(parts)
