"""CSA2 attention: a sliding window of the layer's own KV plus the top compressed entries of a source layer, one
softmax, a sink.

KV is one latent vector per token that is key and value for every head. Layers with compress ratio > 0 are Full (they
write compressed entries and select), Reindex (they select with their own queries over a Full layer's keys) or Reuse
(neither). The modules are plain maths on rows; `Pass` is the only thing here that touches rings and blocks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from .cache import Codecs, Entries, V41StatePool
from .config import ModelConfig
from .layers import Linear, RMSNorm, RopeTable, array, linear, loops_for, rotate
from .rows import Group, Rows

# Query rows are scored in tiles: at most so many (row, head, key) products, and so few rows that its first row is not
# scored against many keys that only its last row sees.
SCORE_ELEMENTS, SCORE_ROWS = 1 << 22, 128


# ------------------------------------------------------------------ maths


def attend(
    q: torch.Tensor,
    window: torch.Tensor,
    window_bias: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    selected: torch.Tensor | None = None,
    selected_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """One softmax over window keys, selected keys and a sink that only enters the denominator.

    q [T, H, D], window [T, W, D], window_bias [T, 1, W] (0 or -inf), sink [H], selected [T, K, D], selected_bias [T,
    1, K] -> [T, H, D]. Widths W and K are the same for every row, so a row's arithmetic does not depend on its
    neighbours.
    """
    rows, heads, width = q.shape[0], q.shape[1], window.shape[1]
    logits = [torch.baddbmm(window_bias, q, window.transpose(1, 2), alpha=scale)]
    if selected is not None:
        logits.append(torch.baddbmm(selected_bias, q, selected.transpose(1, 2), alpha=scale))
    logits.append(sink.view(1, heads, 1).expand(rows, heads, 1))
    weights = torch.softmax(torch.cat(logits, dim=-1), dim=-1)
    output = torch.bmm(weights[:, :, :width], window)
    if selected is not None:
        output = torch.baddbmm(output, weights[:, :, width:-1], selected)
    return output


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum_h w_h relu(q_h . k): q [S, n, H, D], keys [S, N, D], weights [S, n, H] -> [S, n, N]."""
    segments, rows, heads, _ = q.shape
    products = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2)).relu_()
    products = products.view(segments * rows, heads, -1)
    return torch.bmm(weights.reshape(segments * rows, 1, heads), products).view(segments, rows, -1)


def top_positions(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the k largest scores of each row; of equal scores the lower position is taken. fp32 [T, N] ->
    int64 [T, k].

    Exact: scores become order-preserving integers and the position is the rest of the key, so no two keys are equal.
    """
    width = scores.shape[-1]
    bits = (scores + 0.0).contiguous().view(torch.int32).long()  # + 0.0: -0 and 0 are the same score
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    position = torch.arange(width, device=scores.device)
    keys = ordered * (1 << 31) + (width - 1 - position)
    return torch.topk(keys, min(k, width), dim=-1, sorted=False).indices


def candidate_blocks(scores: torch.Tensor, visible: torch.Tensor, top_blocks: int, block_size: int) -> torch.Tensor:
    """Blocks of `block_size` positions that later index layers may select from, bool [T, ceil(N / block_size)].

    scores [T, N] are -inf where not visible; a block scores as its best position; the newest visible block is always
    kept and counts among the top blocks; blocks without a visible position never qualify.
    """
    best = nn.functional.pad(scores, (0, -scores.shape[-1] % block_size), value=-torch.inf)
    best = best.unflatten(-1, (-1, block_size)).amax(-1)
    newest = (visible[:, None] - 1) // block_size
    best = best.masked_fill(torch.arange(best.shape[-1], device=best.device) == newest, torch.inf)
    chosen = top_positions(best, top_blocks)
    return torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, best.gather(1, chosen) > -torch.inf)


# ------------------------------------------------------------------ one pass over the cache


class Pass:
    """What the layers of one forward pass share: rows, phases, cache views, and selections on their way to Reuse
    layers."""

    def __init__(
        self,
        config: ModelConfig,
        rows: Rows,
        paged: dict[str, Entries],
        states: V41StatePool,
        kinds: Codecs,
        fixed_width: bool,
        row_multiple: int,
    ) -> None:
        self.config, self.paged, self.states, self.codecs = config, paged, states, kinds
        self.row_multiple = row_multiple
        self.fixed_width = fixed_width  # always index_topk selected columns, whatever is visible
        # Rows that come alone have a compiled loop; with batch invariance they have the arithmetic of rows in chunks.
        self.alone = not fixed_width and loops_for(states.windows) is not None
        self.enter(rows)

    def enter(self, rows: Rows) -> None:
        """Start of a phase: the following layers run on these rows."""
        self.rows = rows
        self.selection: dict[int, torch.Tensor] = {}  # index owner -> positions [count, K], -1 where there is none
        self.gathered: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.keys: dict[tuple[int, int], torch.Tensor] = {}
        self.candidates: dict[int, torch.Tensor | None] = {}  # group begin -> allowed positions [T, N]
        self.visible_counts: dict[int, tuple[torch.Tensor, int]] = {}

    def visible(self, ratio: int) -> tuple[torch.Tensor, int]:
        """Entries that each row may see [count], and the largest such number."""
        if ratio not in self.visible_counts:
            self.visible_counts[ratio] = ((self.rows.positions + 1) // ratio, self.rows.limit // ratio)
        return self.visible_counts[ratio]

    # -------------------------------------------------------------- window KV

    def windows(self, layer: int, fresh: torch.Tensor) -> list[torch.Tensor]:
        """Store this pass's window KV [count, D] and return every row's window, per group [rows, W, D] (views where
        possible); of rows that come alone their own KV only, [rows, D]: the others lie in the ring."""
        rows, width = self.rows, self.config.sliding_window
        fresh = self.codecs.window.round(fresh).float()
        ring = self.states.windows[layer].flatten(0, 1)
        result = []
        for group in rows.groups:
            if group.length == 1 and self.alone:
                result.append(fresh[group.begin : group.end])
                continue
            old = ring.index_select(0, group.history).view(group.segments, width - 1, ring.shape[1])
            new = fresh[group.begin : group.end].view(group.segments, group.length, -1)
            line = torch.cat([old, new], dim=1)
            result.append(line.unfold(1, width, 1).transpose(2, 3).flatten(0, 1) if group.length > 1 else line)
        self._store(ring, fresh)
        return result

    def store_window(self, layer: int, fresh: torch.Tensor) -> None:
        """Store rows [count, D] that nobody reads in this pass (a draft stage's main KV)."""
        self._store(self.states.windows[layer].flatten(0, 1), self.codecs.window.round(fresh).float())

    def _store(self, ring: torch.Tensor, fresh: torch.Tensor) -> None:
        kept = self.rows.kept
        ring.index_copy_(0, self.rows.cells, fresh if kept is None else fresh.index_select(0, kept))

    # -------------------------------------------------------------- compressed KV

    def index_keys(self, layer: int, group: Group) -> torch.Tensor:
        """All index keys of the group's sequences, [segments, N, DI], N a whole number of blocks."""
        if (layer, group.begin) not in self.keys:
            self.keys[layer, group.begin] = self.paged[f"index.{layer}"].read_blocks(group.tables)
        return self.keys[layer, group.begin]

    def selected(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compressed KV that `layer` attends to: [count, K, D], bias [count, 1, K]."""
        owner, chooser = self.config.kv_owner(layer), self.config.index_owner(layer)
        if (owner, chooser) not in self.gathered:
            chosen = self.selection[chooser]
            missing = chosen < 0
            bias = torch.zeros(chosen.shape, device=chosen.device).masked_fill_(missing, -torch.inf).unsqueeze(1)
            values = self._gather_main(owner, chosen.masked_fill(missing, 0))
            nothing = missing.all(1)
            if bool(nothing.any()):  # their entry 0 is not written yet: it may be anything, and 0 * NaN is not 0
                values[nothing] = 0.0
            self.gathered[owner, chooser] = values, bias
        return self.gathered[owner, chooser]

    def _gather_main(self, layer: int, chosen: torch.Tensor) -> torch.Tensor:
        """[count, K] entry numbers -> [count, K, D]. Long pieces decode each entry once and copy rows of it."""
        entries, parts = self.paged[f"main.{layer}"], []
        for group in self.rows.groups:
            numbers = chosen[group.begin : group.end]
            pieces = self.rows.piece_of[group.begin : group.end]
            capacity = group.tables.shape[1] * entries.per_block
            if group.length * chosen.shape[1] > capacity:
                whole = entries.read_blocks(group.tables).flatten(0, 1)
                flat = numbers + ((pieces - group.first_piece) * capacity)[:, None]
                parts.append(whole.index_select(0, flat.flatten()).view(*numbers.shape, -1))
            else:
                block = self.rows.tables[pieces[:, None], numbers // entries.per_block]
                parts.append(entries.read(block, numbers % entries.per_block))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


# ------------------------------------------------------------------ modules


class Compressor(nn.Module):
    """Latents of `ratio` tokens: at 1 a projection, at 2 a per-channel softmax over the pair's gates, in fp32."""

    def __init__(self, config: ModelConfig, ratio: int) -> None:
        super().__init__()
        self.wkv = Linear(config.hidden_size, config.head_dim)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        if ratio > 1:
            self.wgate = Linear(config.hidden_size, config.head_dim)

    def project(self, u: torch.Tensor) -> torch.Tensor:
        """Ratio 2: [T, d] -> (kv, score) fp32 [T, 2, D]."""
        wide = u.float()
        kv, score = (linear(wide, part.weight.float(), part.tile) for part in (self.wkv, self.wgate))
        return torch.stack([kv, score], dim=1)

    @staticmethod
    def pool(pairs: torch.Tensor) -> torch.Tensor:
        """[E, token of the pair, (kv, score), D] -> [E, D]."""
        weights = torch.softmax(pairs[:, :, 1], dim=1)
        return (weights * pairs[:, :, 0]).sum(1)


class Indexer(nn.Module):
    """Scores compressed entries for a row and picks the best index_topk."""

    def __init__(self, config: ModelConfig, owns_keys: bool) -> None:
        super().__init__()
        self.config = config
        heads, dim = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, heads * dim)
        self.weights_proj = Linear(config.hidden_size, heads)
        if owns_keys:
            self.wk = Linear(config.head_dim, dim)
            self.k_norm = RMSNorm(dim, config.rms_norm_eps)

    def queries(self, u: torch.Tensor, qr: torch.Tensor, phases: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, d], [T, q_lora_rank] -> queries [T, H, DI] after RoPE, head weights [T, H] fp32."""
        heads, dim = self.config.index_n_heads, self.config.index_head_dim
        q = rotate(self.wq_b(qr).view(-1, heads, dim), phases)
        return q, self.weights_proj(u).float() * (dim**-0.5 * heads**-0.5)

    def select(self, layer: int, u: torch.Tensor, qr: torch.Tensor, phases: torch.Tensor, shared: Pass) -> torch.Tensor:
        """Entry numbers ascending, -1 behind them: [count, K]."""
        c = self.config
        visible, most = shared.visible(c.compress_ratios[layer])
        width = c.index_topk if shared.fixed_width else min(c.index_topk, most)
        numbers = torch.arange(width, device=u.device)
        everything = numbers.masked_fill(numbers >= visible[:, None], -1)
        if most <= c.index_topk:
            return everything  # no choice to make, and candidate blocks can hold all of it
        q, weights = self.queries(u, qr, phases)
        q = shared.codecs.index.round(q).float()
        for group in shared.rows.groups:
            if int(visible[group.begin : group.end].max()) > c.index_topk:
                everything[group.begin : group.end] = self._select_group(layer, group, q, weights, visible, shared)
            else:
                shared.candidates[group.begin] = None
        return everything

    def _select_group(
        self, layer: int, group: Group, q: torch.Tensor, weights: torch.Tensor, visible: torch.Tensor, shared: Pass
    ) -> torch.Tensor:
        c = self.config
        keys = shared.index_keys(c.kv_owner(layer), group)
        part, shape = slice(group.begin, group.end), (group.segments, group.length)
        q = q[part].view(*shape, *q.shape[1:])
        weights, seen = weights[part].view(*shape, -1), visible[part].view(shape)
        step = max(1, min(SCORE_ROWS, SCORE_ELEMENTS // (group.segments * c.index_n_heads * keys.shape[1])))
        chosen, candidates = [], []
        allowed = shared.candidates.get(group.begin) if c.uses_candidates(layer) else None
        entry = torch.arange(keys.shape[1], device=keys.device)
        blocks_in_all = -(-keys.shape[1] // c.candidate_block_size)
        for start in range(0, group.length, step):
            part = slice(start, start + step)
            reach = min(-(-int(seen[:, part].max()) // 64) * 64, keys.shape[1])  # no row of the tile sees more
            scores = index_scores(q[:, part], keys[:, :reach], weights[:, part])
            scores = scores.masked_fill_(entry[:reach] >= seen[:, part, None], -torch.inf).flatten(0, 1)
            if layer == c.candidate_source_layer_id:
                blocks = candidate_blocks(
                    scores, seen[:, part].flatten(), c.candidate_topk_blocks, c.candidate_block_size
                )
                blocks = nn.functional.pad(blocks, (0, blocks_in_all - blocks.shape[1]))
                candidates.append(blocks.view(group.segments, -1, blocks_in_all))
            if allowed is not None:
                blocks = allowed[:, part].flatten(0, 1).repeat_interleave(c.candidate_block_size, dim=1)
                scores = scores.masked_fill_(~blocks[:, :reach], -torch.inf)
            chosen.append(_ascending(scores, c.index_topk).view(group.segments, -1, c.index_topk))
        if candidates:
            shared.candidates[group.begin] = torch.cat(candidates, dim=1)
        return torch.cat(chosen, dim=1).flatten(0, 1)


def _ascending(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The best k positions ascending; unreachable (-inf) ones become -1 and come last. [T, N] -> [T, k]."""
    width = scores.shape[-1]
    chosen = top_positions(scores, k)
    chosen = chosen.masked_fill(scores.gather(1, chosen) == -torch.inf, width).sort(dim=-1).values
    chosen = chosen.masked_fill(chosen == width, -1)
    return nn.functional.pad(chosen, (0, k - chosen.shape[1]), value=-1)


class Attention(nn.Module):
    tile = 0

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        c = self.config = config
        # Draft stages are layers behind the backbone's, window only.
        self.layer, self.ratio = layer, c.compress_ratios[layer] if layer < c.num_hidden_layers else 0
        self.attn_sink = nn.Parameter(torch.zeros(c.num_attention_heads))
        self.wq_a = Linear(c.hidden_size, c.q_lora_rank)
        self.q_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.wq_b = Linear(c.q_lora_rank, c.num_attention_heads * c.head_dim)
        self.wkv = Linear(c.hidden_size, c.head_dim)
        self.kv_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.wo_a = Linear(c.num_attention_heads // c.o_groups * c.head_dim, c.o_groups * c.o_lora_rank)
        self.wo_b = Linear(c.o_groups * c.o_lora_rank, c.hidden_size)
        self.owns_kv, self.selects = layer in c.kv_source_layer_ids, layer in c.index_source_layer_ids
        if self.owns_kv:
            self.compressor = Compressor(c, self.ratio)
        if self.selects:
            self.indexer = Indexer(c, self.owns_kv)

    def forward(self, u: torch.Tensor, phases: torch.Tensor, shared: Pass) -> torch.Tensor:
        """Normed input u [padded, d], phases [padded, RD / 2] of this layer's RoPE -> [padded, d].

        A Full layer's entries of these rows must be written before (`write_sources`).
        """
        count = shared.rows.count
        qr = self.query_latent(u)
        q, kv = self.query(qr, phases), self.window_kv(u, phases)
        if self.selects:
            shared.selection[self.layer] = self.indexer.select(self.layer, u, qr, phases, shared)
        windows = shared.windows(self.layer, kv[:count])
        attended = self._attend(q.float(), windows, shared).to(u.dtype)
        return self.project(rotate(attended, phases.conj()))

    def query_latent(self, u: torch.Tensor) -> torch.Tensor:
        """[T, d] -> [T, q_lora_rank]."""
        return self.q_norm(self.wq_a(u))

    def query(self, qr: torch.Tensor, phases: torch.Tensor) -> torch.Tensor:
        """[T, q_lora_rank] -> [T, H, D], rotated."""
        return rotate(self.wq_b(qr).view(-1, self.config.num_attention_heads, self.config.head_dim), phases)

    def window_kv(self, u: torch.Tensor, phases: torch.Tensor) -> torch.Tensor:
        """[T, d] -> [T, D], rotated, not yet rounded."""
        return rotate(self.kv_norm(self.wkv(u)), phases)

    def _attend(self, q: torch.Tensor, windows: list[torch.Tensor], shared: Pass) -> torch.Tensor:
        """[padded, H, D] -> the same; padding rows give zeros."""
        selected, bias = shared.selected(self.layer) if self.ratio else (None, None)
        scale = self.config.head_dim**-0.5
        parts = []
        for group, window in zip(shared.rows.groups, windows, strict=True):
            part = slice(group.begin, group.end)
            if group.length == 1 and shared.alone:
                parts.append(self._attend_alone(q[part], window, part, selected, shared))
                continue
            more = () if selected is None else (selected[part], bias[part])
            parts.append(attend(q[part], window, shared.rows.window_bias[part], self.attn_sink, scale, *more))
        if shared.rows.padded > shared.rows.count:
            parts.append(torch.zeros_like(q[shared.rows.count :]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_alone(
        self, q: torch.Tensor, own: torch.Tensor, part: slice, selected: torch.Tensor | None, shared: Pass
    ) -> torch.Tensor:
        """Rows that come alone: q [T, H, D], their own KV [T, D] -> [T, H, D]."""
        from headrace.kernels.cpu.attention import attend_rows

        c, rows, out = self.config, shared.rows, torch.empty_like(q)
        if selected is None:
            some, chosen = q.new_empty(q.shape[0], 0, q.shape[2]), rows.positions.new_empty(q.shape[0], 0)
        else:
            some, chosen = selected[part], shared.selection[c.index_owner(self.layer)][part]
        ring = shared.states.windows[self.layer].flatten(0, 1)
        attend_rows(
            q.numpy(), own.numpy(), ring.numpy(), rows.bases[part].numpy(), rows.positions[part].numpy(),
            rows.floors[part].numpy(), c.sliding_window, shared.states.ring, array(self.attn_sink),
            np.float32(c.head_dim**-0.5), some.numpy(), chosen.numpy(), out.numpy(),
        )  # fmt: skip
        return out

    def project(self, attended: torch.Tensor) -> torch.Tensor:
        """Low-rank output: per group of heads, then all groups. [T, H, D] -> [T, d]."""
        c = self.config
        grouped = attended.view(attended.shape[0], c.o_groups, -1).transpose(0, 1)  # [G, T, H / G * D]
        weight = self.wo_a.weight.to(grouped.dtype).view(c.o_groups, c.o_lora_rank, -1).transpose(1, 2)
        if self.tile and grouped.shape[1] > self.tile:
            low = torch.cat([torch.bmm(part, weight) for part in grouped.split(self.tile, dim=1)], dim=1)
        else:
            low = torch.bmm(grouped, weight)
        return self.wo_b(low.transpose(0, 1).flatten(1))

    def write_sources(self, u: torch.Tensor, table: RopeTable, shared: Pass) -> None:
        """Compress rows u [padded, d] and write the finished entries and their index keys; keep an unfinished pair."""
        rows = shared.rows
        done, block, place = rows.entries(self.ratio)
        count = done.numel()
        done = nn.functional.pad(done, (0, -count % shared.row_multiple))
        latent = self._latents(u, done, shared)
        if not count:
            return
        phases = table(rows.positions[done] // self.ratio * self.ratio, rows.limit)  # at the entry's first token
        key = rotate(self.indexer.k_norm(self.indexer.wk(latent)), phases)
        main = rotate(latent, phases)
        shared.paged[f"main.{self.layer}"].write(block, place, main[:count])
        shared.paged[f"index.{self.layer}"].write(block, place, key[:count])

    def _latents(self, u: torch.Tensor, done: torch.Tensor, shared: Pass) -> torch.Tensor:
        """Normed latents of the entries that rows `done` [E] complete: [E, D]."""
        rows = shared.rows
        if self.ratio == 1:
            return self.compressor.norm(self.compressor.wkv(u).index_select(0, done))
        projected = self.compressor.project(u)[: rows.count]  # [count, 2, D]
        states = shared.states
        pending = states.pending[states.pending_index[self.layer]]  # [slots, ring, 2, D]
        before = pending[rows.slots, (rows.starts - 1) % states.pending_ring]  # the row before each piece
        pool = torch.cat([projected, before])
        previous = torch.where(
            rows.in_piece == 0, rows.count + rows.piece_of, torch.arange(rows.count, device=u.device) - 1
        )
        latent = Compressor.pool(torch.stack([pool[previous[done]], pool[done]], dim=1))
        tail = (rows.from_end <= states.pending_ring).nonzero().squeeze(1)
        pending[rows.slots[rows.piece_of[tail]], rows.positions[tail] % states.pending_ring] = projected[tail]
        return self.compressor.norm(latent.to(u.dtype))
