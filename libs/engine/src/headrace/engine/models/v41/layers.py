"""Small parts of a V4.1 block: linear, RMS norm, rotary embedding, single-pass mHC.

Plain differentiable tensor maths on rows [T, ...]; nothing here knows sequences, caches or checkpoints.
T: rows, d: hidden size, hc: residual streams (4), RD: rotary dimensions.
"""

from __future__ import annotations

import math
from functools import lru_cache
from types import ModuleType

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from headrace.kernels import cpu

from .config import ModelConfig


class Linear(nn.Module):
    """y = x W^T, weight [out, in]. `tile` > 0 multiplies that many rows at a time (see `device.row_tile`)."""

    tile = 0

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.tile)


def linear(x: torch.Tensor, weight: torch.Tensor, tile: int = 0) -> torch.Tensor:
    """[T, in] x [out, in] -> [T, out], in x's dtype: in training, weights are fp32 and rows may be bf16."""
    if weight.dtype != x.dtype:
        weight = weight.to(x.dtype)
    if tile and x.shape[0] > tile:
        return torch.cat([F.linear(rows, weight) for rows in x.split(tile)])
    return F.linear(x, weight)


class Embedding(nn.Module):
    """Rows of a weight [vocab, dim]. Unlike torch's it draws no initial values."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class RMSNorm(nn.Module):
    """w * x / rms(x), in fp32, cast once."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loops = loops_for(x, self.weight)
        if loops is not None:
            out = torch.empty_like(x)
            loops.norm(x.view(-1, x.shape[-1]).numpy(), array(self.weight), self.eps, out.view(-1, x.shape[-1]).numpy())
            return out
        wide = x.float()
        return (wide * inverse_rms(wide, self.eps) * self.weight.float()).to(x.dtype)


def loops_for(*tensors: torch.Tensor) -> ModuleType | None:
    """The compiled loops (`headrace.kernels.cpu.mhc`) where they can do this: fp32 on a CPU, contiguous, without gradients."""
    if torch.is_grad_enabled() or not cpu.available():
        return None
    for x in tensors:
        if x.dtype != torch.float32 or x.device.type != "cpu" or not x.is_contiguous():
            return None
    from headrace.kernels.cpu import mhc

    return mhc


def array(weight: torch.Tensor) -> np.ndarray:
    """A weight as numpy sees it; kept with the weight, for asking torch costs more than a small loop."""
    kept = getattr(weight, "_array", None)
    if kept is None or kept[0] != weight.data_ptr():
        kept = weight._array = (weight.data_ptr(), weight.detach().numpy())
    return kept[1]


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """fp32 [..., d] -> [..., 1]."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


# ------------------------------------------------------------------ rotary embedding


def rope_frequencies(config: ModelConfig, compressed: bool) -> torch.Tensor:
    """Inverse frequencies [RD / 2] fp32. YaRN (no attention factor) only for layers with compressed KV."""
    dim = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    frequencies = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if not compressed:
        return frequencies
    yarn = config.rope_scaling

    def correction(rotations: float) -> float:
        return dim * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(yarn.beta_fast)), 0)
    high = min(math.ceil(correction(yarn.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


class RopeTable:
    """exp(i * position * frequency) as complex64, grown in whole pages so that a value never depends on who asked
    first."""

    PAGE = 4096

    def __init__(self, frequencies: torch.Tensor) -> None:
        self.frequencies = frequencies
        self.table = torch.empty(0, frequencies.numel(), dtype=torch.complex64)

    def __call__(self, positions: torch.Tensor, limit: int) -> torch.Tensor:
        """int64 [T], all below `limit` -> [T, RD / 2]."""
        while self.table.shape[0] < limit:
            page = torch.arange(self.table.shape[0], self.table.shape[0] + self.PAGE, dtype=torch.float32)
            angles = page[:, None] * self.frequencies
            self.table = torch.cat([self.table, torch.polar(torch.ones_like(angles), angles)])
        return self.table.index_select(0, positions)


def rotate(x: torch.Tensor, phases: torch.Tensor) -> torch.Tensor:
    """Rotate the last RD channels of x [T, D] or [T, H, D] by complex phases [T, RD / 2], or their real and imaginary parts
    [T, RD / 2, 2]; adjacent pairs; in place for fp32 without gradients and complex phases."""
    rope_dim = 2 * phases.shape[1]
    loops = loops_for(x)
    if loops is not None and phases.dim() == 2:
        back = phases.is_conj()
        turns = torch.view_as_real(phases.conj() if back else phases).numpy()
        loops.rotate((x if x.dim() == 3 else x.unsqueeze(1)).numpy(), turns, np.float32(-1 if back else 1))
        return x
    if not phases.is_complex():  # (cos, sin) [T, RD / 2, 2]: compilers know no complex numbers
        turns = phases.unsqueeze(1) if x.dim() == 3 else phases
        (a, b), (cos, sin) = x[..., -rope_dim:].float().unflatten(-1, (-1, 2)).unbind(-1), turns.unbind(-1)
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
        return torch.cat([x[..., :-rope_dim], turned.to(x.dtype)], dim=-1)
    phases = phases.unsqueeze(1) if x.dim() == 3 else phases
    tail = x[..., x.shape[-1] - rope_dim :]
    pairs = tail.view(*tail.shape[:-1], rope_dim // 2, 2)
    if x.dtype == torch.float32 and not torch.is_grad_enabled():
        torch.view_as_complex(pairs).mul_(phases)
        return x
    turned = torch.view_as_real(torch.view_as_complex(pairs.float().contiguous()) * phases).flatten(-2)
    return torch.cat([x[..., : x.shape[-1] - rope_dim], turned.to(x.dtype)], dim=-1)


# ------------------------------------------------------------------ hyper-connections (single-pass mHC)


def mix(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, config: ModelConfig, tile: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coefficients of one sublayer from its input streams [T, hc, d]: pre [T, hc], post [T, hc], comb [T, hc, hc],
    all fp32.

    fn [2 hc + hc^2, hc d], base [2 hc + hc^2], scale [3]. The projection comes before the normalisation. `pre`
    collapses the input of the NEXT sublayer; `post` and `comb` expand this one's output.
    """
    hc, eps = config.hc_mult, config.hc_eps
    loops = loops_for(streams, fn, base, scale)
    if loops is not None:
        x = streams.flatten(1)
        pre, post = torch.empty(2, x.shape[0], hc).unbind()
        comb = torch.empty(x.shape[0], hc, hc)
        loops.mix(
            x.numpy(), linear(x, fn, tile).numpy(), array(base), array(scale), hc, np.float32(config.rms_norm_eps),
            np.float32(eps), config.hc_sinkhorn_iters, pre.numpy(), post.numpy(), comb.numpy(),
        )  # fmt: skip
        return pre, post, comb
    x = streams.flatten(1).float()
    projected = linear(x, fn, tile) * inverse_rms(x, config.rms_norm_eps)
    z = torch.addcmul(base, projected, scale.index_select(0, _scale_of_mix(hc, scale.device)))
    gates = torch.sigmoid(z[:, : 2 * hc])
    pre, post = gates[:, :hc] + eps, gates[:, hc:] * 2
    return pre, post, sinkhorn(z[:, 2 * hc :].reshape(-1, hc, hc), config.hc_sinkhorn_iters, eps)


@lru_cache
def _scale_of_mix(hc: int, device: torch.device) -> torch.Tensor:
    """Which of the three scales each coefficient has: hc of pre, hc of post, hc^2 of comb."""
    with torch.inference_mode(False):
        return torch.tensor([0] * hc + [1] * hc + [2] * hc * hc, device=device)


def sinkhorn(z: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Softmax over rows, then alternate column and row normalisation, columns last. [T, n, n] -> [T, n, n].

    Matrices are kept flat with a constant 1 behind them, [T, n * n + 1]: one product with a constant matrix then
    gives every element the sum of its row or column plus eps. Small models are bound by the number of operations, and
    this is two a pass.
    """
    n = z.shape[-1]
    if torch.compiler.is_compiling():  # a compiler fuses the plain form
        c = torch.softmax(z, dim=-1) + eps
        for step in range(2 * iterations - 1):
            c = c / (c.sum(-1 if step % 2 else -2, keepdim=True) + eps)
        return c
    rows, columns = _summing_matrices(n, eps, z.device)
    c = torch.nn.functional.pad((torch.softmax(z, dim=-1) + eps).flatten(1), (0, 1), value=1.0)
    sums = scratch = None
    if not torch.is_grad_enabled():
        sums, scratch = torch.empty_like(c), c
    for step in range(2 * iterations - 1):
        sums = torch.mm(c, rows if step % 2 else columns, out=sums)
        c = torch.div(c, sums, out=scratch)
        if scratch is None:
            sums = None
    return c[:, :-1].reshape(-1, n, n)


@lru_cache
def _summing_matrices(n: int, eps: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two [n * n + 1, n * n + 1] matrices: sums over rows, over columns; the last column stays 1."""
    with torch.inference_mode(False):
        one, ones = torch.eye(n, device=device), torch.ones(n, n, device=device)
        result = []
        for sums in (torch.kron(one, ones), torch.kron(ones, one)):
            matrix = torch.zeros(n * n + 1, n * n + 1, device=device)
            matrix[:-1, :-1], matrix[-1, :-1], matrix[-1, -1] = sums, eps, 1.0
            result.append(matrix)
        return result[0], result[1]


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """sum_i pre_i X_i: [T, hc, d], [T, hc] -> [T, d]."""
    loops = loops_for(streams, pre)
    if loops is not None:
        out = streams.new_empty(streams.shape[0], streams.shape[2])
        loops.collapse(streams.numpy(), pre.numpy(), out.numpy())
        return out
    if torch.compiler.is_compiling():
        return (pre.unsqueeze(-1) * streams.float()).sum(1).to(streams.dtype)
    return torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)


def expand(output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """X'_k = post_k * output + sum_j comb[j, k] X_j: -> [T, hc, d]."""
    loops = loops_for(output, streams, post, comb)
    if loops is not None:
        out = torch.empty_like(streams)
        loops.expand(output.numpy(), streams.numpy(), post.numpy(), comb.numpy(), out.numpy())
        return out
    added = post.unsqueeze(-1) * output.float().unsqueeze(1)
    if torch.compiler.is_compiling():
        return (added + (comb.unsqueeze(-1) * streams.float().unsqueeze(2)).sum(1)).to(streams.dtype)
    return torch.baddbmm(added, comb.transpose(1, 2), streams.float()).to(streams.dtype)
