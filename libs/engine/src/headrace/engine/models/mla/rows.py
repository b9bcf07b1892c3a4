"""The rows of one forward pass, flattened, with every index that layers share computed once.

Sequences with equally many rows and about as much context (within a factor of two, in blocks) form a group, a regular
[segments, length] batch: decode rows of many sequences are attended together, a long chunk is a group of its own.
With `row_multiple` > 1 (batch invariance) rows are padded; padding rows belong to no sequence and nobody reads them.
Knows positions and block tables; does not know layers or what an entry holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from ...batch import Segment
from .cache import BLOCK_TOKENS

MASK_ELEMENTS = 1 << 20  # masks up to this size are kept for all layers; larger ones are made again in each


@dataclass(slots=True)
class Piece:
    """Rows [start, stop) of segment `index`."""

    index: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def blocks(self) -> int:
        return -(-self.stop // BLOCK_TOKENS)


@dataclass(slots=True)
class Group:
    """Pieces of one length: rows [begin, end) = [segments, length]."""

    begin: int
    end: int
    length: int
    tables: torch.Tensor  # int64 [segments, blocks]: as many as the longest has; a shorter one repeats its first
    positions: torch.Tensor  # int64 [segments, length]
    furthest: int  # the largest first position
    whole_blocks: bool  # keys are looked at in whole blocks
    _masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @property
    def segments(self) -> int:
        return self.tables.shape[0]

    def keys(self, stop: int) -> int:
        """Keys of each piece that its rows below `stop` may see."""
        count = self.furthest + stop
        return -(-count // BLOCK_TOKENS) * BLOCK_TOKENS if self.whole_blocks else count

    def mask(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of each piece: fp32 [segments, 1, rows, keys(stop)], 0 where a key is visible, else -inf."""
        if (start, stop) in self._masks:
            return self._masks[start, stop]
        keys = torch.arange(self.keys(stop), device=self.positions.device)
        hidden = keys > self.positions[:, start:stop, None]
        mask = torch.zeros(hidden.shape, device=keys.device).masked_fill_(hidden, -torch.inf).unsqueeze(1)
        if mask.numel() <= MASK_ELEMENTS:
            self._masks[start, stop] = mask
        return mask


class Rows:
    """positions: int64 [padded]. written: rows whose entries go to (block, place), all int64; None: rows [0, count).
    fresh: blocks that a piece enters at their begin and leaves unfilled."""

    def __init__(self, pieces: Sequence[Piece], segments: Sequence[Segment], row_multiple: int, device: torch.device) -> None:
        self.device, self.row_multiple = device, row_multiple
        self.pieces = sorted(pieces, key=_shape)
        self.limit = max(piece.stop for piece in self.pieces)
        self.count = sum(piece.length for piece in self.pieces)
        self.padded = -(-self.count // row_multiple) * row_multiple
        positions = [p for piece in self.pieces for p in range(piece.start, piece.stop)]
        self.positions = self._tensor(positions + [0] * (self.padded - self.count))
        self._groups(segments)
        self._targets(segments)

    def _groups(self, segments: Sequence[Segment]) -> None:
        self.groups: list[Group] = []
        begin = 0
        for _, same in groupby(self.pieces, key=_shape):
            pieces = list(same)
            length, blocks = pieces[0].length, max(piece.blocks for piece in pieces)
            tables = []
            for piece in pieces:
                table = list(segments[piece.index].block_table[: piece.blocks])
                tables.append(table + table[:1] * (blocks - len(table)))
            end = begin + length * len(pieces)
            furthest = max(piece.start for piece in pieces)
            positions = self.positions[begin:end].view(len(pieces), length)
            whole = self.row_multiple > 1
            self.groups.append(Group(begin, end, length, self._tensor(tables), positions, furthest, whole))
            begin = end

    def _targets(self, segments: Sequence[Segment]) -> None:
        block, place, written, fresh, row = [], [], [], [], 0
        for piece in self.pieces:
            segment = segments[piece.index]
            table, first = segment.block_table, max(piece.start, segment.write_floor)
            block += [table[p // BLOCK_TOKENS] for p in range(first, piece.stop)]
            place += [p % BLOCK_TOKENS for p in range(first, piece.stop)]
            written += range(row + first - piece.start, row + piece.length)
            row += piece.length
            last = piece.stop // BLOCK_TOKENS
            if piece.stop % BLOCK_TOKENS and first <= last * BLOCK_TOKENS:
                fresh.append(table[last])
        self.block, self.place = self._tensor(block), self._tensor(place)
        self.written = None if len(written) == self.count else self._tensor(written)
        self.fresh = self._tensor(fresh) if fresh else None

    def first_rows(self) -> dict[int, int]:
        """Segment -> its first row minus its first position: row = first_rows()[segment] + position."""
        result, row = {}, 0
        for piece in self.pieces:
            result[piece.index] = row - piece.start
            row += piece.length
        return result

    def _tensor(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _shape(piece: Piece) -> tuple[int, int]:
    return piece.length, (piece.blocks - 1).bit_length()
