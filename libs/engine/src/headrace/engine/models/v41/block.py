"""One block of V4.1: two sublayers on residual streams, whoever computes the attention.

A backbone layer and a draft stage are the same block with different attention; serving, drafting and training compute
attention in different ways. Knows mHC, the norms and the MoE; does not know keys, caches or layers of other kinds.
"""

from __future__ import annotations

import torch
from torch import nn

from .config import ModelConfig
from .layers import RMSNorm, collapse, expand, mix
from .moe import MoE


class Block(nn.Module):
    """Residual streams X [T, hc, d]; `pre` travels from one sublayer to the next."""

    tile = 0

    def __init__(self, config: ModelConfig, attn: nn.Module, experts: int, top_k: int) -> None:
        super().__init__()
        c = self.config = config
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.ffn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attn = attn
        self.ffn = MoE(c, experts, top_k)
        mixes, wide = 2 * c.hc_mult + c.hc_mult**2, c.hc_mult * c.hidden_size
        for sublayer in ("attn", "ffn"):
            self.register_parameter(f"hc_{sublayer}_fn", nn.Parameter(torch.empty(mixes, wide)))
            self.register_parameter(f"hc_{sublayer}_base", nn.Parameter(torch.empty(mixes)))
            self.register_parameter(f"hc_{sublayer}_scale", nn.Parameter(torch.empty(3)))

    def attention_input(self, streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        """streams [T, hc, d], pre [T, hc] -> what the attention reads, [T, d]."""
        return self.attn_norm(collapse(streams, pre))

    def forward(
        self, streams: torch.Tensor, attended: torch.Tensor, image: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """streams [T, hc, d] and the attention's output [T, d] on them -> (streams, pre of the next block)."""
        streams, pre, post, comb, x = self.before_experts(streams, attended)
        return expand(self.ffn(x, image), streams, post, comb), pre

    def routed(self, streams: torch.Tensor, attended: torch.Tensor, image: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """`forward` with what the gate did: (streams, pre, gate scores, chosen experts), see `MoE.routed`."""
        streams, pre, post, comb, x = self.before_experts(streams, attended)
        output, scores, chosen = self.ffn.routed(x, image)
        return expand(output, streams, post, comb), pre, scores, chosen

    def before_experts(self, streams: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(streams behind the attention, pre of the next block, post and comb of the experts' output, what experts read)."""
        c = self.config
        pre, post, comb = mix(streams, self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale, c, self.tile)
        streams = expand(attended, streams, post, comb)
        next_pre, post, comb = mix(streams, self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale, c, self.tile)
        return streams, next_pre, post, comb, self.ffn_norm(collapse(streams, pre))


def mean_of_streams(streams: torch.Tensor) -> torch.Tensor:
    """A tap: what the draft sees of a layer's attention input, [T, hc, d] -> [T, d]."""
    return streams.float().mean(1).to(streams.dtype)


def enter_streams(h: torch.Tensor, hc: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings [T, d] -> (streams [T, hc, d], pre [T, hc] fp32 that takes the first stream)."""
    pre = torch.zeros(h.shape[0], hc, device=h.device)
    pre[:, 0] = 1.0
    return h.unsqueeze(1).repeat(1, hc, 1), pre
