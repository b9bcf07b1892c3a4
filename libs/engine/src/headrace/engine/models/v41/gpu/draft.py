"""DSpark on a GPU: main KV into the stages' rings, and one step of the draft.

The arithmetic is `..draft`'s, from kernels. A block's own KV goes through the pool's scratch line, so that one attention
kernel sees the window before the anchor and the block. Knows one step; who accepts, and how many, is the engine's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.kernels.kv_store import kv_store
from headrace.kernels.rmsnorm import rmsnorm

from ..config import ModelConfig
from ..draft import ConfidenceHead, MarkovHead
from .rows import GpuRows
from .states import GpuStatePool
from .weights import Layer, Weight, Weights, block


@dataclass(slots=True)
class Heads:
    """What the last stage has besides a block: `..draft.finish_drafts` asks for these two."""

    markov_head: MarkovHead
    confidence_head: ConfidenceHead


@dataclass(slots=True)
class Draft:
    """The stages of a checkpoint's draft."""

    stages: list[Layer]
    windows: list[Weight]  # of each stage, the part of its first product that makes window KV
    main_proj: Weight
    main_norm: torch.Tensor
    norm: torch.Tensor
    heads: Heads

    @classmethod
    def read(cls, w: Weights) -> Draft | None:
        """None when the checkpoint has no draft."""
        c, count = w.config, w.config.num_nextn_predict_layers
        if not count:
            return None
        last = f"mtp.{count - 1}"
        stages = [block(w, f"mtp.{i}", c.dspark_n_routed_experts, c.dspark_num_experts_per_tok) for i in range(count)]
        with torch.device("meta"):
            heads = Heads(MarkovHead(c), ConfidenceHead(c))
        for module, name in (
            (heads.markov_head.embed, "markov_head.embed.weight"),
            (heads.markov_head.head, "markov_head.head.weight"),
            (heads.confidence_head.proj, "confidence_head.proj.weight"),
        ):  # fp32, which holds the stored values exactly: their products are fp32 anyway
            module.weight = torch.nn.Parameter(w.tensor(f"{last}.{name}", torch.float32), requires_grad=False)
        return cls(
            stages,
            [w.linear(f"mtp.{i}.attn.wkv.weight") for i in range(count)],
            w.linear("mtp.0.main_proj.weight"),
            w.norm("mtp.0.main_norm.weight"),
            w.norm(f"{last}.norm.weight"),
            heads,
        )

    def feed(
        self,
        config: ModelConfig,
        taps: Sequence[torch.Tensor],
        rows: GpuRows,
        phases: tuple[torch.Tensor, torch.Tensor],
        states: GpuStatePool,
        invariant: bool,
    ) -> None:
        """Main KV of the rows, from their taps [padded, d], into every stage's ring."""
        main = rmsnorm(self.main_proj(torch.cat(list(taps), -1), invariant=invariant), self.main_norm, config.rms_norm_eps)
        for i, (stage, window) in enumerate(zip(self.stages, self.windows, strict=True)):
            pool = states.window_kv(config.num_hidden_layers + i)
            kv = window(main, invariant=invariant)
            kv_store(kv, pool, rows.places.ring_store, stage.attn.kv_norm, config.rms_norm_eps, phases)


@dataclass(slots=True)
class Block:
    """Rows of R blocks of one step: anchor int64 [R]; position int64 [R * block], live bool [R * block], index int32
    [R * block, window + block] into each stage's pool, own int64 [R * block] where each row's own KV goes."""

    anchor: torch.Tensor
    position: torch.Tensor
    live: torch.Tensor
    index: torch.Tensor
    own: torch.Tensor


def block_values(
    states: GpuStatePool, slots: Sequence[int], anchors: Sequence[int], positions: Sequence[int], padded: int
) -> np.ndarray:
    """What the host says of each block: anchor, slot, position, oldest row to be seen, live; int64 [5, padded]. ValueError when
    a slot cannot draft at its position."""
    values, count = np.zeros((5, padded), np.int64), len(slots)
    first = [states.first_draft(*pair) for pair in zip(slots, positions, strict=True)]
    values[:4, :count], values[4, :count] = (anchors, slots, positions, first), 1
    return values


def block_rows(config: ModelConfig, states: GpuStatePool, values: torch.Tensor) -> Block:
    """Every index that follows from `block_values`, in operations of fixed shape. A padding block sees only itself."""
    anchor, slot, position, first, live = values
    size, window, count = config.dspark_block_size, config.sliding_window, values.shape[1]
    before = position[:, None] + torch.arange(-window, 0, device=values.device)
    hidden = (before < first[:, None]) | (live == 0)[:, None]
    cells = (slot[:, None] * states.ring + before.remainder(states.ring)).masked_fill(hidden, -1)
    own = (states.slots + 1) * states.ring + torch.arange(count * size, device=values.device).view(count, size)
    index = torch.cat([cells, own], 1).int().unsqueeze(1).expand(-1, size, -1).reshape(count * size, -1)
    rows = position[:, None] + torch.arange(size, device=values.device)
    alive = (live != 0).unsqueeze(1).expand(-1, size).reshape(-1)
    return Block(anchor, rows.flatten(), alive, index, own.flatten())
