"""V4.1 without a cache: whole sequences [B, T], dense masks, gradients through everything but the top-k.

The same modules as in serving, so that what is trained is what is served: only attention is computed another way, over
the sequence itself instead of rings and blocks. Weights are fp32 parameters, activations have `dtype`; no operation
here is bound to a device. Do not run it under autocast: the gate, mHC and ratio-2 compressors must stay fp32.

Sequences may be packed: `documents` [B, T] numbers them, rows of one see nothing of another. A document must begin on
a position that is a multiple of 2 when the model has ratio-2 layers (and of ratio x candidate_block_size for the very
candidates that it would have alone).

Knows masks, fake quantisation, the indexer's loss and how random weights begin; does not know data, optimisers or
files (`make_checkpoint.save_checkpoint` writes what `released_values` gives).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..vision.encoder import ImageEncoder
from .attention import Attention, Compressor, Indexer, candidate_blocks, index_scores, top_positions
from .block import Block, enter_streams, mean_of_streams
from .cache import Codec, codecs
from .config import ModelConfig
from .draft import DraftBlocks, Drafts, DraftStage, main_kv, noise_block
from .engram import DEAD, NgramHash
from .layers import Embedding, Linear, RMSNorm, RopeTable, collapse, rope_frequencies, rotate
from .model import Layer, V41Model
from .moe import MoE
from .schema import checkpoint_schema

SCORE_ELEMENTS = 1 << 28  # (row, head, key) products of index scores that exist at a time
EXTRAS = ("taps", "index", "router")


@dataclass(slots=True)
class Output:
    """logits [B, T, V] and hidden (after the final norm) [B, T, d] always; the rest when asked for by `extras`."""

    logits: torch.Tensor
    hidden: torch.Tensor
    taps: torch.Tensor | None = None  # "taps": [B, T, len(dspark_target_layer_ids) * d], the draft's input
    # "index": per index source, scores [B, T, N] of entries, -inf where not visible; they carry gradient to the
    # indexer alone. Per layer with compressed KV, the softmax mass that heads together give each entry if nothing were
    # left out (without gradient).
    index: dict[int, torch.Tensor] = field(default_factory=dict)
    attention: dict[int, torch.Tensor] = field(default_factory=dict)
    # "router": per layer, gate scores [B * T, E] (with gradient) and chosen experts [B * T, k].
    router: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class TrainingModel(nn.Module):
    """A V4.1 text model, and its draft if the config has one, that can be trained.

    Parameters have their released names, but experts are stacked as `MoE` keeps them."""

    def __init__(
        self,
        config: ModelConfig,
        compressed_ids: np.ndarray | None = None,
        *,
        quantize_cache: bool = True,
        dtype: torch.dtype = torch.float32,
        dense_experts: bool = True,
        recompute: bool = False,
    ) -> None:
        """compressed_ids: `engram.compressed_ids` of the tokenizer, when the config has Engram layers. quantize_cache:
        round window KV, index keys and queries, and compressed KV as the quantised store does, with straight-through
        gradients. dense_experts: compute every expert for every row (no host synchronisation). recompute: keep no
        activations inside a block, but compute them again in the backward pass."""
        super().__init__()
        c = self.config = config
        self.dtype, self.recompute, self.parts = dtype, recompute, Parts()
        self.codecs = codecs(c, "quantized" if quantize_cache else "fp32")
        self.embed = Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, layer) for layer in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head = Linear(c.hidden_size, c.vocab_size)
        self.mtp = nn.ModuleList(DraftStage(c, stage) for stage in range(c.num_nextn_predict_layers))
        self.ropes = {kind: RopeTable(rope_frequencies(c, kind)) for kind in (False, True)}
        for module in self.modules():
            if isinstance(module, MoE):
                module.always_dense = dense_experts
        if c.vision is not None:
            self.image_encoder = ImageEncoder(c.vision, c.hidden_size)
        if c.engram_layer_ids:
            if compressed_ids is None:
                raise ValueError("a config with engram_layer_ids needs the tokenizer's compressed ids")
            self.hash = DenseHash(NgramHash(c, compressed_ids))
            for layer, rows in zip(c.engram_layer_ids, c.engram_num_embeddings, strict=True):
                self.layers[layer].engram.embed = Embedding(rows, c.engram_head_dim)

    @classmethod
    def of(cls, served: V41Model, encoder: ImageEncoder | None = None, **options) -> TrainingModel:
        """A copy of a loaded model's weights (what FP8 and FP4 made of them), to go on training or to compare; with the
        image side from `load_encoder`, else that is zero."""
        compressed = None if served.ngrams is None else served.ngrams.compressed
        model = cls(served.config, compressed, **options)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.startswith("image_encoder."):
                    own = None if encoder is None else encoder.get_parameter(name.removeprefix("image_encoder."))
                    parameter.zero_() if own is None else parameter.copy_(own)
                elif name.endswith("engram.embed.weight"):
                    read = served.get_submodule(name.removesuffix(".embed.weight")).read_rows
                    parameter.copy_(read(np.arange(parameter.shape[0])))
                else:
                    parameter.copy_(served.get_parameter(name))
        return model

    def forward(
        self,
        ids: torch.Tensor,
        *,
        documents: torch.Tensor | None = None,
        decoder_floor: torch.Tensor | None = None,
        images: torch.Tensor | None = None,
        extras: Collection[str] = (),
    ) -> Output:
        """ids int64 [B, T]. images uint8 [M, height, width, 3]: what the spans of image tokens in `ids` show, in order of rows
        and places, each of the length that this size has. decoder_floor int64 [B]: decoder layers see window KV of positions
        from there on, as a bounded prompt's do; rows below it then mean nothing. extras: any of "taps", "index", "router"."""
        if unknown := set(extras) - set(EXTRAS):
            raise ValueError(f"extras {sorted(unknown)} are unknown; there are {', '.join(EXTRAS)}")
        c, (batch, length) = self.config, ids.shape
        shared = Dense(self, batch, length, ids.device, documents, decoder_floor, "index" in extras)
        out = Output(*[torch.empty(0)] * 2, index=shared.index, attention=shared.attention)
        inside = None if images is None else ids == c.image_token_id
        h = self.embed(ids).to(self.dtype)
        if inside is not None:
            h = torch.where(inside.unsqueeze(-1), self.image_rows(inside, images), h)
        image = None if inside is None else inside.flatten()
        streams, pre = enter_streams(h.flatten(0, 1), c.hc_mult)
        grams = self.hash.contexts(ids, documents, inside).flatten(0, 1) if c.engram_layer_ids else None
        taps = {}
        for layer in self.layers:
            if layer.index in c.engram_layer_ids:
                memory = layer.engram.embed(self.hash.rows(layer.index, grams)).flatten(1)
                streams = layer.engram.update(streams, memory.to(self.dtype), image)
            if "taps" in extras and layer.index in c.dspark_target_layer_ids:
                taps[layer.index] = mean_of_streams(streams)
            attended = shared.attention_of(layer, streams, pre)
            if self.recompute and torch.is_grad_enabled():
                streams, pre, *gate = checkpoint(self.parts.block, layer, streams, attended, image, use_reentrant=False)
            else:
                streams, pre, *gate = self.parts.block(layer, streams, attended, image)
            if "router" in extras:
                out.router[layer.index] = tuple(gate)
        out.hidden = self.norm(collapse(streams, pre)).view(batch, length, -1)
        out.logits = F.linear(out.hidden.float(), self.head.weight.float())
        if taps:
            ordered = [taps[layer] for layer in c.dspark_target_layer_ids]
            out.taps = torch.cat(ordered, dim=-1).view(batch, length, -1)
        return out

    def image_rows(self, inside: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """What the rows of images are: inside bool [B, T] -> [B, T, d], zero elsewhere. There may be no images."""
        rows = torch.zeros(*inside.shape, self.config.hidden_size, dtype=self.dtype, device=inside.device)
        if not images.shape[0]:
            return rows
        return rows.masked_scatter(inside.unsqueeze(-1), torch.cat(self.image_encoder(list(images))).to(self.dtype))

    def draft(
        self, ids: torch.Tensor, taps: torch.Tensor, anchors: torch.Tensor, documents: torch.Tensor | None = None
    ) -> Drafts:
        """Draft blocks behind anchors, int64 [B, A] positions in ids [B, T], as if each were a step of its own; taps
        [B, T, ...] as `forward` gives them (detach them to keep the target as it is). The Markov head reads the ids that
        follow the anchor, which must lie in the sequence: anchor + block < T. Returns [B * A, block, ...]; `tokens` are
        the ids that the block should have proposed."""
        c, block = self.config, self.config.dspark_block_size
        rope = self.ropes[False](torch.arange(ids.shape[1] + block), ids.shape[1] + block).to(ids.device)
        blocks = DenseDraft(self, taps, anchors, documents, rope)
        following = (anchors.unsqueeze(2) + torch.arange(block + 1, device=ids.device)).flatten(1)
        tokens = ids.gather(1, following).view(-1, block + 1)
        embeddings = self.embed(noise_block(c, tokens[:, 0])).to(self.dtype)
        raw, normed = blocks.hidden(self.mtp, embeddings)
        base, last = F.linear(normed.float(), self.head.weight.float()), self.mtp[-1]
        bias, embedded = last.markov_head(tokens[:, :-1])
        return Drafts(tokens[:, 1:], base, base + bias, last.confidence_head(raw, normed, embedded))


class Parts:
    """The functions of tensors that a pass spends its time in. `compile` makes a graph of each; layers of a kind share it, so
    that it costs seconds instead of the minutes of a whole model's graph."""

    def __init__(self) -> None:
        self.compiled = False
        self.block, self.queries, self.attend, self.index_queries = Block.routed, queries, attend_dense, index_queries

    def compile(self) -> None:
        """Every shape of rows is compiled when it is first seen."""
        self.compiled = True
        for name in ("block", "queries", "attend", "index_queries"):
            setattr(self, name, torch.compile(getattr(self, name), dynamic=False))


def queries(
    block: Block, streams: torch.Tensor, pre: torch.Tensor, phases: torch.Tensor, codec: Codec
) -> tuple[torch.Tensor, ...]:
    """A layer's input u [R, d], query latent [R, q_lora_rank], queries [R, H, D] and window KV [R, D], both fp32."""
    u = block.attention_input(streams, pre)
    qr = block.attn.query_latent(u)
    return u, qr, block.attn.query(qr, phases).float(), straight_through(block.attn.window_kv(u, phases), codec).float()


def index_queries(
    indexer: Indexer, u: torch.Tensor, qr: torch.Tensor, phases: torch.Tensor, codec: Codec
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Indexer.queries`, rounded, fp32."""
    q, weights = indexer.queries(u, qr, phases)
    return straight_through(q, codec).float(), weights


def attend_dense(
    attn: Attention, q: torch.Tensor, window: torch.Tensor, near_mask: torch.Tensor, phases: torch.Tensor, width: int,
    dtype: torch.dtype, main: torch.Tensor | None, selected: torch.Tensor | None, visible: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """One softmax over window, selected entries and the sink, projected: [B * T, d].

    q [B, T, H, D], window [B, T, D] in runs of `width`, near_mask bool [B, T, 2 width]; main [B, N, D] with selected bool
    [B, T, N]. With visible bool [B, T, N] also the softmax mass of every visible entry if nothing were left out, summed over
    heads: [B, T, N], without gradient."""
    scale, mass = q.shape[-1] ** -0.5, None
    near = bands(window, width)  # [B, n, 2 width, D]
    logits = (near_scores(q, near, width) * scale).masked_fill(~near_mask.unsqueeze(2), -torch.inf)  # [B, T, H, 2 width]
    parts = [logits, attn.attn_sink.view(1, 1, -1, 1).expand(*q.shape[:3], 1)]
    if main is not None:
        scores = (q.flatten(1, 2) @ main.transpose(1, 2)).unflatten(1, q.shape[1:3]) * scale  # [B, T, H, N]
        if visible is not None:
            with torch.no_grad():
                seen = scores.detach().masked_fill(~visible.unsqueeze(2), -torch.inf)
                mass = torch.softmax(torch.cat([part.detach() for part in (*parts, seen)], dim=-1), dim=-1)
                mass = mass[..., -main.shape[1] :].sum(2)
        parts.append(scores.masked_fill(~selected.unsqueeze(2), -torch.inf))
    weights = torch.softmax(torch.cat(parts, dim=-1), dim=-1)
    output = near_values(weights[..., : 2 * width], near, width)
    if main is not None:
        output = output + (weights[..., 2 * width + 1 :].flatten(1, 2) @ main).view(q.shape)
    return attn.project(rotate(output.flatten(0, 1).to(dtype), phases)), mass


# ------------------------------------------------------------------ attention


class Dense:
    """What the layers of one forward pass share: masks, compressed entries and selections, [B, T or N, ...]."""

    def __init__(
        self,
        model: TrainingModel,
        batch: int,
        length: int,
        device: torch.device,
        documents: torch.Tensor | None,
        decoder_floor: torch.Tensor | None,
        collect: bool,
    ) -> None:
        self.config, self.codecs, self.collect = model.config, model.codecs, collect
        self.batch, self.length, self.device = batch, length, device
        self.documents, self.decoder_floor = documents, decoder_floor
        self.parts = model.parts
        tables = {kind: table(torch.arange(length), length) for kind, table in model.ropes.items()}
        if self.parts.compiled:
            tables = {kind: torch.view_as_real(phases) for kind, phases in tables.items()}
        self.phases = {kind: phases.to(device) for kind, phases in tables.items()}  # [T, RD / 2], compiled [T, RD / 2, 2]
        self.row_phases = {kind: torch.cat([phases] * batch) for kind, phases in self.phases.items()}
        self.back_phases = {kind: backwards(phases) for kind, phases in self.row_phases.items()}
        self.main: dict[int, torch.Tensor] = {}  # KV source -> [B, N, D]
        self.keys: dict[int, torch.Tensor] = {}  # KV source -> [B, N, DI]
        self.selection: dict[int, torch.Tensor] = {}  # index source -> bool [B, T, N]
        self.candidates: torch.Tensor | None = None  # bool [B * T, N]
        self.index: dict[int, torch.Tensor] = {}
        self.attention: dict[int, torch.Tensor] = {}
        self._windows: dict[bool, torch.Tensor] = {}
        self._visible: dict[int, torch.Tensor] = {}

    def attention_of(self, layer: Layer, streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        """A layer's attention on its streams [B * T, hc, d] -> [B * T, d]."""
        attn, phases = layer.attn, self.row_phases[layer.attn.ratio > 0]
        u, qr, q, window = self.parts.queries(layer, streams, pre, phases, self.codecs.window)
        if attn.owns_kv:
            self._compress(attn, u)
        if attn.selects:
            self._select(attn, u, qr)
        main = selected = visible = None
        if attn.ratio:
            main = self.main[self.config.kv_owner(attn.layer)]
            selected = self.selection[self.config.index_owner(attn.layer)]
            visible = self.visible(attn.ratio) if self.collect else None
        attended, mass = self.parts.attend(
            attn, self._sequences(q), self._sequences(window), self._window_mask(attn.layer),
            self.back_phases[attn.ratio > 0], self.config.sliding_window,
            u.dtype, main, selected, visible,
        )  # fmt: skip
        if mass is not None:
            self.attention[attn.layer] = mass
        return attended

    def _compress(self, attn: Attention, u: torch.Tensor) -> None:
        """Entries of a Full layer and their index keys. The keys' weights learn from the indexer's loss only."""
        ratio, count = attn.ratio, self.length // attn.ratio
        if ratio == 1:
            latent = attn.compressor.norm(attn.compressor.wkv(u))
        else:
            pairs = self._sequences(attn.compressor.project(u))[:, : count * ratio].unflatten(1, (count, ratio))
            latent = attn.compressor.norm(Compressor.pool(pairs.flatten(0, 1)).to(u.dtype))
        phases = self.phases[True][: count * ratio : ratio]  # at the entry's first token
        phases = torch.cat([phases] * self.batch)
        key = rotate(attn.indexer.k_norm(attn.indexer.wk(latent.detach())), phases)
        self.keys[attn.layer] = straight_through(key, self.codecs.index).unflatten(0, (self.batch, count)).float()
        main = straight_through(rotate(latent, phases), self.codecs.main)
        self.main[attn.layer] = main.unflatten(0, (self.batch, count)).float()

    # -------------------------------------------------------------- selection

    def _select(self, attn: Attention, u: torch.Tensor, qr: torch.Tensor) -> None:
        c, layer = self.config, attn.layer
        visible = self.visible(attn.ratio)
        if visible.shape[-1] <= c.index_topk and not self.collect:
            self.selection[layer] = visible  # no choice to make, and candidate blocks can hold all of it
            return
        with torch.set_grad_enabled(self.collect and torch.is_grad_enabled()):
            q, weights = self.parts.index_queries(
                attn.indexer, u.detach(), qr.detach(), self.row_phases[True], self.codecs.index
            )
            scores = self._scores(self._sequences(q), self.keys[c.kv_owner(layer)], self._sequences(weights))
            scores = scores.masked_fill(~visible, -torch.inf)
        if self.collect:
            self.index[layer] = scores
        with torch.no_grad():
            self.selection[layer] = self._best(layer, attn.ratio, scores.detach().flatten(0, 1)).view(visible.shape)

    def _best(self, layer: int, ratio: int, scores: torch.Tensor) -> torch.Tensor:
        """[B * T, N] -> the best index_topk of each row, bool."""
        c, count = self.config, scores.shape[1]
        if count <= c.index_topk:
            return scores > -torch.inf
        if c.uses_candidates(layer):
            scores = scores.masked_fill(~self.candidates, -torch.inf)
        chosen = top_positions(scores, c.index_topk)
        if layer == c.candidate_source_layer_id:
            reach = ((torch.arange(self.length, device=self.device) + 1) // ratio).repeat(self.batch)
            blocks = candidate_blocks(scores, reach, c.candidate_topk_blocks, c.candidate_block_size)
            self.candidates = blocks.repeat_interleave(c.candidate_block_size, dim=1)[:, :count]
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, scores.gather(1, chosen) > -torch.inf)

    def _scores(self, q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """q [B, T, H, DI], keys [B, N, DI], weights [B, T, H] -> [B, T, N], some sequences at a time; the products of
        single heads are computed again in the backward pass."""
        step = max(1, SCORE_ELEMENTS // max(1, q.shape[1] * q.shape[2] * keys.shape[1]))
        tiles = zip(q.split(step), keys.split(step), weights.split(step), strict=True)
        if torch.is_grad_enabled():
            return torch.cat([checkpoint(index_scores, *tile, use_reentrant=False) for tile in tiles])
        return torch.cat([index_scores(*tile) for tile in tiles])

    # -------------------------------------------------------------- masks

    def visible(self, ratio: int) -> torch.Tensor:
        """Which entries each row may see: bool [B, T, N]."""
        if ratio not in self._visible:
            rows = torch.arange(self.length, device=self.device)
            entries = torch.arange(self.length // ratio, device=self.device)
            mask = (entries < (rows[:, None] + 1) // ratio).expand(self.batch, -1, -1)
            if self.documents is not None:
                first = self.documents[:, : entries.numel() * ratio : ratio]
                mask = mask & (self.documents.unsqueeze(2) == first.unsqueeze(1))
            self._visible[ratio] = mask
        return self._visible[ratio]

    def _window_mask(self, layer: int) -> torch.Tensor:
        """Which keys of its band (`bands`) each row sees: bool [B, T, 2 W]."""
        decoder = layer >= self.config.cut_layer and self.decoder_floor is not None
        if decoder not in self._windows:
            window = self.config.sliding_window
            rows = torch.arange(self.length, device=self.device)[:, None]
            keys = (rows // window - 1) * window + torch.arange(2 * window, device=self.device)  # [T, 2 W]
            mask = ((keys >= 0) & (keys <= rows) & (keys > rows - window)).expand(self.batch, -1, -1)
            if self.documents is not None:
                own = self.documents.gather(1, keys.clamp(0, self.length - 1).flatten().expand(self.batch, -1))
                mask = mask & (own.view(mask.shape) == self.documents.unsqueeze(2))
            if decoder:
                mask = mask & (keys >= self.decoder_floor[:, None, None])
            self._windows[decoder] = mask
        return self._windows[decoder]

    def _sequences(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, (self.batch, self.length))


def backwards(phases: torch.Tensor) -> torch.Tensor:
    """Phases, complex or real and imaginary parts, that turn the other way."""
    return phases.conj() if phases.is_complex() else phases * phases.new_tensor([1.0, -1.0])


def bands(keys: torch.Tensor, window: int) -> torch.Tensor:
    """Every run of `window` rows beside the run before it: [B, T, D] -> [B, ceil(T / window), 2 window, D]."""
    runs = F.pad(keys, (0, 0, window, -keys.shape[1] % window)).unflatten(1, (-1, window))
    return torch.cat([runs[:, :-1], runs[:, 1:]], dim=2)


def near_scores(q: torch.Tensor, near: torch.Tensor, window: int) -> torch.Tensor:
    """q [B, T, H, D] with each row's band near [B, n, 2 W, D] -> [B, T, H, 2 W]."""
    length, heads = q.shape[1], q.shape[2]
    q = F.pad(q, (0, 0, 0, 0, 0, -length % window)).unflatten(1, (-1, window)).flatten(2, 3)  # [B, n, W * H, D]
    return (q @ near.transpose(2, 3)).unflatten(2, (window, heads)).flatten(1, 2)[:, :length]


def near_values(weights: torch.Tensor, near: torch.Tensor, window: int) -> torch.Tensor:
    """weights [B, T, H, 2 W] of each row's band near [B, n, 2 W, D] -> [B, T, H, D]."""
    length, heads = weights.shape[1], weights.shape[2]
    weights = F.pad(weights, (0, 0, 0, 0, 0, -length % window)).unflatten(1, (-1, window)).flatten(2, 3)
    return (weights @ near).unflatten(2, (window, heads)).flatten(1, 2)[:, :length]


# ------------------------------------------------------------------ draft


class DenseDraft(DraftBlocks):
    """Blocks at many anchors, with main KV from the taps of whole sequences."""

    def __init__(
        self,
        model: TrainingModel,
        taps: torch.Tensor,
        anchors: torch.Tensor,
        documents: torch.Tensor | None,
        phases: torch.Tensor,
    ) -> None:
        batch, length = taps.shape[:2]
        window = model.config.sliding_window
        before = anchors.unsqueeze(2) + torch.arange(-window, 0, device=taps.device)  # [B, A, W]
        visible, self.before = before >= 0, before.clamp_min(0).flatten(1)
        if documents is not None:
            same = documents.gather(1, self.before).view(before.shape) == documents.gather(1, anchors).unsqueeze(2)
            visible = visible & same
        self.codec = model.codecs.window
        super().__init__(model.config, anchors.flatten(), visible.flatten(0, 1), lambda rows: phases[rows])
        rows = main_kv(model.mtp, [taps.flatten(0, 1)], phases[:length].repeat(batch, 1))
        self.rows = {
            stage.attn.layer: self.round(kv).float().unflatten(0, (batch, length))
            for stage, kv in zip(model.mtp, rows, strict=True)
        }

    def main_kv(self, attn: Attention) -> torch.Tensor:
        rows = self.rows[attn.layer]  # [B, T, D]
        places = self.before.unsqueeze(2).expand(-1, -1, rows.shape[-1])
        return rows.gather(1, places).view(self.bias.shape[0], -1, rows.shape[-1])

    def round(self, kv: torch.Tensor) -> torch.Tensor:
        return straight_through(kv, self.codec)


# ------------------------------------------------------------------ Engram


class DenseHash(nn.Module):
    """`NgramHash` on tensors, on the model's device. Its tables are buffers that no checkpoint holds."""

    def __init__(self, hashes: NgramHash) -> None:
        super().__init__()
        self.size, self.pad = hashes.size, hashes.pad
        self.register_buffer("compressed", torch.from_numpy(hashes.compressed), persistent=False)
        for layer in hashes.primes:
            for kind in ("primes", "offsets", "multipliers"):
                table = torch.from_numpy(getattr(hashes, kind)[layer])
                self.register_buffer(f"{kind}_{layer}", table, persistent=False)

    def contexts(self, ids: torch.Tensor, documents: torch.Tensor | None, inside: torch.Tensor | None = None) -> torch.Tensor:
        """ids [B, T] -> compressed ids of each row and the rows before it in its document, [B, T, n], newest first.
        inside bool [B, T]: rows of images, which nothing hashes over."""
        codes, length = self.compressed[ids], ids.shape[1]
        codes = codes if inside is None else codes.masked_fill(inside, DEAD)
        grams, alive = [], torch.ones_like(ids, dtype=torch.bool)
        for back in range(self.size):
            code = F.pad(codes, (back, 0), value=DEAD)[:, :length]
            alive = alive & (code != DEAD)
            if documents is not None and back:
                alive = alive & (F.pad(documents, (back, 0), value=-1)[:, :length] == documents)
            grams.append(torch.where(alive, code, self.pad))
        return torch.stack(grams, dim=-1)

    def rows(self, layer: int, contexts: torch.Tensor) -> torch.Tensor:
        """[T, n] -> table rows [T, (n - 1) * heads]: 2-gram heads first, then 3-grams, ..."""
        products = contexts * self.get_buffer(f"multipliers_{layer}")
        rolling, rows = products[:, 0], []
        for n in range(1, self.size):
            rolling = rolling ^ products[:, n]
            rows.append(rolling[:, None] % self.get_buffer(f"primes_{layer}")[n - 1])
        return torch.cat(rows, dim=1) + self.get_buffer(f"offsets_{layer}").flatten()


# ------------------------------------------------------------------ fake quantisation and losses


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: torch.Tensor, codec: Codec) -> torch.Tensor:
        return codec.round(values)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def straight_through(values: torch.Tensor, codec: Codec) -> torch.Tensor:
    """What `values` become when they are stored; the gradient passes as if nothing had happened."""
    return values if type(codec) is Codec else _Rounded.apply(values, codec)


def indexer_loss(out: Output, config: ModelConfig) -> torch.Tensor:
    """How far index scores are from what attention looks at: mean over layers with compressed KV, and rows that have a
    choice, of KL(attention over entries || softmax of the scores of the layer's index source), in nats. Needs "index".
    """
    losses = []
    for layer, mass in out.attention.items():
        scores = out.index[config.index_owner(layer)]
        visible = scores > -torch.inf
        total = mass.sum(-1, keepdim=True)
        target = mass / total.clamp_min(1e-20)
        logs = torch.log_softmax(scores, dim=-1).masked_fill(~visible, 0.0)  # a row without entries is all NaN before
        divergence = (torch.xlogy(target, target) - target * logs).sum(-1)
        rows = (visible.sum(-1) > 1) & (total.squeeze(-1) > 0)
        losses.append(torch.where(rows, divergence, 0.0).sum() / rows.sum().clamp_min(1))
    return torch.stack(losses).mean()


# ------------------------------------------------------------------ beginning and end


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Random weights to start training from: norms 1, sinks and biases 0, matrices N(0, 1 / inputs), what writes to
    the streams smaller by sqrt(2 layers), streams that mostly keep to themselves. Equal seeds give equal weights."""
    draw = torch.Generator().manual_seed(seed)
    c: ModelConfig = model.config
    depth = math.sqrt(2 * c.num_hidden_layers)
    own = torch.cat([torch.zeros(2 * c.hc_mult), 2 * torch.eye(c.hc_mult).flatten()])
    for name, parameter in model.named_parameters():
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        noise = torch.randn(parameter.shape, generator=draw)
        if "norm" in leaf or leaf in ("q_weight", "k_weight"):
            value = torch.ones_like(noise)
        elif leaf in ("attn_sink", "bias", "bias_vl"):
            value = torch.zeros_like(noise)
        elif leaf in ("hc_attn_base", "hc_ffn_base"):
            value = own + 0.1 * noise
        elif leaf in ("hc_attn_scale", "hc_ffn_scale"):
            value = torch.full_like(noise, 0.1)
        elif "markov_head.embed" in name:
            value = 0.1 * noise  # the Markov head begins with little to say
        elif leaf == "embed":
            value = 0.5 * noise
        elif leaf == "w_out":  # [d, E + 1, I]: one expert's inputs are the last dimension
            value = noise / (math.sqrt(parameter.shape[-1]) * depth)
        else:
            value = noise / math.sqrt(parameter.shape[-1])
            value = value / depth if leaf == "wo_b" else value
        parameter.copy_(value)


@torch.no_grad()
def released_values(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint under its released name, fp32 on the host, before quantisation. KeyError names
    one that the model does not have."""
    parameters = dict(model.named_parameters())
    for name in checkpoint_schema(model.config):
        prefix, _, rest = name.partition(".ffn.")
        part = rest.split(".")
        if part[0] in ("experts", "shared_experts"):
            moe: MoE = model.get_submodule(f"{prefix}.ffn")
            expert = int(part[1]) if part[0] == "experts" else moe.experts
            value = moe.w_out[:, expert] if part[-2] == "w2" else moe.w_in[("w1", "w3").index(part[-2]), expert]
        else:
            value = parameters[name] if name in parameters else parameters["image_encoder." + name]
        yield name, value.float().cpu()
