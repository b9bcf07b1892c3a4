"""The rows of one forward pass, flattened, with every index that layers share computed once.

Rows of all segments lie behind each other, segments of equal length next to each other: such a group is one regular
[segments, length] batch, so decode rows of many sequences are computed together and a long chunk is a group of its own. With
`batch_invariant` rows are padded to a multiple of 16; padding rows belong to no group and no sequence, and nobody reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch.nn import functional as F

from ...batch import Segment


@dataclass(slots=True)
class Piece:
    """Rows [start, stop) of segment `index`, seeing window KV of positions >= floor."""

    index: int
    start: int
    stop: int
    floor: int


@dataclass(slots=True)
class Group:
    """Pieces of one length, as rows [begin, end) = [segments, length]."""

    begin: int
    end: int
    segments: int
    length: int
    first_segment: int  # position of its first piece in Rows.pieces
    history: torch.Tensor  # [segments * (window - 1)] ring cells of the positions before each piece


class Rows:
    """Rows of one phase (all rows, or the rows that decoder layers run on)."""

    def __init__(
        self, pieces: Sequence[Piece], segments: Sequence[Segment], window: int, ring: int, row_multiple: int, device: str
    ) -> None:
        self.pieces = sorted(pieces, key=lambda piece: piece.stop - piece.start)
        lengths = [piece.stop - piece.start for piece in self.pieces]
        self.count = sum(lengths)
        self.padded = -(-self.count // row_multiple) * row_multiple

        def per_piece(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self.slots = [segments[piece.index].slot for piece in self.pieces]
        slots, starts = per_piece(self.slots), per_piece([piece.start for piece in self.pieces])
        sizes = per_piece(lengths)
        begins = sizes.cumsum(0) - sizes
        self.piece_of = torch.repeat_interleave(sizes)  # [count]
        self.lengths_of_rows = sizes[self.piece_of]
        self.in_piece = torch.arange(self.count, device=device) - begins[self.piece_of]
        self.positions = starts[self.piece_of] + self.in_piece  # [count]
        self.padded_positions = F.pad(self.positions, (0, self.padded - self.count))
        self.limit = max((piece.stop for piece in self.pieces), default=0)

        floors = per_piece([piece.floor for piece in self.pieces])[self.piece_of]
        oldest = self.positions - (window - 1)
        visible = oldest[:, None] + torch.arange(window, device=device) >= floors[:, None].clamp_min(0)
        self.window_bias = torch.zeros(visible.shape, device=device).masked_fill_(~visible, -torch.inf).unsqueeze(1)

        tables = [segments[piece.index].block_table for piece in self.pieces]
        self.blocks = max((len(table) for table in tables), default=0)
        self.tables = per_piece([b for table in tables for b in (*table, *[0] * (self.blocks - len(table)))]).view(-1, self.blocks)
        self.write_floors = per_piece([segments[piece.index].write_floor for piece in self.pieces])[self.piece_of]

        # Ring cells: only the last `ring` rows of a piece are kept.
        self.kept = (self.lengths_of_rows - self.in_piece <= ring).nonzero().squeeze(1) if max(lengths, default=0) > ring else None
        cells = slots[self.piece_of] * ring + self.positions % ring
        self.cells = cells if self.kept is None else cells[self.kept]
        before = torch.arange(1 - window, 0, device=device)
        history = slots[:, None] * ring + (starts[:, None] + before) % ring
        self.slot_of_piece, self.starts = slots, starts
        self.groups: list[Group] = []
        for length, members in groupby(range(len(lengths)), key=lambda i: lengths[i]):
            indices = list(members)
            first, n = indices[0], len(indices)
            begin = sum(lengths[:first])
            self.groups.append(Group(begin, begin + n * length, n, length, first, history[first : first + n].reshape(-1)))

    def entries(self, ratio: int, block_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compressed entries that this pass completes: (rows that complete them, physical block, offset in the block)."""
        done = self.positions % ratio == ratio - 1
        rows = (done & (self.positions - (ratio - 1) >= self.write_floors)).nonzero().squeeze(1)
        number = self.positions[rows] // ratio
        per_block = block_tokens // ratio
        return rows, self.tables[self.piece_of[rows], number // per_block], number % per_block

