"""Multi-head latent attention over paged latents (DeepSeek-V2 report, section 2.1).

Absorbed: one latent of kv_lora_rank + rope channels per token is the key of every head, its first kv_lora_rank channels
are the value.

    score(t, s) = (W_UK^T q_nope) . latent_s + q_rope . k_rope_s,   out = W_UV (sum_s p_s latent_s)

Expanded: keys and values of every head are made from the latents first, which costs less for long chunks. With batch
invariance everything is absorbed: prefill and decode run the same products, so a row's bits do not depend on how its
sequence was cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch.nn import functional as F

from ...device import ROW_MULTIPLE
from .cache import BLOCK_TOKENS, Latents
from .config import ModelConfig
from .layers import LATENT_EPS, Linear, bits, loops_for, rms_norm
from .rows import Group, Rows

TILE_ROWS = 256  # rows of a piece that are attended at once: they see up to the last one's context
SPLIT_ELEMENTS = 1 << 23  # of one tile's partial results with batch invariance
EXPANDED_ELEMENTS = 1 << 26  # of the keys that are expanded at once

# (q [S, H, L, D], k, v, attn_mask) -> (out, log-sum-exp fp32 [S, H, L]); fused, accumulates in fp32.
_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(slots=True)
class Attention:
    """w_a [q_lora_rank + latent, d]: first projections of query and KV in one; without q_lora_rank the query's part is
    the whole projection [heads * qk_head_dim, d] and w_q is None. w_uk [H, nope, rank], w_uv [H, v, rank]. Rotary
    channels are adjacent pairs."""

    config: ModelConfig
    scale: float
    w_a: Linear
    q_norm: torch.Tensor | None
    w_q: Linear | None
    kv_norm: torch.Tensor
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    w_o: Linear
    split: bool = False  # batch invariance: context in splits of one block, combined in order
    tile: int = 0

    def project(self, x: torch.Tensor, phases: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed input [T, d], phases [T, 1, rope / 2] -> queries [T, H, nope + rope], latents [T, latent]."""
        c = self.config
        heads, rank, nope = c.num_attention_heads, c.kv_lora_rank, c.qk_nope_head_dim
        first, loops = self.w_a(x), loops_for(x)
        if loops is not None and not self.split:
            return self._project_between_loops(loops, first, phases)
        q, kv = first.split([self.w_a.shape[0] - c.latent_dim, c.latent_dim], dim=1)
        if self.w_q is not None:
            q = self.w_q(rms_norm(q, self.q_norm, LATENT_EPS))
        q = q.unflatten(1, (heads, -1))
        pairs = x.new_empty(x.shape[0], heads + 1, c.qk_rope_head_dim, dtype=torch.float32)  # of all heads, and the key's
        pairs[:, :heads] = q[..., nope:]
        pairs[:, heads] = kv[:, rank:]
        torch.view_as_complex(pairs.unflatten(-1, (-1, 2))).mul_(phases)
        q[..., nope:] = pairs[:, :heads]
        return q, torch.cat([rms_norm(kv[:, :rank], self.kv_norm, LATENT_EPS), pairs[:, heads].to(x.dtype)], dim=1)

    def _project_between_loops(
        self, loops: ModuleType, first: torch.Tensor, phases: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rest of `project` from its first product on, norms and rotation compiled."""
        c, count = self.config, first.shape[0]
        turns, before = torch.view_as_real(phases).squeeze(1).numpy(), first.shape[1] - c.latent_dim
        entries = first.new_empty(count, c.latent_dim)
        loops.latents(bits(first), before, c.kv_lora_rank, bits(self.kv_norm), LATENT_EPS, turns, bits(entries))
        if self.w_q is None:
            q = first[:, :before].contiguous()
        else:
            normed = first.new_empty(count, before)
            loops.norm(bits(first), 0, before, bits(self.q_norm), LATENT_EPS, bits(normed))
            q = self.w_q(normed)
        loops.rotate_heads(bits(q), c.qk_head_dim, c.qk_nope_head_dim, turns)
        return q.unflatten(1, (c.num_attention_heads, -1)), entries

    def attend(self, queries: torch.Tensor, rows: Rows, cache: Latents) -> torch.Tensor:
        """[padded, H, nope + rope] -> [padded, d]; the rows' own latents are in the cache already."""
        if self.split:  # products with weights see all rows at once, for their number is a multiple of 16
            absorbed = self._absorb(queries)
            parts = [self._latent(absorbed[group.begin : group.end], group, cache) for group in rows.groups]
            parts.append(absorbed.new_zeros(rows.padded - rows.count, *parts[0].shape[1:]))
            return self.w_o(self._values(torch.cat(parts)).flatten(1))
        parts = []
        for group in rows.groups:
            q = queries[group.begin : group.end]
            if self._expanding_pays(group):
                parts.append(self._expanded(q, group, cache))
            else:
                parts.append(self._values(self._latent(self._absorb(q), group, cache)))
        return self.w_o((parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1))

    # -------------------------------------------------------------- absorbed: heads share the latents

    def _absorb(self, q: torch.Tensor) -> torch.Tensor:
        """[T, H, nope + rope] -> [T, H, latent]."""
        c = self.config
        result = q.new_empty(*q.shape[:2], c.latent_dim)
        result[..., : c.kv_lora_rank] = self._per_head(q[..., : c.qk_nope_head_dim], self.w_uk)
        result[..., c.kv_lora_rank :] = q[..., c.qk_nope_head_dim :]
        return result

    def _values(self, latents: torch.Tensor) -> torch.Tensor:
        """[T, H, rank] -> [T, H, v]."""
        return self._per_head(latents, self.w_uv.transpose(1, 2))

    def _per_head(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[T, H, in] x [H, in, out] -> [T, H, out]."""
        step = self.tile or x.shape[0]
        parts = [torch.bmm(part.transpose(0, 1), weight).transpose(0, 1) for part in x.split(step)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _latent(self, queries: torch.Tensor, group: Group, cache: Latents) -> torch.Tensor:
        """[segments * length, H, latent] -> [segments * length, H, rank]."""
        heads, rank = queries.shape[1], self.config.kv_lora_rank
        keys = cache.read(group.tables).unsqueeze(1)  # [S, 1, N, latent]
        q = queries.unflatten(0, (group.segments, group.length))
        if group.length == 1:  # heads are the rows of one product
            mask = group.mask(0, 1)
            keys, mask = keys[:, :, : mask.shape[-1]], mask.expand(-1, -1, heads, -1)
            return self._context(q, keys, mask, group.positions)[..., :rank].flatten(0, 1)
        q, parts = q.transpose(1, 2), []
        for start, stop in self._tiles(group, heads):
            mask = group.mask(start, stop)
            part = self._context(q[:, :, start:stop], keys[:, :, : mask.shape[-1]], mask, group.positions[:, start:stop])
            parts.append(part[..., :rank].transpose(1, 2))
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).flatten(0, 1)

    def _tiles(self, group: Group, heads: int) -> Iterator[tuple[int, int]]:
        """Rows [start, stop) of each piece that are attended at once."""
        step = TILE_ROWS
        if self.split:
            row = group.segments * heads * group.tables.shape[1] * self.config.latent_dim
            step = max(ROW_MULTIPLE, min(step, SPLIT_ELEMENTS // row // ROW_MULTIPLE * ROW_MULTIPLE))
        for start in range(0, group.length, step):
            yield start, min(start + step, group.length)

    # -------------------------------------------------------------- expanded: every head has keys and values

    def _expanding_pays(self, group: Group) -> bool:
        """Whether keys and values of all heads cost less than long products with latents: for a chunk of many rows.
        Multiplications per head; the fused operation has values as wide as keys."""
        c = self.config
        rows, keys, halves = group.length, group.keys(group.length), c.qk_nope_head_dim + c.v_head_dim
        absorbed = rows * halves * c.kv_lora_rank + rows * keys * 2 * c.latent_dim
        expanded = keys * halves * c.kv_lora_rank + rows * keys * 2 * c.qk_head_dim
        return expanded < absorbed and c.v_head_dim <= c.qk_head_dim

    def _expanded(self, q: torch.Tensor, group: Group, cache: Latents) -> torch.Tensor:
        """[segments * length, H, nope + rope] -> [segments * length, H, v]."""
        c = self.config
        latents = cache.read(group.tables)[:, : group.keys(group.length)]  # [S, N, latent]
        q = q.unflatten(0, (group.segments, group.length)).transpose(1, 2)  # [S, H, L, nope + rope]
        result = q.new_empty(group.segments, group.length, q.shape[1], c.v_head_dim)
        step = max(1, EXPANDED_ELEMENTS // (latents.shape[0] * latents.shape[1] * c.qk_head_dim))
        for head in range(0, q.shape[1], step):
            heads = slice(head, min(head + step, q.shape[1]))
            keys, values = self._expand(latents, heads)
            for start, stop in self._tiles(group, heads.stop - head):
                mask = group.mask(start, stop)
                seen, mask = mask.shape[-1], mask.expand(-1, keys.shape[1], -1, -1)
                part = _fused(
                    q[:, heads, start:stop], keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, scale=self.scale
                )[0]
                result[:, start:stop, heads] = part[..., : c.v_head_dim].transpose(1, 2)
        return result.flatten(0, 1)

    def _expand(self, latents: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, N, latent] -> keys and values of `heads`, [S, heads, N, nope + rope]; values have zeros behind them."""
        c = self.config
        shape = (*latents.shape[:2], heads.stop - heads.start, c.qk_head_dim)
        keys, values = latents.new_empty(shape), latents.new_zeros(shape)
        compressed, rope = latents.split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        compressed = compressed.reshape(-1, c.kv_lora_rank)  # one matrix: torch would multiply a strided batch in another way
        for target, weight in ((keys, self.w_uk), (values, self.w_uv)):
            width = weight.shape[1]
            target[..., :width] = F.linear(compressed, weight[heads].flatten(0, 1)).view(*shape[:3], width)
        keys[..., c.qk_nope_head_dim :] = rope.unsqueeze(2)
        return keys.transpose(1, 2), values.transpose(1, 2)

    # -------------------------------------------------------------- one product with a context

    def _context(
        self, q: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """q [S, H, L, latent], keys [S, 1, N, latent], mask [S, 1, L, N] -> [S, H, L, latent].

        Decode has its heads as L: then positions [S, 1] hold for all of them.
        """
        heads = q.shape[1]
        if not self.split:
            keys = keys.expand(-1, heads, -1, -1)
            return _fused(q, keys, keys, attn_mask=mask.expand(-1, heads, -1, -1), scale=self.scale)[0]
        missing = -q.shape[2] % ROW_MULTIPLE  # a product of few rows has other bits
        if missing:
            q, mask = F.pad(q, (0, 0, 0, missing)), F.pad(mask, (0, 0, 0, missing))
        segments, blocks, rows = q.shape[0], keys.shape[2] // BLOCK_TOKENS, q.shape[2]
        each = keys.view(segments, blocks, 1, BLOCK_TOKENS, -1).expand(-1, -1, heads, -1, -1).flatten(0, 1)
        every_q = q.unsqueeze(1).expand(-1, blocks, -1, -1, -1).flatten(0, 1)
        masks = mask.unflatten(-1, (blocks, -1)).permute(0, 3, 1, 2, 4).expand(-1, -1, heads, -1, -1).flatten(0, 1)
        out, lse = _fused(every_q, each, each, attn_mask=masks, scale=self.scale)
        out = out.unflatten(0, (segments, blocks)).float()
        lse = lse.view(segments, blocks, heads, rows)[..., : rows - missing]
        combined = self._combine(out[..., : rows - missing, :], lse, positions)
        return combined.to(q.dtype)

    def _combine(self, out: torch.Tensor, lse: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Partial results [S, B, H, L, D] and their log-sum-exp [S, B, H, L], in the order of blocks; a block behind a
        row's position adds exactly nothing."""
        begins = torch.arange(out.shape[1], device=out.device) * BLOCK_TOKENS
        unseen = begins[:, None] > positions[:, None]  # [S, B, L or 1]
        lse = lse.masked_fill(unseen.unsqueeze(2), -torch.inf)
        weights = torch.exp(lse - lse.amax(1, keepdim=True)).unsqueeze(-1)
        total, result = weights[:, 0], out[:, 0] * weights[:, 0]
        for block in range(1, out.shape[1]):
            total = total + weights[:, block]
            result = result + out[:, block] * weights[:, block]
        return result / total


def rows_are_independent(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether the two batched products, per head and with a context's block, give a row the same bits for every multiple
    of 16 rows, every place among them and any number of sequences."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    dim, rank, heads = config.latent_dim, config.kv_lora_rank, min(config.num_attention_heads, 8)
    q, keys, hidden = draw(2, heads, 512, dim), draw(2, 1, BLOCK_TOKENS, dim), draw(2, 1, 512, BLOCK_TOKENS)
    keys, mask = keys.expand(-1, heads, -1, -1), hidden.masked_fill(hidden > 1, -torch.inf).clamp_max(0).float()
    whole = _fused(q, keys, keys, attn_mask=mask.expand(-1, heads, -1, -1), scale=dim**-0.5)[0]
    for count in (16, 32, 48, 64, 192, 256):
        part = slice(16, 16 + count)
        one = _fused(
            q[1:, :, part], keys[1:], keys[1:], attn_mask=mask[1:, :, part].expand(-1, heads, -1, -1), scale=dim**-0.5
        )[0]
        if not torch.equal(one, whole[1:, :, part]):
            return False
    for inner, outer in ((config.qk_nope_head_dim, rank), (rank, config.v_head_dim)):
        x, weight = draw(heads, 512, inner), draw(heads, inner, outer)
        whole = torch.bmm(x, weight)
        if not all(torch.equal(torch.bmm(x[:, 16 : 16 + n], weight), whole[:, 16 : 16 + n]) for n in (16, 32, 48, 160)):
            return False
    return True
