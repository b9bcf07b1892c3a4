"""V4 attention: a sliding window of the layer's own KV plus compressed entries, one softmax, a sink.

The maths is V4.1's (`v41.attention`), and so are window, selection and output projection. What differs: queries have a norm of
their own after wq_b; every layer with compressed KV makes its own entries; a CSA layer's entries overlap, and its index keys
come from a compressor of their own; an HCA layer attends to all of its entries.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..v41.attention import Attention as SharedAttention
from ..v41.attention import Indexer as SharedIndexer
from ..v41.attention import Pass
from ..v41.layers import Linear, RMSNorm, RopeTable, inverse_rms, linear, rotate
from .cache import Series
from .config import CSA, ModelConfig

# With batch invariance an HCA layer's columns are a multiple of this. How many there are is the batch's affair; those that a
# row doesn't see are whole vectors of zeros behind its own in every sum, which leave its bits alone.
WIDTH_STEP = 64


class Compressor(nn.Module):
    """Entries of `ratio` tokens each: a softmax per channel over the scores of the tokens that make it.

    Where entries overlap, a token has two series of (KV, score): the first goes into the next group's entry, the second into
    its own group's, so an entry is made of 2 * ratio rows. Before a sequence's first group there is nothing.
    """

    def __init__(self, config: ModelConfig, series: Series) -> None:
        super().__init__()
        self.series = series
        self.wkv = Linear(config.hidden_size, series.width)
        self.wgate = Linear(config.hidden_size, series.width)
        self.ape = nn.Parameter(torch.empty(series.ratio, series.width))
        self.norm = RMSNorm(series.dim, config.rms_norm_eps)

    def write(self, u: torch.Tensor, table: RopeTable, shared: Pass) -> None:
        """Compress rows u [padded, d] and write the entries that they complete; keep what later entries need."""
        rows, s = shared.rows, self.series
        projected = self._project(u, rows.padded_positions)[: rows.count]
        ring = shared.states.projections[s.name]  # [slots, ring, 2, width]
        done, block, place = rows.entries(s.ratio)
        count = done.numel()
        if count:
            done = F.pad(done, (0, -count % shared.row_multiple))
            latent = self.norm(self._pool(self._members(done, projected, ring, shared)).to(u.dtype))
            phases = table(rows.positions[done] // s.ratio * s.ratio, rows.limit)  # at the entry's first token
            shared.paged[s.name].write(block, place, rotate(latent, phases)[:count])
        cells = rows.slots[rows.piece_of] * s.ring + rows.positions % s.ring
        if rows.pieces[-1].length > s.ring:  # a longer piece leaves only its last rows there
            kept = (rows.from_end <= s.ring).nonzero().squeeze(1)
            cells, projected = cells[kept], projected[kept]
        ring.flatten(0, 1).index_copy_(0, cells, projected)

    def _project(self, u: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, d] -> (KV, score) fp32 [T, 2, width]; the score with its place in the group."""
        wide = u.float()
        kv, score = (linear(wide, part.weight.float(), part.tile) for part in (self.wkv, self.wgate))
        return torch.stack([kv, score + self.ape.index_select(0, positions % self.series.ratio)], dim=1)

    def _members(self, done: torch.Tensor, projected: torch.Tensor, ring: torch.Tensor, shared: Pass) -> torch.Tensor:
        """Rows that make the entries which rows `done` [E] complete, oldest first: [E, span, 2, width], of this pass or kept
        from an earlier one. Rows before the sequence's first are anything."""
        rows, s = shared.rows, self.series
        back = torch.arange(s.span - 1, -1, -1, device=done.device)
        here = back <= rows.in_piece[done][:, None]
        fresh = projected.index_select(0, (done[:, None] - back).clamp_min(0).flatten()).view(-1, s.span, 2, s.width)
        if bool(here.all()):
            return fresh
        slots = rows.slots[rows.piece_of[done]]
        old = ring[slots[:, None], (rows.positions[done][:, None] - back) % s.ring]
        members = torch.where(here[:, :, None, None], fresh, old)
        before = rows.positions[done][:, None] < back
        members[:, :, 1].masked_fill_(before.unsqueeze(-1), -torch.inf)
        members[:, :, 0].masked_fill_(before.unsqueeze(-1), 0.0)
        return members

    def _pool(self, members: torch.Tensor) -> torch.Tensor:
        """[E, span, 2, width] -> [E, dim]."""
        s = self.series
        if s.overlaps:
            first, second = members[:, : s.ratio, :, : s.dim], members[:, s.ratio :, :, s.dim :]
            members = torch.cat([first, second], dim=1)
        return (torch.softmax(members[:, :, 1], dim=1) * members[:, :, 0]).sum(1)


class Indexer(SharedIndexer):
    """V4.1's, over keys of a compressor of its own."""

    def __init__(self, config: ModelConfig, series: Series) -> None:
        super().__init__(config, owns_keys=False)
        self.compressor = Compressor(config, series)


class Attention(SharedAttention):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        overlaps = config.layer_types[layer] == CSA
        if self.ratio:
            self.compressor = Compressor(config, Series(f"main.{layer}", layer, self.ratio, config.head_dim, overlaps))
        self.selects = config.selects(layer)
        if self.selects:
            self.indexer = Indexer(config, Series(f"index.{layer}", layer, self.ratio, config.index_head_dim, True))

    def forward(self, u: torch.Tensor, phases: torch.Tensor, shared: Pass) -> torch.Tensor:
        """Normed input u [padded, d], phases [padded, RD / 2] of this layer's RoPE -> [padded, d].

        Entries of these rows must be written before (`write_sources`).
        """
        if self.ratio and not self.selects:
            visible, most = shared.visible(self.ratio)
            width = -(-most // WIDTH_STEP) * WIDTH_STEP if shared.fixed_width else most
            numbers = torch.arange(width, device=u.device)
            shared.selection[self.layer] = numbers.masked_fill(numbers >= visible[:, None], -1)
        return super().forward(u, phases, shared)

    def query(self, qr: torch.Tensor, phases: torch.Tensor) -> torch.Tensor:
        """[T, q_lora_rank] -> [T, H, D], normed per head without a weight, rotated."""
        q = self.wq_b(qr).view(-1, self.config.num_attention_heads, self.config.head_dim)
        return rotate(q * inverse_rms(q.float(), self.config.rms_norm_eps).to(q.dtype), phases)

    def write_sources(self, u: torch.Tensor, table: RopeTable, shared: Pass) -> None:
        self.compressor.write(u, table, shared)
        if self.selects:
            self.indexer.compressor.write(u, table, shared)
