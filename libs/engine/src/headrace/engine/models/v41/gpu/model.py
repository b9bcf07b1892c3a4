"""One forward pass of V4.1 on a GPU, from the kernels of `headrace.kernels`; weights stay FP8 and FP4 in memory.

The arithmetic is that of `..model` with activations in bf16. A batch whose pieces are all short (decode, verification) is
one graph of operations of fixed shape: captured once for each size and replayed. Long pieces (prefill) run the same
functions uncaptured. Knows layers and rows; policy, requests and sampling are others'.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.kernels._triton import cdiv, next_power_of_2
from headrace.kernels.embedding import embedding
from headrace.kernels.engram import engram_gate
from headrace.kernels.gemm_upcast import gemm_upcast
from headrace.kernels.indexer import CANDIDATE_BLOCK, block_max, index_scores
from headrace.kernels.kv_layouts import PagedKV
from headrace.kernels.kv_store import kv_store
from headrace.kernels.mhc import Routed, mhc_coefficients, mhc_pass
from headrace.kernels.places import Layout
from headrace.kernels.rmsnorm import rmsnorm
from headrace.kernels.rope import rope, rope_fp4, rope_tables
from headrace.kernels.routing import ALIGNMENT, combine, permute, plan_choices, route
from headrace.kernels.sparse_attention import sparse_attention
from headrace.kernels.swiglu import swiglu
from headrace.kernels.topk import topk

from ....batch import Segment
from ....cache import CacheSpec, KVPool
from ..block import mean_of_streams
from ..cache import DECODER, DRAFT, ENCODER, cache_spec, codecs
from ..config import ModelConfig
from ..draft import Choose, Drafts, finish_drafts, noise_block
from ..engram import NgramHash, RowReader
from ..images import hashed_ids, image_values
from ..layers import rope_frequencies
from ..model import check_batch
from ..rows import Piece, piece_of, row_zero
from .beside import Beside
from .draft import Draft, block_rows, block_values
from .graph import Graph, Images, Inputs, Value, padded_rows, staged
from .rows import Copies, GpuRows, HostRows, SentTables, host_rows, table_rows
from .states import GpuStatePool
from .weights import Attention, Experts, Layer, Mix, Weight

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512)  # rows that a decode graph may have; above, the next multiple of 256
FEW = 4096  # rows for which a constant is kept
# What can be launched by itself, for `bench --apart`: SwiGLU, RoPE of queries, combining experts' rows before mHC's pass,
# copying rows to where experts multiply them, the second half of their plan. "parts": the output projection adds those of its
# sum itself. The result is the same.
APART = ("swiglu", "rope", "combine", "gather", "parts", "plan")
LONGEST = 8  # rows of a piece that go through the ring; a longer piece gets a line of its own


def runs(config: ModelConfig) -> str:
    """Why the kernels cannot run this model; "" when they can."""
    c = config
    fixed = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "hc_mult": 4}
    for name, want in fixed.items():
        if getattr(c, name) != want:
            return f"{name} is {getattr(c, name)}, the kernels are for {want}"
    if c.index_n_heads not in (16, 32, 64, 128):
        return f"index_n_heads is {c.index_n_heads}, the kernels are for 16, 32, 64 or 128"
    if c.candidate_source_layer_id is not None and c.candidate_block_size != CANDIDATE_BLOCK:
        return f"candidate_block_size is {c.candidate_block_size}, the kernels are for {CANDIDATE_BLOCK}"
    widths = {
        "hidden_size": c.hidden_size,
        "q_lora_rank": c.q_lora_rank,
        "moe_intermediate_size": c.moe_intermediate_size,
        "o_groups x o_lora_rank": c.o_groups * c.o_lora_rank,
        "num_attention_heads / o_groups x head_dim": c.num_attention_heads // c.o_groups * c.head_dim,
    }
    if c.engram_layer_ids:
        widths["Engram's memory"] = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
    for name, width in widths.items():
        if width % 128:
            return f"{name} is {width}, the kernels need a multiple of 128"
    if c.o_lora_rank % 32:
        return f"o_lora_rank is {c.o_lora_rank}, the kernels need a multiple of 32"
    return ""


class Selection:
    """Compressed entries that rows attend to, on their way from the layers that choose to those that reuse."""

    def __init__(self) -> None:
        self.numbers: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # index owner -> `V41Gpu._select`
        self.entries: dict[tuple[int, int], torch.Tensor] = {}  # (KV owner, index owner) -> pool entries int32
        self.candidates: torch.Tensor | None = None  # int32 [padded, C] blocks


@dataclass(slots=True)
class Ready:
    """A pass of one row a sequence, of which all but the tokens, and Engram's memory of them, is on the device."""

    segments: list[Segment]
    starts: list[int]
    pieces: list[Piece]
    floors: list[list[int]]  # the oldest rows that each may see, in encoder and in decoder layers
    graph: Graph
    memory: tuple[int, ...]  # where its graph finds KV and states
    outputs: torch.Tensor  # int64 [R]: rows of the pass


class V41Gpu:
    """Implements `headrace.engine.batch.Model`; `gpu/loader.py` makes it."""

    kind = "v41"

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        layers: list[Layer],
        embed: torch.Tensor,
        norm: torch.Tensor,
        head: Weight,
        ngrams: NgramHash | None,
        readers: dict[int, RowReader],
        draft: Draft | None = None,
        *,
        numerics: str,
        batch_invariant: bool,
        keep_rows: int | None,
        graphs: bool,
    ) -> None:
        c = self.config = config
        self.device, self.dtype = device, torch.bfloat16
        self.spec: CacheSpec = cache_spec(c, "quantized", numerics, batch_invariant, keep_rows)
        self.codecs = codecs(c, "quantized")
        self.batch_invariant, self.graphs = batch_invariant, graphs
        self.vocab_size, self.hidden_size = c.vocab_size, c.hidden_size
        self.eos_token_ids, self.max_model_len = c.eos_token_id, c.max_position_embeddings
        self.checkpoint_digest = ""
        self.layers, self.embed, self.norm, self.head = layers, embed, norm, head
        self.ngrams, self.readers, self.mtp = ngrams, readers, draft
        self.frequencies = torch.stack([rope_frequencies(c, kind) for kind in (False, True)]).to(device, torch.float32)
        self.first_stream = torch.eye(1, c.hc_mult, device=device).repeat(FEW, 1)  # coefficients that take the first
        self.captured: dict[tuple, Graph] = {}
        self.apart: frozenset[str] = frozenset()  # of APART; the others are part of another launch
        self.overlap = True  # whether captured passes use the streams below
        self.mixing, self.aside = Beside(device, 1), Beside(device, 2)
        self._ready: Ready | None = None

    @property
    def draft_block(self) -> int:
        """Tokens that a draft step proposes; 0: the checkpoint has no draft."""
        return self.config.dspark_block_size if self.mtp else 0

    def set_confidence_normed(self, normed: bool) -> None:
        """Which hidden vector the draft's confidence head reads, instead of what config.json says."""
        self.mtp.heads.confidence_head.normed = normed

    def new_states(self, slots: int, scratch: int = 0) -> GpuStatePool:
        """`slots` state slots. `scratch`: entries of chunks longer than a ring that are made room for at once."""
        scratch = max(scratch, _padded(slots) * self.draft_block)  # a pool that grows later loses its captured graphs
        return GpuStatePool(self.config, self.spec, self.codecs, slots, scratch, self.device)

    # -------------------------------------------------------------- entry points

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], kv: KVPool, states: GpuStatePool) -> torch.Tensor:
        """See `headrace.engine.batch.Model.forward`: final-norm hidden rows named by `outputs`, bf16 [R, hidden_size]."""
        ready, self._ready = self._ready, None
        if ready is not None and _holds(ready, segments, kv, states):
            ids = np.zeros(ready.graph.inputs[0].shape, np.int32)
            ids[: len(segments)] = [segment.ids[0] for segment in segments]
            memory = self._memory(ready.pieces, segments, len(ids))
            ready.graph.load({0: ids} | dict(enumerate(memory.values(), 3)))
            return ready.graph.replay().index_select(0, ready.outputs)
        check_batch(segments, states)
        pieces = [self._encoder_piece(i, s, states) for i, s in enumerate(segments)]
        kept = self._decoder_pieces(pieces, segments, states)
        short = kept == pieces and all(len(s.ids) <= LONGEST and not s.images for s in segments)
        blocks = self._blocks(pieces)
        host = self._host(pieces, segments, states, short)
        states.ensure_scratch(host.scratch)
        ids = np.zeros(host.matrix.shape[1], np.int32)
        ids[: host.count] = [token for piece in pieces for token in segments[piece.index].ids]
        memory = self._memory(pieces, segments, host.matrix.shape[1])
        if short and self.graphs:
            hidden = self._replay(host, ids, memory, pieces, segments, blocks, kv, states)
        else:
            hidden = self._uncaptured(host, ids, memory, pieces, kept, segments, blocks, kv, states)
        if hidden is None:
            return torch.zeros(0, self.hidden_size, dtype=self.dtype, device=self.device)
        return hidden.index_select(0, self._upload(_places(kept, segments)))

    @torch.inference_mode()
    def prepare(self, segments: Sequence[Segment], kv: KVPool, states: GpuStatePool) -> None:
        """Of a coming `forward`, bring to the device what does not depend on its tokens (`ids`: one a segment, any), while the
        device works on the pass before. It is used if the next `forward` has these very segments and finds states as they are
        known now; if not, nothing is lost."""
        self._ready = None
        if not self.graphs or not segments or any(len(s.ids) != 1 or s.images or s.start < s.decoder_floor for s in segments):
            return
        check_batch(segments, states)
        slots, starts = [s.slot for s in segments], [s.start for s in segments]
        floors = [states.oldest(phase, slots, starts) for phase in (ENCODER, DECODER)]
        given = [s.window_floor for s in segments], [max(s.window_floor, s.decoder_floor) for s in segments]
        pieces, kept = (self._single_rows(segments, map(max, *lows)) for lows in zip(floors, given, strict=True))
        if pieces != kept:
            return
        host, blocks = self._host(pieces, segments, states, True), self._blocks(pieces)
        graph = self.captured.get(_key(host, pieces, blocks, kv, states))
        if graph is not None:
            graph.tables.put(pieces, segments, states.tables, self.spec.block_tokens)
            graph.load({1: host.matrix, 2: graph.tables})
            outputs = self._upload(_places(pieces, segments))
            self._ready = Ready(list(segments), starts, pieces, floors, graph, _memory_of(kv, states), outputs)

    def _single_rows(self, segments: Sequence[Segment], floors: Iterable[int]) -> list[Piece]:
        window = self.config.sliding_window
        return [
            piece_of(i, s.start, s.start + 1, floor, window) for i, (s, floor) in enumerate(zip(segments, floors, strict=True))
        ]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> [R, vocab_size] fp32."""
        return self.head(hidden.to(self.dtype), torch.float32, self.batch_invariant)

    @torch.inference_mode()
    def draft(
        self, slots: Sequence[int], anchors: Sequence[int], positions: Sequence[int], states: GpuStatePool, choose: Choose
    ) -> Drafts:
        """As `..model.V41Model.draft`."""
        c = self.config
        if self.mtp is None:
            raise ValueError("this checkpoint has no draft (num_nextn_predict_layers 0)")
        count, size = len(slots), c.dspark_block_size
        values = block_values(states, slots, anchors, positions, _padded(count) if self.graphs else count)
        states.ensure_scratch(values.shape[1] * size)
        if self.graphs:
            key = ("draft", *values.shape, *states.places)
            parts = self._captured(key, lambda values: self._draft_pass(values, states), [values])
        else:
            parts = self._draft_pass(self._upload(values), states)
        raw, normed, base = (part[: count * size].unflatten(0, (count, size)) for part in parts)
        anchor = self._upload(np.array(anchors, np.int64))
        return finish_drafts(self.mtp.heads, raw, normed, base.clone(), anchor, choose, 1)

    def _draft_pass(self, values: torch.Tensor, states: GpuStatePool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All stages for the blocks of `block_values`: hidden rows [R * block, d] before and after the norm, base logits."""
        c = self.config
        rows = block_rows(c, states, values)
        phases = rope_tables(rows.position, self.frequencies[0])
        x, pre = self._enter(noise_block(c, rows.anchor).int())
        expand = None
        for i, stage in enumerate(self.mtp.stages):
            x, u, parts = self._mhc(x, expand, pre, stage.attn_mix.fn)
            next_pre, post, comb = self._coefficients(parts, stage.attn_mix)
            qr, kv = self._latent(stage.attn, rmsnorm(u, stage.attn_norm, c.rms_norm_eps))
            q = self._query(stage.attn, qr, phases)
            window = states.window_kv(c.num_hidden_layers + i)
            kv_store(kv, window, rows.own, stage.attn.kv_norm, c.rms_norm_eps, phases)
            o, _ = sparse_attention(
                q, window, rows.index, c.head_dim**-0.5, None, None, stage.attn.sink, phases, self.batch_invariant
            )
            x, u, parts = self._mhc(x, (self._project(stage.attn, o), post, comb), next_pre, stage.ffn_mix.fn)
            pre, post, comb = self._coefficients(parts, stage.ffn_mix)
            expand = self._experts(stage.ffn, rmsnorm(u, stage.ffn_norm, c.rms_norm_eps), rows.live), post, comb
        _, raw, _ = self._mhc(x, expand, pre)
        normed = rmsnorm(raw, self.mtp.norm, c.rms_norm_eps)
        return raw, normed, self.logits(normed)

    # -------------------------------------------------------------- the host's part

    def _blocks(self, pieces: list[Piece]) -> int:
        """Width of block tables."""
        return _bucket(-(-max(piece.stop for piece in pieces) // self.spec.block_tokens))

    def _encoder_piece(self, index: int, segment: Segment, states: GpuStatePool) -> Piece:
        first = states.advance(ENCODER, segment.slot, segment.start, segment.stop)
        return piece_of(index, segment.start, segment.stop, max(first, segment.window_floor), self.config.sliding_window)

    def _decoder_pieces(self, pieces: list[Piece], segments: Sequence[Segment], states: GpuStatePool) -> list[Piece]:
        kept = []
        for piece in pieces:
            segment = segments[piece.index]
            start = min(max(piece.start, segment.decoder_floor), piece.stop)
            if start < piece.stop:
                first = states.advance(DECODER, segment.slot, start, piece.stop)
                states.advance(DRAFT, segment.slot, start, piece.stop)
                floor = max(first, segment.window_floor, segment.decoder_floor)
                same = start == piece.start and floor == piece.floor  # the usual case of decode, where a comparison is dear
                kept.append(piece if same else piece_of(piece.index, start, piece.stop, floor, self.config.sliding_window))
        return kept

    def _host(self, pieces: list[Piece], segments: Sequence[Segment], states: GpuStatePool, short: bool) -> HostRows:
        count = sum(piece.length for piece in pieces)
        return host_rows(
            pieces,
            segments,
            window=self.config.sliding_window,
            ring=states.ring,
            slots=states.slots,
            longest=LONGEST,
            padded=_padded(count) if short and self.graphs else count,
        )

    def _memory(self, pieces: list[Piece], segments: Sequence[Segment], padded: int) -> dict[int, torch.Tensor]:
        """Engram rows of this batch, in host memory or on the device: layer -> bf16 [padded, hashes * dim]."""
        if self.ngrams is None:
            return {}
        hashed = self.ngrams.contexts([(segments[p.index].prev_ids, hashed_ids(segments[p.index])) for p in pieces])
        result = {}
        for layer, read in self.readers.items():
            rows = self.ngrams.rows(layer, hashed)
            values = read(rows.reshape(-1)).view(rows.shape[0], -1)
            result[layer] = padded_rows(values, padded, self.dtype, self.device)
        return result

    def _images(self, pieces: list[Piece], segments: Sequence[Segment], padded: int) -> Images | None:
        if not any(segments[piece.index].images for piece in pieces):
            return None
        row_of = row_zero(pieces)
        spans = [(row_of[p.index] + part.start, part) for p in pieces for part in segments[p.index].images]
        rows = np.concatenate([np.arange(row, row + part.stop - part.start) for row, part in spans])
        inside = np.zeros(padded, np.bool_)
        inside[rows] = True
        values = torch.cat([image_values(part) for _, part in spans]).to(self.device, self.dtype)
        return Images(self._upload(inside), self._upload(rows), values)

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        return staged(values, self.device).to(self.device, non_blocking=True)

    def _rows(self, host: HostRows, matrix: torch.Tensor, tables: torch.Tensor, states: GpuStatePool) -> GpuRows:
        copies = None if host.copies is None else Copies(*(self._upload(part) for part in host.copies))
        window, block_tokens = self.config.sliding_window, self.spec.block_tokens
        layout = Layout(window, states.ring, states.pending_ring, states.slots, block_tokens)
        return GpuRows(matrix, tables, self.frequencies, layout, copies)

    def _uncaptured(
        self,
        host: HostRows,
        ids: np.ndarray,
        memory: dict[int, torch.Tensor],
        pieces: list[Piece],
        kept: list[Piece],
        segments: Sequence[Segment],
        blocks: int,
        kv: KVPool,
        states: GpuStatePool,
    ) -> torch.Tensor | None:
        def placed(host: HostRows, pieces: list[Piece]) -> GpuRows:
            tables = table_rows(pieces, segments, states.tables, blocks, self.spec.block_tokens)
            return self._rows(host, self._upload(host.matrix), self._upload(tables), states)

        rows = placed(host, pieces)
        memory = {layer: staged(values, self.device).to(self.device, non_blocking=True) for layer, values in memory.items()}
        inputs = Inputs(self._upload(ids), rows, memory, images=self._images(pieces, segments, host.matrix.shape[1]))
        if not kept:
            self.run(inputs, kv, states, until=self.config.cut_layer)
            return None
        if kept != pieces:
            second = self._host(kept, segments, states, False)
            states.ensure_scratch(second.scratch)
            inputs.decoder = placed(second, kept), self._upload(_among(kept, pieces))
        return self.run(inputs, kv, states)

    def _replay(
        self,
        host: HostRows,
        ids: np.ndarray,
        memory: dict[int, torch.Tensor],
        pieces: list[Piece],
        segments: Sequence[Segment],
        blocks: int,
        kv: KVPool,
        states: GpuStatePool,
    ) -> torch.Tensor:
        key = _key(host, pieces, blocks, kv, states)
        tables = self.captured[key].tables if key in self.captured else SentTables(_padded(len(pieces)), blocks)
        tables.put(pieces, segments, states.tables, self.spec.block_tokens)

        def run(ids: torch.Tensor, matrix: torch.Tensor, tables: torch.Tensor, *memory: torch.Tensor) -> torch.Tensor:
            rows = self._rows(host, matrix, tables, states)
            self.mixing.on = self.aside.on = self.overlap
            try:
                return self.run(Inputs(ids, rows, dict(zip(layers, memory, strict=True))), kv, states)
            finally:
                self.mixing.off(), self.aside.off()

        layers = list(memory)
        return self._captured(key, run, [ids, host.matrix, tables, *memory.values()])

    def _captured(self, key: tuple, run: Callable[..., Any], values: list[Value | SentTables]) -> Any:
        """What `run` makes of the values: captured when a key is new, then replayed."""
        if key not in self.captured:
            other = next(iter(self.captured.values()), None)
            self.captured[key] = Graph(run, values, self.device, other and other.pool)
        return self.captured[key](values)

    # -------------------------------------------------------------- the device's part

    def run(self, inputs: Inputs, kv: KVPool, states: GpuStatePool, until: int | None = None) -> torch.Tensor | None:
        """All layers: final-norm hidden rows [padded, d]. `until`: stop when that layer's sources are written."""
        c, rows = self.config, inputs.rows
        memory, inside = inputs.memory, None
        x, pre = self._enter(inputs.ids)
        if inputs.images is not None:
            x.index_copy_(0, inputs.images.rows, inputs.images.embeddings.unsqueeze(1).expand(-1, c.hc_mult, -1))
            inside = inputs.images.inside
        selection, expand, taps = Selection(), None, {}
        for index, layer in enumerate(self.layers):
            if layer.engram is not None:
                x, expand = self._mhc(x, expand)[0] if expand else x, None
                x = self._engram(layer, x, memory[index], inside)
            x, u, parts = self._mhc(x, expand, pre, layer.attn_mix.fn)
            next_pre, post, comb = self.mixing.run(self._coefficients, parts, layer.attn_mix)
            u = rmsnorm(u, layer.attn_norm, c.rms_norm_eps)
            if layer.attn.source is not None:
                self.aside.run(self._write_source, index, layer.attn, u, rows, kv, states)
            if index == until:
                return None
            if index == c.cut_layer and inputs.decoder is not None:
                rows, take = inputs.decoder
                x, u, next_pre, post, comb = (t.index_select(0, take) for t in (x, u, next_pre, post, comb))
                memory = {after: values.index_select(0, take) for after, values in memory.items() if after > index}
                inside = None if inside is None else inside.index_select(0, take)
                taps = {before: tap.index_select(0, take) for before, tap in taps.items()}
            if self.mtp is not None and index in c.dspark_target_layer_ids:
                taps[index] = mean_of_streams(x)
            if index == c.cut_layer:
                selection = Selection()
            o = self._attention(index, layer.attn, u, rows, rows.phases(c.compress_ratios[index] > 0), selection, kv, states)
            self.mixing.join()
            x, u, parts = self._mhc(x, (o, post, comb), next_pre, layer.ffn_mix.fn)
            pre, post, comb = self.mixing.run(self._coefficients, parts, layer.ffn_mix)
            o = self._experts(layer.ffn, rmsnorm(u, layer.ffn_norm, c.rms_norm_eps), rows.places.live, inside)
            self.mixing.join()
            expand = o, post, comb
        if self.mtp is not None:
            ordered = [taps[layer] for layer in c.dspark_target_layer_ids]
            self.mtp.feed(c, ordered, rows, rows.phases(False), states, self.batch_invariant)
        _, hidden, _ = self._mhc(x, expand, pre)
        return rmsnorm(hidden, self.norm, c.rms_norm_eps)

    def _enter(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [T] -> streams of their embeddings [T, hc, d] and the coefficients that take the first."""
        rows, streams = ids.numel(), self.config.hc_mult
        pre = self.first_stream
        pre = pre[:rows] if rows <= len(pre) else pre[:1].repeat(rows, 1)
        return embedding(self.embed, ids, streams).view(rows, streams, -1), pre

    def _mhc(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        return mhc_pass(*args, batch_invariant=self.batch_invariant)

    def _coefficients(self, parts: torch.Tensor, mix: Mix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c = self.config
        return mhc_coefficients(parts, mix.base, mix.scale, c.hidden_size, c.rms_norm_eps, c.hc_eps, c.hc_sinkhorn_iters)

    def _engram(self, layer: Layer, x: torch.Tensor, memory: torch.Tensor, inside: torch.Tensor | None) -> torch.Tensor:
        engram, live = layer.engram, None if inside is None else ~inside
        projected = engram.wkv(memory, invariant=self.batch_invariant)
        return engram_gate(x, projected, engram.q_weight, engram.k_weight, self.config.rms_norm_eps, live)

    # -------------------------------------------------------------- attention

    def _attention(
        self,
        index: int,
        attn: Attention,
        u: torch.Tensor,
        rows: GpuRows,
        phases: tuple[torch.Tensor, torch.Tensor],
        selection: Selection,
        kv: KVPool,
        states: GpuStatePool,
    ) -> torch.Tensor:
        """u bf16 [padded, d] -> [padded, d]."""
        c = self.config
        qr, own = self._latent(attn, u)
        window = states.window_kv(index)
        extra, entries = self.aside.run(self._prepare, index, attn, u, qr, own, rows, phases, selection, kv, states)
        q = self._query(attn, qr, phases)
        self.aside.join()
        out, _ = sparse_attention(
            q, window, rows.places.window_index, c.head_dim**-0.5, extra, entries, attn.sink, phases, self.batch_invariant
        )
        if rows.copies is not None:
            _copy(states.windows[index], rows.copies.keep_from, rows.copies.keep_to)
        return self._project(attn, out)

    def _prepare(
        self,
        index: int,
        attn: Attention,
        u: torch.Tensor,
        qr: torch.Tensor,
        own: torch.Tensor,
        rows: GpuRows,
        phases: tuple[torch.Tensor, torch.Tensor],
        selection: Selection,
        kv: KVPool,
        states: GpuStatePool,
    ) -> tuple[PagedKV | None, torch.Tensor | None]:
        """What attention reads besides queries: window KV is written, compressed entries are chosen."""
        c = self.config
        if rows.copies is not None:
            _copy(states.windows[index], rows.copies.history_from, rows.copies.history_to)
        kv_store(own, states.window_kv(index), rows.places.window_store, attn.kv_norm, c.rms_norm_eps, phases)
        if attn.selector is not None:
            selection.numbers[index] = self._select(index, attn, u, qr, rows, phases, selection, kv)
        return self._chosen(index, rows, selection, kv) if c.compress_ratios[index] else (None, None)

    def _latent(self, attn: Attention, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """u bf16 [T, d] -> the queries' latent [T, q_lora_rank]; window KV [T, D] before norm and RoPE."""
        c = self.config
        first = attn.first(u, invariant=self.batch_invariant)
        latent, own = first.split([c.q_lora_rank, c.head_dim], dim=1)
        return rmsnorm(latent, attn.q_norm, c.rms_norm_eps), own

    def _query(self, attn: Attention, qr: torch.Tensor, phases: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Queries [T, H, D], rotated."""
        c = self.config
        if "rope" not in self.apart:
            q = attn.wq(qr, invariant=self.batch_invariant, rope=(*phases, c.head_dim))
            return q.view(-1, c.num_attention_heads, c.head_dim)
        return rope(attn.wq(qr, invariant=self.batch_invariant).view(-1, c.num_attention_heads, c.head_dim), *phases)

    def _project(self, attn: Attention, out: torch.Tensor) -> torch.Tensor:
        """[padded, H, D] -> [padded, d], or parts of it for mHC's pass: per group of heads, then all groups."""
        c, rows, first = self.config, out.shape[0], attn.wo_a
        low = gemm_upcast(
            out.view(rows, c.o_groups, -1), first.data, first.scale, first.name, batch_invariant=self.batch_invariant,
            side_by_side=True,
        )  # fmt: skip
        in_parts = "parts" not in self.apart and rows <= SIZES[-1]
        return attn.wo_b(low.view(rows, -1), invariant=self.batch_invariant, in_parts=in_parts)

    def _write_source(
        self, index: int, attn: Attention, u: torch.Tensor, rows: GpuRows, kv: KVPool, states: GpuStatePool
    ) -> None:
        """Compress the rows; finished entries and their index keys go into the pool, unfinished pairs into the state."""
        c, source, ratio = self.config, attn.source, self.config.compress_ratios[index]
        phases = rows.entry_phases(ratio)
        store = rows.entry_store(ratio)
        x, gate = self._compress(index, attn, u, rows, states)
        latent = kv_store(x, self._paged(kv, "main", index), store, source.norm, c.rms_norm_eps, phases, gate)
        key = source.wk(latent, invariant=self.batch_invariant)
        kv_store(key, self._paged(kv, "index", index), store, source.k_norm, c.rms_norm_eps, phases)

    def _compress(
        self, index: int, attn: Attention, u: torch.Tensor, rows: GpuRows, states: GpuStatePool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What `kv_store` compresses: ratio 1 (projection [padded, D], None); ratio 2 fp32 ([2 padded, D], gate)."""
        source, invariant = attn.source, self.batch_invariant
        if not source.gated:
            return source.wkv(u, invariant=invariant), None
        fresh = source.wkv(u, torch.float32, invariant).view(rows.padded, 2, -1)
        return rows.pairs(fresh, states.pending[states.pending_index[index]])

    # -------------------------------------------------------------- selection

    def _select(
        self,
        index: int,
        attn: Attention,
        u: torch.Tensor,
        qr: torch.Tensor,
        rows: GpuRows,
        phases: tuple[torch.Tensor, torch.Tensor],
        selection: Selection,
        kv: KVPool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Entry numbers ascending, -1 behind them: int32 [padded, index_topk]; of candidate blocks, given beside, columns."""
        c, ratio = self.config, self.config.compress_ratios[index]
        visible, most = rows.visible(ratio), rows.tokens // ratio
        if most <= c.index_topk:
            numbers = torch.arange(most, dtype=torch.int32, device=self.device)
            return numbers.expand(rows.padded, -1).masked_fill(numbers >= visible.unsqueeze(1), -1), None
        q = attn.selector.wq(qr, invariant=self.batch_invariant).view(-1, c.index_n_heads, c.index_head_dim)
        q = rope_fp4(q, *phases)
        weights = attn.selector.weights(u, torch.float32, self.batch_invariant)
        weights = weights * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)
        keys = self._paged(kv, "index", c.kv_owner(index))
        allowed = selection.candidates if c.uses_candidates(index) else None
        scores = index_scores(q, weights, keys, rows.tables, rows.sequence, visible, most, allowed)
        if index == c.candidate_source_layer_id and most > c.candidate_topk_blocks * CANDIDATE_BLOCK:
            blocks = (visible + (CANDIDATE_BLOCK - 1)) // CANDIDATE_BLOCK
            selection.candidates = topk(block_max(scores, visible), c.candidate_topk_blocks, blocks)
        return topk(scores, c.index_topk, visible if allowed is None else None), allowed

    def _chosen(self, index: int, rows: GpuRows, selection: Selection, kv: KVPool) -> tuple[PagedKV, torch.Tensor]:
        owner, chooser = self.config.kv_owner(index), self.config.index_owner(index)
        if (owner, chooser) not in selection.entries:
            numbers, allowed = selection.numbers[chooser]
            selection.entries[owner, chooser] = rows.entries(numbers, self.config.compress_ratios[owner], allowed)
        return self._paged(kv, "main", owner), selection.entries[owner, chooser]

    def _paged(self, kv: KVPool, kind: str, layer: int) -> PagedKV:
        group = next(g for g in kv.spec.groups if g.name == f"{kind}.{layer}")
        layout = {"main": "main_fp4", "index": "index_fp4"}[kind]
        return PagedKV(kv.data, layout, kv.spec.entries_per_block(group), kv.spec.block_bytes, group.offset)

    # -------------------------------------------------------------- experts

    def _experts(
        self, ffn: Experts, x: torch.Tensor, live: torch.Tensor | None = None, inside: torch.Tensor | None = None
    ) -> torch.Tensor | Routed:
        """[T, d] -> [T, d], or what mHC's pass is to combine to it. Rows not `live` reach no routed expert; rows `inside`
        an image have their own bias."""
        c, invariant = self.config, self.batch_invariant
        shared = self.aside.run(self._shared, ffn, x)
        logits = ffn.gate(x, torch.float32, invariant)
        bias = ffn.bias if inside is None else torch.where(inside.unsqueeze(1), ffn.bias_vl, ffn.bias)
        experts, weights = route(logits, bias, ffn.top_k, scale=c.routed_scaling_factor, live=live)
        tile = ALIGNMENT if invariant else _tile(cdiv(2 * experts.numel(), ffn.count))
        plan = plan_choices(experts, weights, ffn.count, tile, apart="plan" in self.apart)
        row_of_choice, group_of_row, weight_of_row, token_of_row = plan
        layout = {"group_of_row": group_of_row, "expected_rows": tile, "alignment": tile}
        if "gather" not in self.apart:
            hidden = self._gated(ffn.w_in, x, weight_of_row, source_of_row=token_of_row, **layout)
        else:
            hidden = self._gated(ffn.w_in, permute(x, row_of_choice, group_of_row.shape[0]), weight_of_row, **layout)
        routed = ffn.w_out(hidden, invariant=invariant, **layout)
        self.aside.join()
        # Rows of a decode graph: the pass that follows is short of work. Not where bits must not depend on how many rows there
        # are: then nor does the form.
        if "combine" not in self.apart and not invariant and len(x) <= SIZES[-1]:
            return Routed(routed, row_of_choice, shared)
        return combine(routed, row_of_choice, None, shared)

    def _shared(self, ffn: Experts, x: torch.Tensor) -> torch.Tensor:
        """The expert that every row takes: [T, d] -> [T, d]."""
        return ffn.shared_out(self._gated(ffn.shared_in, x), invariant=self.batch_invariant)

    def _gated(self, weight: Weight, x: torch.Tensor, row_weight: torch.Tensor | None = None, **layout: Any) -> torch.Tensor:
        """An expert's first product and SwiGLU: [rows, k] -> [rows, inner]. `layout`: of grouped rows."""
        limit, invariant = self.config.swiglu_limit, self.batch_invariant
        if "swiglu" not in self.apart:
            return weight(x, invariant=invariant, swiglu=(limit, row_weight), **layout)
        wide = weight(x, invariant=invariant, **layout)
        return swiglu(wide, limit, row_weight, group_of_row=layout.get("group_of_row"), interleaved=True)


def _key(host: HostRows, pieces: list[Piece], blocks: int, kv: KVPool, states: GpuStatePool) -> tuple:
    """Of the graph for a pass."""
    return *host.matrix.shape, _padded(len(pieces)), blocks, *_memory_of(kv, states)


def _memory_of(kv: KVPool, states: GpuStatePool) -> tuple[int, ...]:
    return kv.data.data_ptr(), *states.places


def _holds(ready: Ready, segments: Sequence[Segment], kv: KVPool, states: GpuStatePool) -> bool:
    """Whether a pass is the one that was prepared; its rows then count as about to be computed."""
    same = len(segments) == len(ready.segments) and all(map(operator.is_, segments, ready.segments))
    starts, lengths = [s.start for s in segments], {len(s.ids) for s in segments}
    if not same or starts != ready.starts or lengths != {1} or ready.memory != _memory_of(kv, states):
        return False
    slots, stops = [s.slot for s in segments], [start + 1 for start in starts]
    found = [states.advance_all(phase, slots, starts, stops) for phase in (ENCODER, DECODER, DRAFT)]
    return found[:2] == ready.floors


def _tile(rows: int) -> int:
    """Rows of an expert's tile when about so many come to it: a tile of few rows is not filled up with padding."""
    return min(ALIGNMENT, max(16, next_power_of_2(rows)))


def _copy(pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy entries of pool [entries, record]."""
    pool.index_copy_(0, target, pool.index_select(0, source))


def _places(pieces: list[Piece], segments: Sequence[Segment]) -> np.ndarray:
    """Rows named by each segment's `outputs`, in the order of the segments, among the rows of `pieces`."""
    row_of = row_zero(pieces)
    return np.array([row_of[i] + p for i, s in enumerate(segments) for p in s.outputs], np.int64)


def _among(kept: list[Piece], pieces: list[Piece]) -> np.ndarray:
    """Where each row of `kept` lies among the rows of `pieces`."""
    row_of = row_zero(pieces)
    return np.concatenate([row_of[p.index] + np.arange(p.start, p.stop, dtype=np.int64) for p in kept])


def _padded(count: int) -> int:
    """The size of graph for so many rows."""
    return next((size for size in SIZES if size >= count), -(-count // 256) * 256)


def _bucket(blocks: int) -> int:
    """Block tables are as wide as the next power of two, so that a sequence meets few graphs while it grows."""
    return 1 << max(blocks - 1, 0).bit_length()
