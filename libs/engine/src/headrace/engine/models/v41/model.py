"""DeepSeek-V4.1 text model: layers, one forward pass over a batch of segments, and one step of its draft.

A causal encoder (layers below the last KV source) and a decoder that reads the last source's compressed KV. In class
`bounded` the decoder's layers run on a prompt's last rows only; its KV source still compresses every row first (CED).
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F

from ...batch import Segment
from ...cache import CacheSpec, KVPool
from .attention import Attention, Pass
from .block import Block, enter_streams, mean_of_streams
from .cache import DECODER, DRAFT, ENCODER, Entries, V41StatePool, cache_spec, codecs, paged_entries
from .config import ModelConfig
from .draft import Choose, Drafts, DraftStage, DraftStep, finish_drafts, main_kv, noise_block
from .engram import Engram, NgramHash
from .images import hashed_ids, place_images
from .layers import Embedding, Linear, RMSNorm, RopeTable, collapse, linear, rope_frequencies
from .moe import MoE
from .rows import Piece, Rows, piece_of


class Layer(Block):
    """A backbone layer; `index` is its number."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, Attention(config, layer), config.n_routed_experts, config.num_experts_per_tok)
        self.index, self.compressed = layer, config.compress_ratios[layer] > 0
        if layer in config.engram_layer_ids:
            self.engram = Engram(config, layer)


class V41Model(nn.Module):
    """Implements `headrace.engine.batch.Model`. Weights are set by the loader."""

    kind = "v41"

    def __init__(
        self,
        config: ModelConfig,
        *,
        kv_store: str = "quantized",
        numerics: str = "bounded",
        batch_invariant: bool = False,
        keep_rows: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        c = self.config = config
        self.dtype = dtype
        self.spec: CacheSpec = cache_spec(c, kv_store, numerics, batch_invariant, keep_rows)
        self.codecs = codecs(c, kv_store)
        self.batch_invariant = batch_invariant
        self.row_multiple, self.tile = 1, 0  # set_row_rule
        self.vocab_size, self.hidden_size = c.vocab_size, c.hidden_size
        self.image_token_id = c.image_token_id if c.vision is not None else None
        self.eos_token_ids, self.max_model_len = c.eos_token_id, c.max_position_embeddings
        self.checkpoint_digest = ""
        self.ngrams: NgramHash | None = None
        self._pools: WeakKeyDictionary[KVPool, dict[str, Entries]] = WeakKeyDictionary()
        self.embed = Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, layer) for layer in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head = Linear(c.hidden_size, c.vocab_size)
        self.mtp = nn.ModuleList(DraftStage(c, stage) for stage in range(c.num_nextn_predict_layers))
        self.ropes: dict[bool, RopeTable] = {}  # by whether the layer has compressed KV

    def finish_loading(self) -> None:
        """Build what follows from the config but is no weight (on the real device, not where weights were declared)."""
        self.ropes = {kind: RopeTable(rope_frequencies(self.config, kind)) for kind in (False, True)}

    def set_row_rule(self, row_multiple: int, tile: int) -> None:
        """Pad rows to a multiple, and multiply at most `tile` rows at a time (0: all). See `device.row_rule`."""
        self.row_multiple = row_multiple
        for module in self.modules():
            if hasattr(module, "tile"):
                module.tile = tile
            if isinstance(module, MoE):
                module.row_multiple = row_multiple

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def new_states(self, slots: int, ring: int | None = None) -> V41StatePool:
        """`slots` state slots; `ring` rows of window KV each (default: window + rollback)."""
        return V41StatePool(self.config, self.spec, self.codecs, slots, ring, str(self.device))

    # -------------------------------------------------------------- forward

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], kv: KVPool, states: V41StatePool) -> torch.Tensor:
        """See `headrace.engine.batch.Model.forward`: final-norm hidden rows named by `outputs`, [R, hidden_size]."""
        c = self.config
        check_batch(segments, states)
        rows = self._rows([self._encoder_piece(i, s, states) for i, s in enumerate(segments)], segments, states)
        shared = Pass(c, rows, self._paged(kv), states, self.codecs, self.batch_invariant, self.row_multiple)
        ids = torch.tensor(
            [t for piece in rows.pieces for t in segments[piece.index].ids], dtype=torch.int64, device=self.device
        )
        h = self.embed(F.pad(ids, (0, rows.padded - rows.count))).to(self.dtype)
        image = place_images(h, rows, segments) if any(s.images for s in segments) else None
        streams, pre = enter_streams(h, c.hc_mult)
        hashed = None
        if self.ngrams is not None:
            hashed = self.ngrams.contexts([(segments[p.index].prev_ids, hashed_ids(segments[p.index])) for p in rows.pieces])
        phases = self._phases(rows)
        taps: dict[int, torch.Tensor] = {}
        for layer in self.layers:
            if hashed is not None and layer.index in c.engram_layer_ids:
                streams = layer.engram(streams, self.ngrams.rows(layer.index, hashed), image)
            u = layer.attention_input(streams, pre)
            if layer.attn.owns_kv:
                layer.attn.write_sources(u, self.ropes[True], shared)
            if layer.index == c.cut_layer:
                kept = self._decoder_rows(rows, segments, states)
                if kept is None:
                    return streams.new_zeros(0, c.hidden_size)
                rows, take = kept
                if take is not None:
                    streams, pre, u = (x.index_select(0, take) for x in (streams, pre, u))
                    taps = {index: tap.index_select(0, take) for index, tap in taps.items()}
                    hashed = None if hashed is None else hashed[take[: rows.count].numpy()]
                    image = None if image is None else image.index_select(0, take)
                shared.enter(rows)
                phases = self._phases(rows)
            if self.mtp and layer.index in c.dspark_target_layer_ids:
                taps[layer.index] = mean_of_streams(streams)
            streams, pre = layer(streams, layer.attn(u, phases[layer.compressed], shared), image)
        if self.mtp:
            self._feed_draft(taps, phases[False], shared)
        return self._outputs(collapse(streams, pre), rows, segments)

    def _feed_draft(self, taps: dict[int, torch.Tensor], phases: torch.Tensor, shared: Pass) -> None:
        """Main KV of all rows that decoder layers ran on goes into the rings of the draft's stages."""
        ordered = [taps[layer] for layer in self.config.dspark_target_layer_ids]
        for stage, kv in zip(self.mtp, main_kv(self.mtp, ordered, phases), strict=True):
            shared.store_window(stage.attn.layer, kv[: shared.rows.count])

    @property
    def draft_block(self) -> int:
        """Tokens that a draft step proposes; 0: the checkpoint has no draft."""
        return self.config.dspark_block_size if self.mtp else 0

    def set_confidence_normed(self, normed: bool) -> None:
        """Which hidden vector the draft's confidence head reads, instead of what config.json says."""
        self.mtp[-1].confidence_head.normed = normed

    @torch.inference_mode()
    def draft(
        self,
        slots: Sequence[int],
        anchors: Sequence[int],
        positions: Sequence[int],
        states: V41StatePool,
        choose: Choose,
    ) -> Drafts:
        """Propose dspark_block_size tokens for each of R sequences: sequence r has just got token anchors[r] at
        positions[r], and `forward` has run on all rows below. `choose(place, logits [R, V])` takes the tokens of one
        place. Changes no state. ValueError when a slot's rows do not end there."""
        c = self.config
        if not self.mtp:
            raise ValueError("this checkpoint has no draft (num_nextn_predict_layers 0)")
        step = DraftStep(c, states, self.codecs, slots, positions, self.ropes[False], self.row_multiple)
        anchor = torch.tensor(anchors, dtype=torch.int64, device=self.device)
        raw, normed = step.hidden(self.mtp, self.embed(noise_block(c, anchor)).to(self.dtype))
        base = self.logits(normed.flatten(0, 1)).view(*normed.shape[:2], -1)
        return finish_drafts(self.mtp[-1], raw, normed, base, anchor, choose, self.row_multiple)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> [R, vocab_size] fp32. With batch invariance each row is as if it came alone."""
        with torch.inference_mode():
            count = hidden.shape[0]
            hidden = F.pad(hidden.float(), (0, 0, 0, -count % self.row_multiple))
            return linear(hidden, self.head.weight.float(), self.head.tile)[:count]

    def _paged(self, kv: KVPool) -> dict[str, Entries]:
        if kv not in self._pools:
            self._pools[kv] = paged_entries(kv, self.codecs)
        return self._pools[kv]

    # -------------------------------------------------------------- rows

    def _rows(self, pieces: list[Piece], segments: Sequence[Segment], states: V41StatePool) -> Rows:
        return Rows(
            pieces,
            segments,
            window=self.config.sliding_window,
            ring=states.ring,
            block_tokens=self.spec.block_tokens,
            row_multiple=self.row_multiple,
            device=self.device,
        )

    def _encoder_piece(self, index: int, segment: Segment, states: V41StatePool) -> Piece:
        first = states.advance(ENCODER, segment.slot, segment.start, segment.stop)
        return piece_of(
            index, segment.start, segment.stop, max(first, segment.window_floor), self.config.sliding_window
        )

    def _decoder_rows(
        self, rows: Rows, segments: Sequence[Segment], states: V41StatePool
    ) -> tuple[Rows, torch.Tensor | None] | None:
        """Rows that decoder layers run on, and where each lies among `rows` (None: nothing changes); None when there
        are none."""
        pieces = []
        for piece in rows.pieces:
            segment = segments[piece.index]
            start = min(max(piece.start, segment.decoder_floor), piece.stop)
            if start < piece.stop:
                first = states.advance(DECODER, segment.slot, start, piece.stop)
                states.advance(DRAFT, segment.slot, start, piece.stop)
                floor = max(first, segment.window_floor, segment.decoder_floor)
                pieces.append(piece_of(piece.index, start, piece.stop, floor, self.config.sliding_window))
        if pieces == rows.pieces:
            return rows, None
        if not pieces:
            return None
        kept = self._rows(pieces, segments, states)
        row_of = rows.row_zero()
        take = [row_of[piece.index] + t for piece in kept.pieces for t in range(piece.start, piece.stop)]
        return kept, torch.tensor(take + [0] * (kept.padded - kept.count), dtype=torch.int64, device=self.device)

    def _phases(self, rows: Rows) -> dict[bool, torch.Tensor]:
        return {kind: table(rows.padded_positions, rows.limit) for kind, table in self.ropes.items()}

    def _outputs(self, hidden: torch.Tensor, rows: Rows, segments: Sequence[Segment]) -> torch.Tensor:
        """Rows named by each segment's `outputs`, in the order of the segments, after the final norm."""
        row_of = rows.row_zero()
        wanted = [row_of[i] + position for i, segment in enumerate(segments) for position in segment.outputs]
        index = torch.tensor(wanted + [0] * (-len(wanted) % self.row_multiple), dtype=torch.int64, device=self.device)
        return self.norm(hidden.index_select(0, index))[: len(wanted)]


def check_batch(segments: Sequence[Segment], states: V41StatePool) -> None:
    """Refuse a batch that contradicts itself before anything is written."""
    for segment in segments:
        if not 0 <= segment.slot < states.slots:
            raise ValueError(f"state slot {segment.slot} is not one of {states.slots}")
        if not segment.ids:
            raise ValueError(f"slot {segment.slot} has a segment without rows at position {segment.start}")
        lowest = max(segment.start, segment.decoder_floor)
        for position in segment.outputs:
            if not lowest <= position < segment.stop:
                raise ValueError(
                    f"output {position} is not a row [{lowest}, {segment.stop}) that decoder layers run on"
                )
