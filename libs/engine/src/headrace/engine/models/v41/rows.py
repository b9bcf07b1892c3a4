"""The rows of one forward pass, flattened, with every index that layers share computed once.

Rows of all segments lie behind each other, segments of equal length next to each other: such a group is one regular
[segments, length] batch, so decode rows of many sequences are computed together and a long chunk is a group of its own.
With `batch_invariant` rows are padded to a multiple of 16; padding rows belong to no sequence and nobody reads them.
Knows positions, slots and block tables; does not know layers or what is stored in a ring or a block.
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
    """Rows [start, stop) of segment `index`; they see window KV of positions >= floor only."""

    index: int
    start: int
    stop: int
    floor: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def piece_of(index: int, start: int, stop: int, floor: int, window: int) -> Piece:
    """A floor that no row's window reaches down to is no floor: then encoder and decoder rows are often the same."""
    return Piece(index, start, stop, floor if floor > start - window + 1 else 0)


def row_zero(pieces: Sequence[Piece]) -> dict[int, int]:
    """Segment index -> the row where its position 0 would be, so that position p is at row_zero + p."""
    result, begin = {}, 0
    for piece in pieces:
        result[piece.index] = begin - piece.start
        begin += piece.length
    return result


@dataclass(slots=True)
class Group:
    """Pieces of one length: rows [begin, end) = [segments, length]."""

    begin: int
    end: int
    segments: int
    length: int
    first_piece: int  # its place in Rows.pieces
    tables: torch.Tensor  # [segments, blocks] physical blocks, as many as its longest sequence has
    history: torch.Tensor  # [segments * (window - 1)] ring cells of the positions before each piece


class Rows:
    """Rows of one phase: all of them, or those that decoder layers run on.

    positions, piece_of, in_piece, write_floors: int64 [count]. window_bias: fp32 [count, 1, window], 0 where visible,
    else -inf; column i is position - window + 1 + i. cells: where the newest rows' window KV goes in a ring of [slots
    * ring].
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        segments: Sequence[Segment],
        *,
        window: int,
        ring: int,
        block_tokens: int,
        row_multiple: int,
        device: torch.device,
    ) -> None:
        self.device, self.block_tokens = device, block_tokens
        self._entries: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}  # by ratio
        self.pieces = sorted(pieces, key=lambda piece: piece.length)
        self.limit = max(piece.stop for piece in self.pieces)
        self._index_rows(segments, row_multiple)
        self._index_window(window, ring)
        self._group(segments, window, ring)

    def _index_rows(self, segments: Sequence[Segment], row_multiple: int) -> None:
        self.starts = self._tensor([piece.start for piece in self.pieces])  # [pieces]
        self.slots = self._tensor([segments[piece.index].slot for piece in self.pieces])  # [pieces]
        lengths = self._tensor([piece.length for piece in self.pieces])
        self.piece_of = torch.repeat_interleave(lengths)
        self.count = self.piece_of.numel()
        self.padded = -(-self.count // row_multiple) * row_multiple
        self.in_piece = torch.arange(self.count, device=self.device) - (lengths.cumsum(0) - lengths)[self.piece_of]
        self.from_end = lengths[self.piece_of] - self.in_piece  # 1 for the last row of a piece
        self.positions = self.starts[self.piece_of] + self.in_piece
        self.padded_positions = F.pad(self.positions, (0, self.padded - self.count))
        self.write_floors = self._tensor([segments[piece.index].write_floor for piece in self.pieces])[self.piece_of]

    def _index_window(self, window: int, ring: int) -> None:
        floors = self._tensor([max(piece.floor, 0) for piece in self.pieces])[self.piece_of]
        self.floors = floors  # [count]: window KV of positions below is not seen
        self.bases = self.slots[self.piece_of] * ring  # [count]: a slot's first cell
        seen = self.positions[:, None] + torch.arange(1 - window, 1, device=self.device)
        bias = torch.zeros(seen.shape, device=self.device)
        self.window_bias = bias.masked_fill_(seen < floors[:, None], -torch.inf).unsqueeze(1)
        cells = self.bases + self.positions % ring
        # A piece longer than the ring leaves only its last rows there.
        self.kept = (self.from_end <= ring).nonzero().squeeze(1) if self.pieces[-1].length > ring else None
        self.cells = cells if self.kept is None else cells[self.kept]

    def _group(self, segments: Sequence[Segment], window: int, ring: int) -> None:
        needed = [-(-piece.stop // self.block_tokens) for piece in self.pieces]
        self.tables = self._tensor(
            [
                padded_table(segments[piece.index].block_table, blocks, max(needed), piece.stop)
                for piece, blocks in zip(self.pieces, needed, strict=True)
            ]
        )  # [pieces, blocks]
        before = torch.arange(1 - window, 0, device=self.device)
        history = self.slots[:, None] * ring + (self.starts[:, None] + before) % ring
        self.groups: list[Group] = []
        begin = first = 0
        for length, members in groupby(self.pieces, key=lambda piece: piece.length):
            n = len(list(members))
            own = slice(first, first + n)
            tables = self.tables[own, : max(needed[own])]
            self.groups.append(Group(begin, begin + n * length, n, length, first, tables, history[own].reshape(-1)))
            begin, first = begin + n * length, first + n

    def row_zero(self) -> dict[int, int]:
        """See `row_zero`."""
        return row_zero(self.pieces)

    def entries(self, ratio: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compressed entries that this pass completes and may write: the row that completes each, its physical block,
        and its place in the block, int64 [E] each."""
        if ratio not in self._entries:
            self._entries[ratio] = self._completed(ratio)
        return self._entries[ratio]

    def _completed(self, ratio: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        done = (self.positions % ratio == ratio - 1) & (self.positions - (ratio - 1) >= self.write_floors)
        rows = done.nonzero().squeeze(1)
        number, per_block = self.positions[rows] // ratio, self.block_tokens // ratio
        return rows, self.tables[self.piece_of[rows], number // per_block], number % per_block

    def _tensor(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def padded_table(table: Sequence[int], blocks: int, width: int, tokens: int) -> list[int]:
    if len(table) < blocks:
        raise ValueError(f"{tokens} tokens need {blocks} blocks, the block table has {len(table)}")
    return [*table[:blocks], *[0] * (width - blocks)]
