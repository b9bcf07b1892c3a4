"""Where the rows of a pass lie: ring cells, windows, compressed entries and angles, from what the host says of each row.

The host writes a small integer matrix (FIELDS rows, a column per row of the pass) and block tables; everything else follows in
one launch, of fixed shape. Rows that are not live write nothing that is read (-1, or a spare cell) and see nothing.

A layer's pool of window KV has `ring` entries for every slot (position p at p % ring), and behind all slots scratch lines for
pieces too long for a ring: SCRATCH is the entry of position 0 there, or RING. Compressed entries lie in paged pools: entry e of
a sequence, of `ratio` tokens, is number e % (block_tokens / ratio) of block tables[sequence, e // (block_tokens / ratio)]. The
pending ring keeps what the first token of an unfinished pair projects to, position p at p % pending_ring of its slot.
"""

from dataclasses import dataclass

import torch

from headrace.kernels._triton import cdiv, next_power_of_2, tl, triton
from headrace.kernels.indexer import CANDIDATE_BLOCK

POSITION, SEQUENCE, SLOT, FLOOR, WRITE_FLOOR, SCRATCH, IN_PIECE, FROM_END, LIVE = range(9)
FIELDS = 9
RING = -(1 << 30)  # SCRATCH of a row whose window lies in its ring
RATIOS = (1, 2)  # tokens of a compressed entry


@dataclass(frozen=True, slots=True)
class Layout:
    """Where rows may lie. `slots`: the number of the spare slot, behind all others."""

    window: int
    ring: int  # entries of a slot's window KV
    pending_ring: int  # cells of a slot
    slots: int
    block_tokens: int


@dataclass(slots=True)
class Places:
    """Of T rows. Entries and cells that are not to be written are -1 but in `pending_store`, which names a spare cell."""

    live: torch.Tensor  # bool [T]
    window_index: torch.Tensor  # int32 [T, window], entries that a row may see, else -1
    window_store: torch.Tensor  # int64 [T], where a row's own window KV goes
    ring_store: torch.Tensor  # int64 [T], the same in the ring; -1 too where a later row of the piece would write over it
    pending_before: torch.Tensor  # int64 [T], cell of the position before
    pending_store: torch.Tensor  # int64 [T]
    visible: torch.Tensor  # int32 [ratios, T], compressed entries that a row may see
    entry_store: torch.Tensor  # int64 [ratios, T], the entry that a row completes and may write
    angles: torch.Tensor  # fp32 [3, T, R / 2], see `row_places`


def row_places_reference(
    matrix: torch.Tensor, tables: torch.Tensor, frequencies: torch.Tensor, layout: Layout
) -> Places:
    """The specification, in torch; see `row_places`."""
    window, ring, pending_ring, slots = layout.window, layout.ring, layout.pending_ring, layout.slots
    live, position, slot = matrix[LIVE] != 0, matrix[POSITION].long(), matrix[SLOT].long()

    def cells(positions: torch.Tensor) -> torch.Tensor:
        line, in_ring = matrix[SCRATCH].long().unsqueeze(1), slot.unsqueeze(1) * ring + positions.remainder(ring)
        return torch.where(line == RING, in_ring, line + positions)

    seen = position.unsqueeze(1) + torch.arange(1 - window, 1, device=position.device)
    hidden = (seen < matrix[FLOOR].unsqueeze(1)) | ~live.unsqueeze(1)
    in_ring = slot * ring + position.remainder(ring)
    pending = slot * pending_ring + position.remainder(pending_ring)
    store = []
    for ratio in RATIOS:
        done = live & (position % ratio == ratio - 1) & (position - (ratio - 1) >= matrix[WRITE_FLOOR])
        entry = pool_entries_reference((position // ratio).unsqueeze(1), tables, matrix[SEQUENCE], layout.block_tokens // ratio)
        store.append(entry.long().squeeze(1).masked_fill(~done, -1))
    turned = (position, frequencies[0]), (position, frequencies[1]), (position // 2 * 2, frequencies[1])
    return Places(
        live=live,
        window_index=cells(seen).masked_fill(hidden, -1).int(),
        window_store=cells(position.unsqueeze(1)).squeeze(1).masked_fill(~live, -1),
        ring_store=in_ring.masked_fill(~live | (matrix[FROM_END] > ring), -1),
        pending_before=slot * pending_ring + (position - 1).remainder(pending_ring),
        pending_store=torch.where(live & (matrix[FROM_END] <= pending_ring), pending, slots * pending_ring),
        visible=torch.stack([((position + 1) // ratio).masked_fill(~live, 0).int() for ratio in RATIOS]),
        entry_store=torch.stack(store),
        angles=torch.stack([at.float().unsqueeze(1) * each for at, each in turned]),
    )


def row_places(matrix: torch.Tensor, tables: torch.Tensor, frequencies: torch.Tensor, layout: Layout) -> Places:
    """matrix int32 [FIELDS, T], tables int32 [sequences, blocks], frequencies fp32 [2, R / 2] of window and compressed layers,
    in one launch. Angles: those of window and of compressed layers at each row's position, then of compressed layers at the
    first position of the pair that the row belongs to.
    """
    rows, window, device = matrix.shape[1], layout.window, matrix.device
    if matrix.shape[0] != FIELDS or not all(t.is_contiguous() for t in (matrix, tables, frequencies)):
        raise ValueError(f"row_places needs contiguous tensors and a matrix of {FIELDS} fields, got {matrix.shape[0]}")
    window_index = torch.empty(rows, window, dtype=torch.int32, device=device)
    at = torch.empty(4 + len(RATIOS), rows, dtype=torch.int64, device=device)
    visible = torch.empty(len(RATIOS), rows, dtype=torch.int32, device=device)
    live = torch.empty(rows, dtype=torch.bool, device=device)
    half = frequencies.shape[1]
    angles = torch.empty(3, rows, half, dtype=torch.float32, device=device)
    if rows:
        _places_kernel[(rows,)](
            matrix, tables, frequencies, window_index, at, visible, live.view(torch.uint8), angles,
            rows, tables.shape[1], window, layout.ring, layout.pending_ring, layout.slots, layout.block_tokens,
            WINDOW=next_power_of_2(window), HALF=next_power_of_2(half), ANGLES=half, num_warps=1,
        )  # fmt: skip
    return Places(live, window_index, *at[:4], visible, at[4:], angles)


@triton.jit
def _places_kernel(
    matrix_ptr, table_ptr, frequency_ptr, window_ptr, at_ptr, visible_ptr, live_ptr, angle_ptr, rows, blocks, window, ring,
    pending_ring, slots, block_tokens, WINDOW: tl.constexpr, HALF: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    """A row a program; fields in the order of this module's constants."""
    row = tl.program_id(0)
    position = tl.load(matrix_ptr + row)
    sequence = tl.load(matrix_ptr + rows + row)
    slot = tl.load(matrix_ptr + 2 * rows + row)
    floor = tl.load(matrix_ptr + 3 * rows + row)
    write_floor = tl.load(matrix_ptr + 4 * rows + row)
    line = tl.load(matrix_ptr + 5 * rows + row)
    from_end = tl.load(matrix_ptr + 7 * rows + row)
    live = tl.load(matrix_ptr + 8 * rows + row) != 0
    tl.store(live_ptr + row, tl.where(live, 1, 0).to(tl.uint8))
    in_ring = line == -1073741824  # RING

    back = tl.arange(0, WINDOW)
    seen = position + 1 - window + back
    cell = tl.where(in_ring, slot * ring + (seen + ring) % ring, line + seen)  # seen is above -ring where it counts
    cell = tl.where((seen >= tl.maximum(floor, 0)) & live, cell, -1)
    tl.store(window_ptr + row.to(tl.int64) * window + back, cell, mask=back < window)

    place = at_ptr + row
    own = slot * ring + position % ring
    tl.store(place, tl.where(live, tl.where(in_ring, own, line + position), -1).to(tl.int64))
    tl.store(place + rows, tl.where(live & (from_end <= ring), own, -1).to(tl.int64))
    pending = slot * pending_ring
    tl.store(place + 2 * rows, (pending + (position - 1 + pending_ring) % pending_ring).to(tl.int64))
    keep = live & (from_end <= pending_ring)
    tl.store(place + 3 * rows, tl.where(keep, pending + position % pending_ring, slots * pending_ring).to(tl.int64))
    for ratio in tl.static_range(1, 3):  # RATIOS
        tl.store(visible_ptr + (ratio - 1) * rows + row, tl.where(live, (position + 1) // ratio, 0))
        number, per_block = position // ratio, block_tokens // ratio
        block = tl.load(table_ptr + sequence.to(tl.int64) * blocks + number // per_block).to(tl.int64)
        done = live & (position % ratio == ratio - 1) & (position - (ratio - 1) >= write_floor)
        tl.store(place + (3 + ratio) * rows, tl.where(done, block * per_block + number % per_block, -1))

    turn = tl.arange(0, HALF)
    inside = turn < ANGLES
    window_frequency = tl.load(frequency_ptr + turn, mask=inside, other=0.0)
    frequency = tl.load(frequency_ptr + ANGLES + turn, mask=inside, other=0.0)
    angle = angle_ptr + row.to(tl.int64) * ANGLES + turn
    far = tl.num_programs(0).to(tl.int64) * ANGLES
    tl.store(angle, position.to(tl.float32) * window_frequency, mask=inside)
    tl.store(angle + far, position.to(tl.float32) * frequency, mask=inside)
    tl.store(angle + 2 * far, (position // 2 * 2).to(tl.float32) * frequency, mask=inside)


def pool_entries_reference(
    numbers: torch.Tensor,
    tables: torch.Tensor,
    sequence: torch.Tensor,
    per_block: int,
    candidates: torch.Tensor | None = None,
) -> torch.Tensor:
    """The specification, in torch; see `pool_entries`."""
    safe = numbers.clamp_min(0).long()
    if candidates is not None:
        safe = candidates.gather(1, safe // CANDIDATE_BLOCK).long() * CANDIDATE_BLOCK + safe % CANDIDATE_BLOCK
    block = tables.index_select(0, sequence).long().gather(1, safe // per_block)
    return (block * per_block + safe % per_block).masked_fill(numbers < 0, -1).int()


def pool_entries(
    numbers: torch.Tensor,
    tables: torch.Tensor,
    sequence: torch.Tensor,
    per_block: int,
    candidates: torch.Tensor | None = None,
) -> torch.Tensor:
    """Entry numbers of each row's sequence, int32 [T, k] (-1: none), -> entries of the pool int32 [T, k], in one launch.

    tables int32 [sequences, blocks] of `per_block` entries a block, sequence int32 [T]. With candidates int32 [T, C], numbers
    are columns of scores of these blocks, CANDIDATE_BLOCK entries each.
    """
    numbers, tables, sequence = numbers.contiguous(), tables.contiguous(), sequence.contiguous()
    candidates = None if candidates is None else candidates.contiguous()
    rows, count = numbers.shape
    out = torch.empty(rows, count, dtype=torch.int32, device=numbers.device)
    if out.numel():
        block = min(1024, next_power_of_2(count))
        _entries_kernel[(rows, cdiv(count, block))](
            numbers, tables, sequence, numbers if candidates is None else candidates, out, count, tables.shape[1], per_block,
            0 if candidates is None else candidates.shape[1], CANDIDATES=candidates is not None, SIZE=CANDIDATE_BLOCK,
            BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _entries_kernel(
    number_ptr, table_ptr, sequence_ptr, candidate_ptr, out_ptr, count, blocks, per_block, width,
    CANDIDATES: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(number_ptr + row * count + column, mask=column < count, other=-1)
    there = number >= 0
    if CANDIDATES:
        chosen = tl.load(candidate_ptr + row * width + number // SIZE, mask=there, other=0)
        number = chosen * SIZE + number % SIZE
    table = table_ptr + tl.load(sequence_ptr + row).to(tl.int64) * blocks
    block = tl.load(table + number // per_block, mask=there, other=0)
    tl.store(out_ptr + row * count + column, tl.where(there, block * per_block + number % per_block, -1), mask=column < count)


def pending_pairs_reference(
    fresh: torch.Tensor, pending: torch.Tensor, in_piece: torch.Tensor, before: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification, in torch; see `pending_pairs`."""
    first = torch.where((in_piece == 0)[:, None, None], pending.index_select(0, before), fresh.roll(1, 0))
    pairs = torch.stack([first, fresh], 1)  # [T, token of the pair, part, D]
    return pairs[:, :, 0].flatten(0, 1), pairs[:, :, 1].flatten(0, 1)


def pending_pairs(
    fresh: torch.Tensor, pending: torch.Tensor, in_piece: torch.Tensor, before: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's projection behind that of the row before it: from `fresh` fp32 [T, 2, D], or, where the piece begins (in_piece
    0), from cell `before` int64 [T] of `pending` fp32 [cells, 2, D]. -> both parts (value, gate) fp32 [2 T, D], one launch."""
    rows, parts, dim = fresh.shape
    if parts != 2 or not (fresh.is_contiguous() and pending.is_contiguous()):
        raise ValueError(f"pending_pairs needs contiguous rows of 2 parts, got {parts}")
    pairs = torch.empty(2, 2 * rows, dim, dtype=fresh.dtype, device=fresh.device)
    if rows:
        _pairs_kernel[(rows, 2)](
            fresh, pending, in_piece.contiguous(), before, pairs, dim, BLOCK=next_power_of_2(dim), num_warps=1
        )
    return pairs[0], pairs[1]


@triton.jit
def _pairs_kernel(fresh_ptr, pending_ptr, in_piece_ptr, before_ptr, out_ptr, dim, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < dim
    begins = tl.load(in_piece_ptr + row) == 0
    cell = tl.load(before_ptr + row)
    own = tl.load(fresh_ptr + (2 * row + part) * dim + column, mask=inside)
    kept = tl.load(pending_ptr + (2 * cell + part) * dim + column, mask=column < tl.where(begins, dim, 0), other=0.0)
    last = tl.load(fresh_ptr + (2 * row - 2 + part) * dim + column, mask=column < tl.where(begins, 0, dim), other=0.0)
    out = out_ptr + (part.to(tl.int64) * tl.num_programs(0) + row) * (2 * dim) + column
    tl.store(out, tl.where(begins, kept, last), mask=inside)
    tl.store(out + dim, own, mask=inside)
