"""The rows of one phase of a GPU pass: what the host says of each row, and every index that follows from it.

The host writes one small integer matrix (a column per row) and what is new in the block tables; all other indices are computed
from these on the device, in operations of fixed shape, so that a captured graph can be replayed with another batch. Padding
rows have `live` 0: they write nothing that is read and read nothing.

Where window KV lies: a pool of entries per layer, `ring` of them for every state slot (position p at p % ring), and
behind these a scratch line for pieces that are longer than a ring can take: the window before the piece, then the piece.
Knows positions and places; does not know weights or formats.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ....batch import Segment
from ..rows import Piece

# Rows of the host's matrix.
POSITION, SEQUENCE, SLOT, FLOOR, WRITE_FLOOR, SCRATCH, IN_PIECE, FROM_END, LIVE = range(9)
FIELDS = 9
RING = -(1 << 30)  # SCRATCH of a row whose window lies in its ring


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
    """One phase on the device. Everything here is a function of `matrix` and `tables`."""

    def __init__(
        self,
        matrix: torch.Tensor,
        tables: torch.Tensor,
        *,
        window: int,
        ring: int,
        pending_ring: int,
        slots: int,
        block_tokens: int,
        copies: Copies | None = None,
    ) -> None:
        self.matrix, self.tables, self.copies = matrix, tables, copies
        self.window, self.ring, self.pending_ring, self.slots = window, ring, pending_ring, slots
        self.block_tokens = block_tokens
        self.padded, self.tokens = matrix.shape[1], tables.shape[1] * block_tokens
        self.live = matrix[LIVE] != 0
        self.position = matrix[POSITION].long()
        self.sequence = matrix[SEQUENCE].contiguous()

    @cached_property
    def window_store(self) -> torch.Tensor:
        """Entry of each row's own window KV, int64 [padded]."""
        return self._cells(self.position.unsqueeze(1)).squeeze(1).masked_fill(~self.live, -1)

    @cached_property
    def ring_store(self) -> torch.Tensor:
        """Ring cell of each row, int64 [padded]; -1 for rows that a later one of the pass would overwrite, and for padding."""
        cell = self.matrix[SLOT].long() * self.ring + self.position.remainder(self.ring)
        return cell.masked_fill(~self.live | (self.matrix[FROM_END] > self.ring), -1)

    @cached_property
    def window_index(self) -> torch.Tensor:
        """Entries of each row's window, int32 [padded, window]; -1 where nothing may be seen."""
        seen = self.position.unsqueeze(1) + torch.arange(1 - self.window, 1, device=self.position.device)
        hidden = (seen < self.matrix[FLOOR].long().unsqueeze(1)) | ~self.live.unsqueeze(1)
        return self._cells(seen).masked_fill(hidden, -1).int()

    def _cells(self, positions: torch.Tensor) -> torch.Tensor:
        """[padded, n] positions -> entries."""
        line = self.matrix[SCRATCH].long().unsqueeze(1)
        ring = self.matrix[SLOT].long().unsqueeze(1) * self.ring + positions.remainder(self.ring)
        return torch.where(line == RING, ring, line + positions)

    # -------------------------------------------------------------- compressed entries

    def visible(self, ratio: int) -> torch.Tensor:
        """Entries that each row may see, int32 [padded]; 0 for padding."""
        return ((self.position + 1) // ratio).masked_fill(~self.live, 0).int()

    def entry_store(self, ratio: int) -> torch.Tensor:
        """Pool entry that each row completes and may write, int64 [padded], else -1."""
        begin = self.position - (ratio - 1)
        done = self.live & (self.position % ratio == ratio - 1) & (begin >= self.matrix[WRITE_FLOOR].long())
        return self.entries(self.position.unsqueeze(1) // ratio, ratio).squeeze(1).masked_fill(~done, -1)

    def entries(self, numbers: torch.Tensor, ratio: int) -> torch.Tensor:
        """[padded, n] entry numbers of each row's sequence -> pool entries int64; negative numbers stay negative."""
        per_block = self.block_tokens // ratio
        safe = numbers.clamp_min(0).long()
        table = self.tables.index_select(0, self.sequence).long()
        block = table.gather(1, safe // per_block)
        return (block * per_block + safe % per_block).masked_fill(numbers < 0, -1)

    def group_start(self, ratio: int) -> torch.Tensor:
        """Position of the first token of the entry that a row belongs to, int64 [padded]: where the entry is rotated."""
        return self.position // ratio * ratio

    # -------------------------------------------------------------- pairs

    @cached_property
    def begins(self) -> torch.Tensor:
        """Rows whose predecessor is not in this pass, bool [padded]."""
        return self.matrix[IN_PIECE] == 0

    @cached_property
    def row_before(self) -> torch.Tensor:
        """The row before each row, int64 [padded]; 0 for the first."""
        return torch.arange(-1, self.padded - 1, device=self.position.device).clamp_min(0)

    @cached_property
    def pending_before(self) -> torch.Tensor:
        """Cell of the pending ring of the position before each row's, int64 [padded]."""
        return self.matrix[SLOT].long() * self.pending_ring + (self.position - 1).remainder(self.pending_ring)

    @cached_property
    def pending_store(self) -> torch.Tensor:
        """Cell of the pending ring that each row's projection goes to, int64 [padded]; a cell of the spare slot for rows that
        nobody will ask for."""
        cell = self.matrix[SLOT].long() * self.pending_ring + self.position.remainder(self.pending_ring)
        spare = self.slots * self.pending_ring
        return torch.where(self.live & (self.matrix[FROM_END] <= self.pending_ring), cell, spare)
