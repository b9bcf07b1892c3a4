"""DSpark: the draft stages that a V4.1 checkpoint carries under `mtp.*`.

A draft proposes a block of tokens at once. Its context is what the target saw: the inputs of some target layers (taps),
projected once, are each stage's main KV, kept in a ring per stage beside the backbone's windows. One step runs the
block [anchor, noise, ...] through the stages, every row seeing the window before the anchor and the whole block; then
a Markov head corrects the base logits from left to right, and a confidence head says how likely each token is to be
accepted if all before it are.

Knows one step; does not know who accepts, how many drafts are verified, or when drafting pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from .attention import Attention, attend
from .block import Block, enter_streams
from .cache import Codecs, V41StatePool
from .config import ModelConfig
from .layers import Embedding, Linear, RMSNorm, RopeTable, collapse, linear, rotate

# (place in the block, corrected logits fp32 [R, V]) -> chosen tokens int64 [R].
Choose = Callable[[int, torch.Tensor], torch.Tensor]
Rope = Callable[[torch.Tensor], torch.Tensor]  # positions int64 [T] -> phases [T, RD / 2]


class Drafts(NamedTuple):
    """One draft step of R sequences; draft i is proposed for position p + 1 + i."""

    tokens: torch.Tensor  # int64 [R, block]
    base: torch.Tensor  # fp32 [R, block, V], before the Markov head
    logits: torch.Tensor  # fp32 [R, block, V]; with the sampler's temperature they are the distribution drafted from
    # fp32 [R, block]: sigmoid(value / T_i) is the probability that draft i is accepted if all before it are; T_i is a
    # calibration temperature, 1 without one.
    confidence_logits: torch.Tensor


class DraftStage(Block):
    """Stage `stage` of the draft: a window-only block with experts of its own; the first projects the taps, the last
    has the heads."""

    def __init__(self, config: ModelConfig, stage: int) -> None:
        c = config
        layer = c.num_hidden_layers + stage  # its place among rings and compress_ratios
        super().__init__(c, Attention(c, layer), c.dspark_n_routed_experts, c.dspark_num_experts_per_tok)
        if stage == 0:
            self.main_proj = Linear(len(c.dspark_target_layer_ids) * c.hidden_size, c.hidden_size)
            self.main_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if stage == c.num_nextn_predict_layers - 1:
            self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
            self.markov_head = MarkovHead(c)
            self.confidence_head = ConfidenceHead(c)


class MarkovHead(nn.Module):
    """Logits that the token before adds, of low rank."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed = Embedding(config.vocab_size, config.dspark_markov_rank)
        self.head = Linear(config.dspark_markov_rank, config.vocab_size)

    def forward(self, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [...] -> (fp32 [..., V], their embeddings fp32 [..., rank])."""
        embedded = self.embed(previous).float()
        return linear(embedded, self.head.weight, self.head.tile), embedded


class ConfidenceHead(nn.Module):
    """A logit from a row's last hidden vector and the token before. The released head reads the vector as it leaves
    the streams, before the norm; drafts trained by NeMo-AutoModel read it after (config dspark_confidence_normed)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.normed = config.dspark_confidence_normed
        self.proj = Linear(config.hidden_size + config.dspark_markov_rank, 1)

    def forward(self, raw: torch.Tensor, normed: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """raw, normed [..., d], embedded [..., rank] -> fp32 [...]."""
        features = torch.cat([(normed if self.normed else raw).float(), embedded.float()], dim=-1)
        return (features * self.proj.weight.float().squeeze(0)).sum(-1)  # not a product: its bits hang on row counts


def main_kv(stages: Sequence[DraftStage], taps: Sequence[torch.Tensor], phases: torch.Tensor) -> list[torch.Tensor]:
    """Main KV of rows for every stage: taps [T, d] in the order of dspark_target_layer_ids, phases [T, RD / 2] of the
    rows' positions -> [T, D] each, before rounding."""
    main = stages[0].main_norm(stages[0].main_proj(torch.cat(list(taps), dim=-1)))
    return [stage.attn.window_kv(main, phases) for stage in stages]


class DraftBlocks:
    """Blocks of R sequences on their way through the stages; who makes one says where main KV comes from.

    positions [R]: of each anchor. visible bool [R, W]: main KV of which of the W positions before it may be seen, the
    same for all rows of a block.
    """

    def __init__(
        self, config: ModelConfig, positions: torch.Tensor, visible: torch.Tensor, rope: Rope, row_multiple: int = 1
    ) -> None:
        self.config, self.block = config, config.dspark_block_size
        self.count = positions.shape[0] * self.block
        self.padding = -self.count % row_multiple
        bias = torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, -torch.inf)
        self.bias = F.pad(bias, (0, self.block)).unsqueeze(1)  # [R, 1, W + block]
        rows = (positions[:, None] + torch.arange(self.block, device=positions.device)).flatten()
        self.phases = rope(F.pad(rows, (0, self.padding)))

    def main_kv(self, attn: Attention) -> torch.Tensor:
        """A stage's main KV of the W positions before each anchor: fp32 [R, W, D]."""
        raise NotImplementedError

    def round(self, kv: torch.Tensor) -> torch.Tensor:
        """What becomes of the block's own KV."""
        raise NotImplementedError

    def attention_of(self, attn: Attention, u: torch.Tensor) -> torch.Tensor:
        """u [padded, d] -> [padded, d]."""
        q, count = attn.query(attn.query_latent(u), self.phases), self.count
        own = self.round(attn.window_kv(u, self.phases)[:count]).float()
        keys = torch.cat([self.main_kv(attn), own.unflatten(0, (-1, self.block))], dim=1)
        grouped = q[:count].float().reshape(keys.shape[0], -1, q.shape[-1])  # [R, block * H, D]
        attended = attend(grouped, keys, self.bias, attn.attn_sink.repeat(self.block), q.shape[-1] ** -0.5)
        attended = F.pad(attended.view(count, *q.shape[1:]), (0, 0, 0, 0, 0, self.padding)).to(u.dtype)
        return attn.project(rotate(attended, self.phases.conj()))

    def hidden(self, stages: Sequence[DraftStage], embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings [R * block, d] of the block's tokens -> last hidden vectors before and after the norm, [R, block,
        d] each."""
        streams, pre = enter_streams(F.pad(embeddings, (0, 0, 0, self.padding)), self.config.hc_mult)
        for stage in stages:
            streams, pre = stage(streams, self.attention_of(stage.attn, stage.attention_input(streams, pre)))
        raw = collapse(streams, pre)
        normed = stages[-1].norm(raw)
        return tuple(x[: self.count].view(-1, self.block, x.shape[-1]) for x in (raw, normed))


class DraftStep(DraftBlocks):
    """One step from the rings: anchor at a position p, of which the target has computed all rows below p."""

    def __init__(
        self,
        config: ModelConfig,
        states: V41StatePool,
        kinds: Codecs,
        slots: Sequence[int],
        positions: Sequence[int],
        rope: RopeTable,
        row_multiple: int,
    ) -> None:
        self.states, self.codec = states, kinds.window
        first = [states.first_draft(*pair) for pair in zip(slots, positions, strict=True)]
        device, window = states.windows.device, config.sliding_window
        slot, position, first = (
            torch.tensor(values, dtype=torch.int64, device=device) for values in (slots, positions, first)
        )
        before = position[:, None] + torch.arange(-window, 0, device=device)  # [R, W]
        self.cells = (slot[:, None] * states.ring + before % states.ring).flatten()
        limit = max(positions) + config.dspark_block_size
        super().__init__(config, position, before >= first[:, None], lambda rows: rope(rows, limit), row_multiple)

    def main_kv(self, attn: Attention) -> torch.Tensor:
        rows = self.states.windows[attn.layer].flatten(0, 1).index_select(0, self.cells)
        return rows.view(self.bias.shape[0], -1, rows.shape[-1])

    def round(self, kv: torch.Tensor) -> torch.Tensor:
        return self.codec.round(kv)


def noise_block(config: ModelConfig, anchors: torch.Tensor) -> torch.Tensor:
    """Anchor tokens [R] -> a block's input ids [R * block]."""
    ids = anchors.new_full((anchors.shape[0], config.dspark_block_size), config.dspark_noise_token_id)
    ids[:, 0] = anchors
    return ids.flatten()


def finish_drafts(
    last: DraftStage,
    raw: torch.Tensor,
    normed: torch.Tensor,
    base: torch.Tensor,
    anchors: torch.Tensor,
    choose: Choose,
    row_multiple: int,
) -> Drafts:
    """From left to right: correct each place's base logits [R, block, V] by the token before it, and let `choose`
    take one."""
    tokens, logits, confidence, previous, count = [], [], [], anchors, anchors.shape[0]
    for place in range(base.shape[1]):
        rows = last.markov_head(F.pad(previous, (0, -count % row_multiple)))
        bias, embedded = (row[:count] for row in rows)
        logits.append(base[:, place] + bias)
        confidence.append(last.confidence_head(raw[:, place], normed[:, place], embedded))
        previous = choose(place, logits[-1])
        tokens.append(previous)
    return Drafts(torch.stack(tokens, 1), base, torch.stack(logits, 1), torch.stack(confidence, 1))
