"""What a model family declares about its cache, as data.

Knows: where bytes of KV lie inside a block, how large a state is, how many rows a hit must replay. Does not know what the bytes
mean: below the model KV is opaque, and every other part of the engine, the hand-off and the store works from this page alone.

Two kinds of memory belong to a sequence:
  * paged blocks: one contiguous record of `block_tokens` tokens each, groups at fixed offsets inside it, content-addressed
    once full;
  * one state slot: what cannot be paged (window rings, compressor tails, draft rings). On the wire a state is logical rows by
    absolute position, never a ring image, so the two ends may use different ring sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """One kind of entry of one source layer inside a block."""

    name: str  # for example "main.2", "index.2"
    layer: int
    offset: int  # bytes from the start of the block
    entry_bytes: int  # bytes of one entry
    tokens_per_entry: int  # compression ratio: entry j covers tokens [j * ratio, (j + 1) * ratio)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """A family's cache for one configuration (dimensions, KV store, numerics class)."""

    layout_id: str  # digest of everything that changes what the bytes mean, the numerics class included
    block_bytes: int
    groups: tuple[PagedGroup, ...]
    state_bytes: int  # upper bound of one packed state
    numerics: str  # "exact" | "bounded"
    keep_rows: int  # bounded: decoder layers run on the last `keep_rows` rows of a prompt (0: no layer is one); exact: 0
    replay_rows: int  # rows before a hit that must be recomputed when no snapshot restores the state
    block_tokens: int = 128

    def entries_per_block(self, group: PagedGroup) -> int:
        return self.block_tokens // group.tokens_per_entry


class StatePool(Protocol):
    """`slots` state slots on the device."""

    slots: int

    def reset(self, slot: int) -> None:
        """Forget what the slot held (a new sequence starts at position 0, or a replay rebuilds it)."""

    def pack(self, slot: int, position: int) -> bytes:
        """State of a sequence whose next position is `position`, as logical rows by absolute position (at most state_bytes)."""

    def unpack(self, slot: int, position: int, data: memoryview) -> None:
        """Inverse of `pack`. Raises ValueError when the data is not a state of this layout at this position."""

    def rewind(self, slot: int, position: int) -> None:
        """Rows from `position` on, a few of the newest, never were: drafts that were rejected. What is left is, bit for bit,
        what it would be without them."""

    def copy(self, source: int, target: int) -> None:
        """Fork: `target` becomes equal to `source`."""


class KVPool:
    """`num_blocks` block records in one flat byte buffer: host memory given by the caller (so that it can be a registered
    region that peers write into) or device memory."""

    def __init__(self, spec: CacheSpec, num_blocks: int, buffer=None, device: str = "cpu") -> None:
        nbytes = spec.block_bytes * num_blocks
        if buffer is not None:
            if len(buffer) < nbytes:
                raise ValueError(f"KV buffer has {len(buffer)} bytes; {num_blocks} blocks of {spec.block_bytes} need {nbytes}")
            self.data = torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes).view(num_blocks, spec.block_bytes)
        else:
            self.data = torch.zeros(num_blocks, spec.block_bytes, dtype=torch.uint8, device=device)
        self.spec, self.num_blocks = spec, num_blocks  # data: [num_blocks, block_bytes] uint8

    def entries(self, group: PagedGroup) -> torch.Tensor:
        """View [num_blocks, entries per block, entry_bytes] uint8 of one group; writes go to the pool."""
        n = self.spec.entries_per_block(group)
        flat = self.data[:, group.offset : group.offset + n * group.entry_bytes]
        return flat.unflatten(1, (n, group.entry_bytes))
