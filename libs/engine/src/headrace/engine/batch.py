"""One forward pass as data: what the scheduler plans and the model runs.

A batch is a list of segments: consecutive rows of one sequence each. A prefill chunk, a decode row and a verification
window are the same thing with different lengths. Nothing here is a tensor; the runner turns it into tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from .cache import CacheSpec, KVPool, StatePool


@dataclass(slots=True)
class ImageRows:
    """Rows [start, stop) of a segment (absolute positions) that lie in one image. `embeddings`: `dtype` rows [stop - start,
    hidden_size], little-endian."""

    start: int
    stop: int
    embeddings: memoryview
    dtype: str = "float32"


@dataclass(slots=True)
class Segment:
    """Rows [start, start + len(ids)) of one sequence."""

    slot: int  # state slot
    start: int  # absolute position of the first row
    ids: Sequence[int]  # token ids of the rows
    prev_ids: Sequence[int]  # the (up to) three ids before `start`, oldest first: n-gram look-back; -1: of an image
    block_table: Sequence[int]  # physical block per 128 logical tokens; covers start + len(ids)
    write_floor: int = 0  # paged entries of tokens below this are not written (replayed rows of a hit)
    window_floor: int = 0  # window KV of positions below this is not visible to any layer (start of a replay)
    decoder_floor: int = 0  # bounded class: decoder layers run on rows >= this and see window KV >= this; exact: 0
    outputs: Sequence[int] = field(default_factory=tuple)  # absolute positions whose hidden row is wanted
    images: Sequence[ImageRows] = ()  # in order: rows whose embedding is given, not looked up

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)


class Model(Protocol):
    """A family: one file of model code plus its cache declaration. Knows nothing of requests or scheduling."""

    spec: CacheSpec
    vocab_size: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    checkpoint_digest: str

    def new_states(self, slots: int) -> StatePool: ...

    def forward(self, segments: Sequence[Segment], kv: KVPool, states: StatePool) -> torch.Tensor:
        """Run all rows, write paged KV and state, and return the final-norm hidden rows named by `outputs`,
        segment by segment: [R, hidden_size], in the model's compute dtype."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> [R, vocab_size] fp32."""


# (place in the block, logits fp32 [R, V]) -> chosen tokens int64 [R].
Choose = Callable[[int, torch.Tensor], torch.Tensor]


class Drafts(Protocol):
    tokens: torch.Tensor  # int64 [R, block]
    logits: torch.Tensor  # fp32 [R, block, V]: with the sampler's temperature, the distributions that they were drawn from
    confidence_logits: torch.Tensor  # fp32 [R, block]: of acceptance, if all before are accepted


class DraftingModel(Model, Protocol):
    """A family whose checkpoints may bring a draft."""

    draft_block: int  # tokens that a draft step proposes; 0: this checkpoint has no draft
    folder: Path | None = None  # of the checkpoint, set by whoever loads it

    def draft(
        self, slots: Sequence[int], anchors: Sequence[int], positions: Sequence[int], states: StatePool, choose: Choose
    ) -> Drafts:
        """Propose a block for each of R sequences: sequence r has just got token anchors[r] at positions[r], and `forward`
        has run on all rows below. `choose` takes the tokens of one place, from left to right. Changes no state."""
