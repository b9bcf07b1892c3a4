"""Mixture of experts: sqrt-softplus gate without groups, clamped SwiGLU experts, one shared expert.

Two ways of the same sum. `dense` multiplies every row with every expert as one wide feed-forward whose activations
are scaled by the routing weights (zero for experts not chosen): two large products and no bookkeeping, best for few
rows of a small model. `grouped` sorts rows by expert. Which one runs is a rule on sizes; with `batch_invariant` the
number of rows has no say in it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from .config import ModelConfig
from .layers import array, linear, loops_for

# Measured on one core: with 65,536 weights a matrix `dense` wins below 128 rows (0.2 against 0.6 ms at 32 rows); with
# 524,288 it never does.
DENSE_WEIGHTS, DENSE_ROWS = 1 << 18, 128
LOOP_ROWS = 32  # the compiled loops are slower than the matrix library where it has many rows to share a weight


class Gate(nn.Module):
    def __init__(self, hidden_size: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden_size))
        # For load balance, moved outside of the gradient; `bias_vl` inside image spans.
        self.bias = nn.Parameter(torch.zeros(experts), requires_grad=False)
        self.bias_vl = nn.Parameter(torch.zeros(experts), requires_grad=False)


class MoE(nn.Module):
    """Experts 0..E-1 are routed, expert E is the shared one: w_in[0] gate and w_in[1] up [E + 1, I, d], w_out [d, E +
    1, I]."""

    tile = 0
    row_multiple = 1  # pad each expert's rows to a multiple of this; also: > 1 fixes the choice of algorithm
    always_dense = False  # never sort rows by expert: no host synchronisation, every expert gets a gradient

    def __init__(self, config: ModelConfig, experts: int, top_k: int) -> None:
        super().__init__()
        d, inter = config.hidden_size, config.moe_intermediate_size
        self.experts, self.top_k, self.inter = experts, top_k, inter
        self.limit, self.routed_scale = config.swiglu_limit, config.routed_scaling_factor
        self.gate = Gate(d, experts)
        self.w_in = nn.Parameter(torch.empty(2, experts + 1, inter, d))
        self.w_out = nn.Parameter(torch.empty(d, experts + 1, inter))

    def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        """[T, d] -> [T, d]; `image` bool [T] marks rows inside an image span."""
        few = image is None and self._has_loop(x)
        return self.run(x, *(self._route_few(x) if few else self.route(x, image)))

    def routed(self, x: torch.Tensor, image: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`forward` with what the gate did: (output [T, d], scores [T, E] with gradient, chosen experts [T, k])."""
        scores = self.scores(x)
        chosen, weights = self.choose(scores, image)
        return self.run(x, chosen, weights), scores, chosen

    def run(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Rows [T, d] through their experts [T, k] with these weights [T, k], and through the shared one."""
        if self._has_loop(x):
            return self._run_few(x, chosen, weights)
        small = self.experts * self.inter * x.shape[1] <= DENSE_WEIGHTS
        if self.always_dense or small and (self.row_multiple > 1 or x.shape[0] <= DENSE_ROWS):
            return self._dense(x, chosen, weights)
        return self._grouped(x, chosen, weights)

    def _has_loop(self, x: torch.Tensor) -> bool:
        """Whether these rows are few enough for the compiled loops, and they can work on them."""
        plain = x.shape[0] <= LOOP_ROWS and self.row_multiple == 1 and not self.always_dense
        return plain and loops_for(x, self.gate.weight, self.w_in, self.w_out) is not None

    def _route_few(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from headrace.kernels.cpu import experts as loops

        chosen, weights = torch.empty(x.shape[0], self.top_k, dtype=torch.int64), torch.empty(x.shape[0], self.top_k)
        scale = np.float32(self.routed_scale)
        loops.route(x.numpy(), array(self.gate.weight), array(self.gate.bias), scale, chosen.numpy(), weights.numpy())
        return chosen, weights

    def _run_few(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        from headrace.kernels.cpu import experts as loops

        out, limit = torch.empty_like(x), np.float32(self.limit)
        w_in, w_out = array(self.w_in), array(self.w_out)
        loops.experts(x.numpy(), chosen.numpy(), weights.numpy(), w_in, w_out, limit, out.numpy())
        return out

    def route(self, x: torch.Tensor, image: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids [T, k] and fp32 weights [T, k]."""
        return self.choose(self.scores(x), image)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 [T, E]."""
        return F.softplus(linear(x.float(), self.gate.weight.float(), self.tile)).sqrt()

    def choose(self, scores: torch.Tensor, image: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids [T, k] and fp32 weights [T, k]. The bias chooses but does not weigh."""
        bias = self.gate.bias if image is None else torch.where(image[:, None], self.gate.bias_vl, self.gate.bias)
        chosen = torch.topk(scores + bias, self.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.routed_scale

    def _dense(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, every = x.shape[0], self.experts + 1
        spread = weights.new_zeros(rows, every).scatter_add_(1, chosen, weights)
        spread[:, self.experts] = 1.0
        wide = linear(x, self.w_in.flatten(0, 2), self.tile)
        hidden = self._activate(wide[:, : every * self.inter], wide[:, every * self.inter :])
        hidden = (hidden.view(rows, every, self.inter) * spread.unsqueeze(-1)).view(rows, -1).to(x.dtype)
        return linear(hidden, self.w_out.flatten(1), self.tile)

    def _grouped(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        routed = torch.zeros_like(x, dtype=torch.float32)
        by_expert = chosen.flatten().sort(stable=True)
        counts = torch.bincount(by_expert.values, minlength=self.experts).tolist()
        flat_weights, start = weights.flatten(), 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            pairs = by_expert.indices[start : start + count]
            start += count
            rows = pairs // self.top_k
            inputs = self._padded(x.index_select(0, rows))
            scale = self._padded(flat_weights.index_select(0, pairs)).unsqueeze(-1)
            routed.index_add_(0, rows, self._expert(expert, inputs, scale)[:count].float())
        return routed.to(x.dtype) + self._expert(self.experts, x, None)

    def _expert(self, expert: int, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        gate, up = (linear(x, self.w_in[side, expert], self.tile) for side in (0, 1))
        hidden = self._activate(gate, up)
        hidden = hidden if scale is None else hidden * scale
        return linear(hidden.to(x.dtype), self.w_out[:, expert], self.tile)

    def _activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """fp32 silu(min(gate, limit)) * clamp(up, -limit, limit); the routing weight multiplies this, before w2."""
        return F.silu(gate.float().clamp_max(self.limit)) * up.float().clamp(-self.limit, self.limit)

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        missing = -x.shape[0] % self.row_multiple
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x
