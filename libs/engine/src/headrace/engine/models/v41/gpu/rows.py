"""The rows of one phase of a GPU pass: what the host says of each row, and every index that follows from it.

The host writes one small integer matrix (a column per row) and what is new in the block tables; all other indices follow from
these on the device, in one launch of fixed shape (`headrace.kernels.places`), so that a captured graph can be replayed with
another batch. Padding rows have `live` 0: they write nothing that is read and read nothing. Where window KV lies is told there
too. Knows positions and places; does not know weights or formats.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from headrace.kernels.places import (
    FIELDS,
    FLOOR,
    FROM_END,
    IN_PIECE,
    LIVE,
    POSITION,
    RATIOS,
    RING,
    SCRATCH,
    SEQUENCE,
    SLOT,
    WRITE_FLOOR,
    Layout,
    Places,
    pending_pairs,
    pool_entries,
    row_places,
)

from ....batch import Segment
from ..rows import Piece


@dataclass(slots=True)
class Copies:
    """Entries to copy inside a layer's window pool, for long pieces: history into the scratch line before they are
    attended to, the last rows back into the ring after. int64 [n] each."""

    history_from: torch.Tensor
    history_to: torch.Tensor
    keep_from: torch.Tensor
    keep_to: torch.Tensor


@dataclass(slots=True)
class HostRows:
    """What travels to the device besides block tables: matrix int32 [FIELDS, padded]."""

    matrix: np.ndarray
    copies: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None
    scratch: int  # entries of the scratch line in use
    count: int


@dataclass(slots=True)
class Table:
    """A block table as an array with room to grow. `version`: no other table ever had it; growth leaves it as it is."""

    blocks: Sequence[int]
    array: np.ndarray  # int32, [: len(blocks)] in use
    version: int


_VERSIONS = itertools.count(1)


class Tables:
    """Block tables as arrays, by state slot: a long list takes far longer to convert than to compare."""

    def __init__(self) -> None:
        self._known: dict[int, Table] = {}

    def row(self, slot: int, table: Sequence[int], blocks: int, tokens: int) -> Table:
        """A table whose first `blocks` hold `tokens` tokens. ValueError when it is shorter."""
        if len(table) < blocks:
            raise ValueError(f"{tokens} tokens need {blocks} blocks, the block table has {len(table)}")
        known = self._known.get(slot)
        had = 0 if known is None else len(known.blocks)
        if known is not None and (known.blocks if len(table) >= had else known.blocks[: len(table)]) == table:
            return known
        if 0 < had < len(table) and table[:had] == known.blocks:
            if len(known.array) < len(table):
                known.array = np.concatenate([known.array[:had], np.empty(len(table), np.int32)])
            known.array[had : len(table)] = table[had:]
        else:
            known = self._known[slot] = Table((), np.array(table, np.int32), next(_VERSIONS))
        known.blocks = table if isinstance(table, range) else list(table)
        return known


def _needed(
    pieces: Sequence[Piece], segments: Sequence[Segment], known: Tables, block_tokens: int
) -> Iterator[tuple[Table, int]]:
    """Of each piece, its table and how many of its blocks the piece reads or writes."""
    for piece in pieces:
        segment, needed = segments[piece.index], -(-piece.stop // block_tokens)
        yield known.row(segment.slot, segment.block_table, needed, piece.stop), needed


def table_rows(
    pieces: Sequence[Piece], segments: Sequence[Segment], known: Tables, blocks: int, block_tokens: int
) -> np.ndarray:
    """int32 [pieces, blocks]: the blocks that each piece needs, zeros behind them."""
    rows = np.zeros((len(pieces), blocks), np.int32)
    for row, (table, needed) in zip(rows, _needed(pieces, segments, known, block_tokens), strict=True):
        row[:needed] = table.array[:needed]
    return rows


class SentTables:
    """`table_rows` of a captured pass, padded with rows of zeros: what the device has of them, so that only what is new has to
    be written. One for each graph, whose own input it describes."""

    WHOLE = 4  # with more than one entry in so many changed, all are sent

    def __init__(self, rows: int, blocks: int) -> None:
        self.array = np.zeros((rows, blocks), np.int32)
        self._rows = [(0, 0)] * rows  # (version, blocks in use)
        self._spans: list[tuple[int, int]] = []  # of the flat array, not yet sent

    def put(self, pieces: Sequence[Piece], segments: Sequence[Segment], known: Tables, block_tokens: int) -> None:
        """The next batch, of at most as many pieces as there are rows."""
        used = 0
        for table, needed in _needed(pieces, segments, known, block_tokens):
            if self._rows[used] != (table.version, needed):
                self._write(used, table, needed)
            used += 1
        for row in range(used, len(self._rows)):
            if self._rows[row][1]:
                self._write(row, None, 0)

    def _write(self, row: int, table: Table | None, needed: int) -> None:
        version, had = self._rows[row]
        same = min(had, needed) if table is not None and table.version == version else 0
        line = self.array[row]
        if table is not None:
            line[same:needed] = table.array[same:needed]
        line[needed : max(had, needed)] = 0
        begin = row * len(line)
        self._spans.append((begin + same, begin + max(had, needed)))
        self._rows[row] = (0 if table is None else table.version, needed)

    def unsent(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Places in the flat array int64 [n] and what they hold now, int32 [n]; None when that is no less than all of it.
        They stay unsent until `sent`."""
        if sum(stop - start for start, stop in self._spans) * self.WHOLE > self.array.size:
            return None
        places = np.concatenate([np.empty(0, np.int64), *(np.arange(*span, dtype=np.int64) for span in self._spans)])
        return places, self.array.reshape(-1)[places]

    def sent(self) -> None:
        """The device has it all."""
        self._spans.clear()


def host_rows(
    pieces: Sequence[Piece],
    segments: Sequence[Segment],
    *,
    window: int,
    ring: int,
    slots: int,
    longest: int,
    padded: int,
) -> HostRows:
    """`longest`: rows of a piece that still go through the ring; `padded` rows in all."""
    pairs = [(piece, segments[piece.index]) for piece in pieces]
    fields = [(p.start, p.stop - p.start, s.slot, max(p.floor, 0), s.write_floor, RING) for p, s in pairs]
    start, length, slot, floor, write_floor, line = np.array(fields, np.int32).reshape(-1, 6).T.copy()
    copies, scratch = [], 0
    for number in np.flatnonzero(length > longest):
        piece, segment = pairs[number]
        line[number] = (slots + 1) * ring + scratch - (piece.start - window + 1)  # entry of position 0, had it one
        copies.append(_copies(piece, segment.slot, int(line[number]), window, ring))
        scratch += window - 1 + piece.length
    count = int(length.sum())
    of = np.repeat(np.arange(len(pieces), dtype=np.int32), length)
    inside = np.arange(count, dtype=np.int32) - (np.cumsum(length) - length)[of]
    matrix = np.zeros((FIELDS, padded), np.int32)
    matrix[SCRATCH], matrix[SLOT] = RING, slots  # padding rows write into the spare slot
    own = matrix[:, :count]
    own[POSITION], own[SEQUENCE], own[IN_PIECE], own[FROM_END] = start[of] + inside, of, inside, length[of] - inside
    own[SLOT], own[FLOOR], own[WRITE_FLOOR], own[SCRATCH], own[LIVE] = slot[of], floor[of], write_floor[of], line[of], 1
    joined = tuple(np.concatenate(part).astype(np.int64) for part in zip(*copies, strict=True)) if copies else None
    return HostRows(matrix, joined, scratch, count)


def _copies(piece: Piece, slot: int, line: int, window: int, ring: int) -> tuple[np.ndarray, ...]:
    """A long piece's part of `Copies`; line: entry of position 0 in its scratch line."""
    before = np.arange(max(piece.start - window + 1, 0), piece.start)
    kept = np.arange(max(piece.stop - ring, piece.start), piece.stop)
    return slot * ring + before % ring, line + before, line + kept, slot * ring + kept % ring


class GpuRows:
    """One phase on the device: a function of `matrix`, `tables` and `frequencies` (fp32 [2, R / 2], of window layers and of
    compressed ones)."""

    def __init__(
        self,
        matrix: torch.Tensor,
        tables: torch.Tensor,
        frequencies: torch.Tensor,
        layout: Layout,
        copies: Copies | None = None,
    ) -> None:
        self.matrix, self.tables, self.frequencies, self.copies = matrix, tables, frequencies, copies
        self.layout = layout
        self.padded, self.tokens = matrix.shape[1], tables.shape[1] * layout.block_tokens
        self.sequence = matrix[SEQUENCE]

    @cached_property
    def places(self) -> Places:
        return row_places(self.matrix, self.tables, self.frequencies, self.layout)

    @cached_property
    def _phases(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        angles = self.places.angles
        return list(zip(angles.cos(), angles.sin(), strict=True))

    def phases(self, compressed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of each row's position in layers of one kind, fp32 [padded, R / 2]."""
        return self._phases[compressed]

    def entry_phases(self, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of the first token of the compressed entry that a row belongs to: there the entry is rotated."""
        return self._phases[ratio]

    def visible(self, ratio: int) -> torch.Tensor:
        """Compressed entries that each row may see, int32 [padded]; 0 for padding."""
        return self.places.visible[RATIOS.index(ratio)]

    def entry_store(self, ratio: int) -> torch.Tensor:
        """Pool entry that each row completes and may write, int64 [padded], else -1."""
        return self.places.entry_store[RATIOS.index(ratio)]

    def entries(self, numbers: torch.Tensor, ratio: int, candidates: torch.Tensor | None = None) -> torch.Tensor:
        """Pool entries int32 [padded, k] of entry numbers, or of columns of candidate blocks; negative ones are -1."""
        return pool_entries(numbers, self.tables, self.sequence, self.layout.block_tokens // ratio, candidates)

    def pairs(self, fresh: torch.Tensor, pending: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Projections fp32 [padded, 2, D] behind those of the rows before them, (value, gate) fp32 [2 padded, D]; what later
        passes will ask for goes into pending fp32 [cells, 2, D]."""
        found = pending_pairs(fresh, pending, self.matrix[IN_PIECE], self.places.pending_before)
        pending.index_copy_(0, self.places.pending_store, fresh)
        return found
