"""One forward pass of an MLA model over a batch of segments, and the output head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional as F

from ...batch import Segment
from ...cache import CacheSpec, KVPool
from ...lanes import Lanes
from .attention import Attention
from .cache import BLOCK_TOKENS, Latents, StatePool
from .config import ModelConfig
from .fused import FusedRows
from .layers import MLP, Linear, MoE, RopeTable, rms_norm
from .rows import Piece, Rows

# What a single row costs, in rows of a long chunk (measured: 0.2 ms and 0.2 ms per 150 positions, against 0.11 ms a row).
ROW_COST, ROW_CONTEXT = 2, 80


@dataclass(slots=True)
class Layer:
    input_norm: torch.Tensor
    attention: Attention
    post_norm: torch.Tensor
    feed_forward: MLP | MoE


class MlaModel:
    """Implements `headrace.engine.batch.Model`. Weights are the loader's. `head`: its rows in a part for each lane."""

    kind = "mla"

    def __init__(
        self,
        config: ModelConfig,
        spec: CacheSpec,
        store: str,
        layers: Sequence[Layer],
        embed: torch.Tensor,
        norm: torch.Tensor,
        head: Sequence[Linear],
        *,
        row_multiple: int = 1,
        fused: FusedRows | None = None,
    ) -> None:
        self.config, self.spec, self.store = config, spec, store
        self.layers, self.embed, self.norm, self.head = list(layers), embed, norm, list(head)
        self.row_multiple = row_multiple  # see `device.row_rule`
        self.fused = fused  # single rows go there, if there is one
        self.lanes = Lanes(len(self.head))
        self.dtype, self.device = norm.dtype, norm.device
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.eos_token_ids, self.max_model_len = config.eos_token_id, config.max_position_embeddings
        self.checkpoint_digest = ""
        self.rope = RopeTable(config.rope, config.qk_rope_head_dim)
        self._pools: WeakKeyDictionary[KVPool, list[Latents]] = WeakKeyDictionary()

    def new_states(self, slots: int) -> StatePool:
        return StatePool(slots, self.spec.layout_id)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], kv: KVPool, states: StatePool) -> torch.Tensor:
        """See `headrace.engine.batch.Model.forward`: final-norm hidden rows named by `outputs`, [R, hidden_size]."""
        _check(segments, states)
        for segment in segments:
            states.next[segment.slot] = segment.stop
        lanes = self.lanes.deal([self._cost(segment) for segment in segments]) if self.fused is not None else None
        self.rope.upto(max(segment.stop for segment in segments))  # lanes must not grow the table
        paged = self._paged(kv)
        if lanes is None:
            return self._run(segments, kv, paged)
        dealt = [[segments[i] for i in lane] for lane in lanes]
        parts = self.lanes.run([partial(self._run, few, kv, paged) for few in dealt])
        return _gather(segments, [i for lane in lanes for i in lane], parts)

    def _cost(self, segment: Segment) -> float:
        """Time of a segment, in rows of a chunk: single rows read every weight for themselves."""
        return ROW_COST + segment.stop / ROW_CONTEXT if len(segment.ids) == 1 else len(segment.ids)

    def _run(self, segments: Sequence[Segment], kv: KVPool, paged: list[Latents]) -> torch.Tensor:
        """Single rows by the compiled path where there is one, the others by torch -> wanted rows, in order."""
        single = [i for i, segment in enumerate(segments) if self.fused is not None and len(segment.ids) == 1]
        if not single:
            return self._forward(segments, paged)
        few = [segments[i] for i in single]
        rows = self._forward_single(few, kv)
        if len(single) == len(segments):
            return rows
        chunks = [i for i, segment in enumerate(segments) if len(segment.ids) != 1]
        return _gather(segments, single + chunks, [rows, self._forward([segments[i] for i in chunks], paged)])

    def _forward_single(self, segments: Sequence[Segment], kv: KVPool) -> torch.Tensor:
        """Segments of one row -> rows that are wanted."""
        x = self.fused.run(self, segments, kv)
        wanted = [row for row, segment in enumerate(segments) if segment.outputs]
        x = x if len(wanted) == len(segments) else x[wanted]
        return rms_norm(x, self.norm.float(), self.config.rms_norm_eps).to(self.dtype)

    def _forward(self, segments: Sequence[Segment], paged: list[Latents]) -> torch.Tensor:
        """Segments of any length by torch."""
        rows = self._rows([Piece(i, s.start, s.stop) for i, s in enumerate(segments)], segments)
        ids = [token for piece in rows.pieces for token in segments[piece.index].ids]
        ids = torch.tensor(ids + [0] * (rows.padded - rows.count), dtype=torch.int64, device=self.device)
        x = F.embedding(ids, self.embed).to(self.dtype)
        phases = self.rope(rows.positions, rows.limit)
        for layer, cache in zip(self.layers, paged, strict=True):
            normed = rms_norm(x, layer.input_norm, self.config.rms_norm_eps)
            queries, latents = layer.attention.project(normed, phases)
            self._write(cache, latents, rows)
            if layer is self.layers[-1]:  # nobody reads the others' last layer
                kept = self._wanted_rows(rows, segments)
                if kept is None:
                    return x.new_zeros(0, self.hidden_size)
                rows, take = kept
                if take is not None:
                    x, queries = x.index_select(0, take), queries.index_select(0, take)
            x = x + layer.attention.attend(queries, rows, cache)
            x = x + layer.feed_forward(rms_norm(x, layer.post_norm, self.config.rms_norm_eps))
        return self._outputs(x, rows, segments)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> [R, vocab_size] fp32."""
        count = hidden.shape[0]
        hidden = F.pad(hidden.to(self.dtype), (0, 0, 0, -count % self.row_multiple))
        if len(self.head) == 1:
            return self.head[0](hidden)[:count].float()
        out, begin, work = torch.empty(count, self.vocab_size), 0, []
        for part in self.head:
            target, begin = out[:, begin : begin + part.shape[0]], begin + part.shape[0]
            work.append(partial(lambda part, target: target.copy_(part(hidden)[:count]), part, target))
        self.lanes.run(work)
        return out

    def _paged(self, kv: KVPool) -> list[Latents]:
        if kv not in self._pools:
            self._pools[kv] = [Latents(kv, group, self.store, self.config, self.dtype) for group in self.spec.groups]
        return self._pools[kv]

    @staticmethod
    def _write(cache: Latents, latents: torch.Tensor, rows: Rows) -> None:
        if rows.fresh is not None:
            cache.clear(rows.fresh)
        latents = latents[: rows.count] if rows.written is None else latents.index_select(0, rows.written)
        cache.write(rows.block, rows.place, latents)

    # -------------------------------------------------------------- rows

    def _rows(self, pieces: list[Piece], segments: Sequence[Segment]) -> Rows:
        return Rows(pieces, segments, self.row_multiple, self.device)

    def _wanted_rows(self, rows: Rows, segments: Sequence[Segment]) -> tuple[Rows, torch.Tensor | None] | None:
        """Rows from each segment's first output on, and where each lies among `rows` (None: nothing changes); None when
        no output is wanted."""
        pieces = [Piece(i, min(s.outputs), max(s.outputs) + 1) for i, s in enumerate(segments) if s.outputs]
        if not pieces:
            return None
        if sum(piece.length for piece in pieces) == rows.count:
            return rows, None
        kept, at = self._rows(pieces, segments), rows.first_rows()
        take = [at[piece.index] + p for piece in kept.pieces for p in range(piece.start, piece.stop)]
        return kept, torch.tensor(take + [0] * (kept.padded - kept.count), dtype=torch.int64, device=self.device)

    def _outputs(self, x: torch.Tensor, rows: Rows, segments: Sequence[Segment]) -> torch.Tensor:
        """Rows named by each segment's `outputs`, in the order of the segments, after the final norm."""
        at = rows.first_rows()
        wanted = [at[i] + position for i, segment in enumerate(segments) for position in segment.outputs]
        index = torch.tensor(wanted, dtype=torch.int64, device=self.device)
        return rms_norm(x.index_select(0, index), self.norm, self.config.rms_norm_eps)


def _gather(segments: Sequence[Segment], order: Sequence[int], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Wanted rows of segments taken in `order` -> in the order of all segments."""
    begins, at = {}, 0
    for i in order:
        begins[i] = at
        at += len(segments[i].outputs)
    rows = [begins[i] + k for i, segment in enumerate(segments) for k in range(len(segment.outputs))]
    joined = torch.cat(list(parts))
    return joined if rows == [*range(at)] else joined[rows]


def _check(segments: Sequence[Segment], states: StatePool) -> None:
    """Refuse a batch that contradicts itself before anything is written."""
    for segment in segments:
        if not 0 <= segment.slot < states.slots:
            raise ValueError(f"state slot {segment.slot} is not one of {states.slots}")
        if not segment.ids:
            raise ValueError(f"slot {segment.slot} has a segment without rows at position {segment.start}")
        if len(segment.block_table) * BLOCK_TOKENS < segment.stop:
            raise ValueError(
                f"slot {segment.slot}: {len(segment.block_table)} blocks of {BLOCK_TOKENS} tokens don't hold position "
                f"{segment.stop - 1}"
            )
        for position in segment.outputs:
            if not segment.start <= position < segment.stop:
                raise ValueError(f"output {position} is not a row [{segment.start}, {segment.stop})")
