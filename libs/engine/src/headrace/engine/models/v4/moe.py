"""V4's mixture of experts: V4.1's, and in the first layers one whose experts are a table's, by token id."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..v41.layers import linear
from ..v41.moe import MoE
from .config import ModelConfig


def routed_moe(config: ModelConfig) -> MoE:
    """One whose gate chooses; V4 has no bias for images."""
    moe = MoE(config, config.n_routed_experts, config.num_experts_per_tok)
    del moe.gate.bias_vl
    return moe


class HashGate(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        table = torch.empty(config.vocab_size, config.num_experts_per_tok, dtype=torch.int64)
        self.tid2eid = nn.Parameter(table, requires_grad=False)


class HashMoE(MoE):
    """The token says which experts, the gate how much of each."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.n_routed_experts, config.num_experts_per_tok)
        self.gate = HashGate(config)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """[T, d], token ids int64 [T] -> [T, d]."""
        scores = F.softplus(linear(x.float(), self.gate.weight.float(), self.tile)).sqrt()
        chosen = self.gate.tid2eid.index_select(0, ids)
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.routed_scale
        return self.run(x, chosen, weights)
