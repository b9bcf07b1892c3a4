"""One forward pass of a V4 model over a batch of segments, and the output head."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F

from ...batch import Segment
from ...cache import CacheSpec, KVPool
from ..v41.attention import Pass
from ..v41.cache import Entries, paged_entries
from ..v41.layers import Embedding, Linear, RMSNorm, RopeTable, collapse, expand, inverse_rms, linear, mix, rope_frequencies
from ..v41.moe import MoE
from ..v41.rows import Rows, piece_of
from .attention import Attention
from .cache import StatePool, cache_spec, codecs
from .config import HASH, ModelConfig
from .moe import HashMoE, routed_moe


class Layer(nn.Module):
    """Two sublayers on residual streams X [T, hc, d], each with coefficients of its own input."""

    tile = 0

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        c = self.config = config
        self.hashed = c.mlp_layer_types[layer] == HASH
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.ffn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attn = Attention(c, layer)
        self.ffn = HashMoE(c) if self.hashed else routed_moe(c)
        mixes, wide = 2 * c.hc_mult + c.hc_mult**2, c.hc_mult * c.hidden_size
        for sublayer in ("attn", "ffn"):
            self.register_parameter(f"hc_{sublayer}_fn", nn.Parameter(torch.empty(mixes, wide)))
            self.register_parameter(f"hc_{sublayer}_base", nn.Parameter(torch.empty(mixes)))
            self.register_parameter(f"hc_{sublayer}_scale", nn.Parameter(torch.empty(3)))

    def forward(
        self, streams: torch.Tensor, ids: torch.Tensor, phases: torch.Tensor, table: RopeTable, shared: Pass
    ) -> torch.Tensor:
        """[padded, hc, d], token ids [padded], phases [padded, RD / 2] of this layer's RoPE -> [padded, hc, d]. `table`: of
        compressed KV."""
        shared.enter(shared.rows)  # what the layer before has gathered is of no use here
        pre, post, comb = mix(streams, self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale, self.config, self.tile)
        u = self.attn_norm(collapse(streams, pre))
        if self.attn.ratio:
            self.attn.write_sources(u, table, shared)
        streams = expand(self.attn(u, phases, shared), streams, post, comb)
        pre, post, comb = mix(streams, self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale, self.config, self.tile)
        x = self.ffn_norm(collapse(streams, pre))
        return expand(self.ffn(x, ids) if self.hashed else self.ffn(x), streams, post, comb)


class V4Model(nn.Module):
    """Implements `headrace.engine.batch.Model`. Weights are set by the loader."""

    kind = "v4"
    tile = 0

    def __init__(
        self,
        config: ModelConfig,
        *,
        kv_store: str = "quantized",
        numerics: str = "bounded",
        batch_invariant: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        c = self.config = config
        self.dtype, self.batch_invariant = dtype, batch_invariant
        self.spec: CacheSpec = cache_spec(c, kv_store, numerics, batch_invariant)
        self.codecs = codecs(c, kv_store)
        self.row_multiple = 1  # set_row_rule
        self.vocab_size, self.hidden_size = c.vocab_size, c.hidden_size
        self.eos_token_ids, self.max_model_len = c.eos_token_id, c.max_position_embeddings
        self.checkpoint_digest = ""
        self._pools: WeakKeyDictionary[KVPool, dict[str, Entries]] = WeakKeyDictionary()
        self.embed = Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, layer) for layer in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head = Linear(c.hidden_size, c.vocab_size)
        self.hc_head_fn = nn.Parameter(torch.empty(c.hc_mult, c.hc_mult * c.hidden_size))
        self.hc_head_base = nn.Parameter(torch.empty(c.hc_mult))
        self.hc_head_scale = nn.Parameter(torch.empty(1))
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

    def new_states(self, slots: int, ring: int | None = None) -> StatePool:
        """`slots` state slots; `ring` rows of window KV each (default: window + rollback)."""
        return StatePool(self.config, self.spec, self.codecs, slots, ring)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], kv: KVPool, states: StatePool) -> torch.Tensor:
        """See `headrace.engine.batch.Model.forward`: final-norm hidden rows named by `outputs`, [R, hidden_size]."""
        check_batch(segments, states)
        rows = self._rows(segments, states)
        shared = Pass(self.config, rows, self._paged(kv), states, self.codecs, self.batch_invariant, self.row_multiple)
        ids = torch.tensor([t for piece in rows.pieces for t in segments[piece.index].ids], dtype=torch.int64)
        ids = F.pad(ids, (0, rows.padded - rows.count))
        streams = self.embed(ids).to(self.dtype).unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        phases = {kind: table(rows.padded_positions, rows.limit) for kind, table in self.ropes.items()}
        for layer in self.layers:
            streams = layer(streams, ids, phases[layer.attn.ratio > 0], self.ropes[True], shared)
        return self._outputs(streams, rows, segments)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> [R, vocab_size] fp32. With batch invariance each row is as if it came alone."""
        count = hidden.shape[0]
        hidden = F.pad(hidden.float(), (0, 0, 0, -count % self.row_multiple))
        return linear(hidden, self.head.weight.float(), self.head.tile)[:count]

    def _paged(self, kv: KVPool) -> dict[str, Entries]:
        if kv not in self._pools:
            self._pools[kv] = paged_entries(kv, self.codecs)
        return self._pools[kv]

    def _rows(self, segments: Sequence[Segment], states: StatePool) -> Rows:
        window, pieces = self.config.sliding_window, []
        for i, s in enumerate(segments):
            first = states.advance(s.slot, s.start, s.stop)
            pieces.append(piece_of(i, s.start, s.stop, max(first, s.window_floor), window))
        return Rows(
            pieces,
            segments,
            window=window,
            ring=states.ring,
            block_tokens=self.spec.block_tokens,
            row_multiple=self.row_multiple,
            device=self.device,
        )

    def _outputs(self, streams: torch.Tensor, rows: Rows, segments: Sequence[Segment]) -> torch.Tensor:
        """Rows named by each segment's `outputs`, in the order of the segments, collapsed and after the final norm."""
        row_of = rows.row_zero()
        wanted = [row_of[i] + position for i, segment in enumerate(segments) for position in segment.outputs]
        index = torch.tensor(wanted + [0] * (-len(wanted) % self.row_multiple), dtype=torch.int64)
        return self.norm(self._collapse(streams.index_select(0, index)))[: len(wanted)]

    def _collapse(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, hc, d] -> [T, d], with coefficients as of a sublayer's input."""
        flat = streams.flatten(1).float()
        mixed = linear(flat, self.hc_head_fn, self.tile) * inverse_rms(flat, self.config.rms_norm_eps)
        return collapse(streams, torch.sigmoid(mixed * self.hc_head_scale + self.hc_head_base) + self.config.hc_eps)


def check_batch(segments: Sequence[Segment], states: StatePool) -> None:
    """Refuse a batch that contradicts itself before anything is written."""
    for segment in segments:
        if not 0 <= segment.slot < states.slots:
            raise ValueError(f"state slot {segment.slot} is not one of {states.slots}")
        if not segment.ids:
            raise ValueError(f"slot {segment.slot} has a segment without rows at position {segment.start}")
        if segment.images:
            raise ValueError(f"slot {segment.slot}: this model reads text only")
        for position in segment.outputs:
            if not segment.start <= position < segment.stop:
                raise ValueError(f"output {position} is not a row [{segment.start}, {segment.stop})")
