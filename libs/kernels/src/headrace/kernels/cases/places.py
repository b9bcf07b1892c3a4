"""Where rows lie: every index that follows from the host's matrix, entries of the pool, pairs with pending rows."""

from collections.abc import Iterator

import torch

from headrace.kernels import places
from headrace.kernels.cases import Case, Problem, generator, randn


def cases() -> Iterator[Case]:
    for rows, window, size in [(9, 6, "small"), (64, 128, "full")]:
        yield indices(rows, window, size)
    for rows, count, size in [(3, 11, "small"), (64, 512, "full")]:
        for candidates in (False, True):
            yield entries(rows, count, candidates, size)
    for rows, dim, size in [(5, 48, "small"), (300, 512, "full")]:
        yield pairs(rows, dim, size)


def some_rows(rows: int, longest: int, slots: int, ring: int, device: torch.device, seed: int) -> torch.Tensor:
    """Pieces of one to nine rows at any position, in a ring or a scratch line; the last row is padding."""
    g = generator(torch.device("cpu"), seed)

    def any_of(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=g))

    matrix = torch.zeros(places.FIELDS, rows, dtype=torch.int32)
    matrix[places.SLOT], matrix[places.SCRATCH] = slots, places.RING
    at, sequence = 0, 0
    while at < rows - 1:
        count, start = min(any_of(1, 10), rows - 1 - at), any_of(0, longest) * (sequence > 0)
        line = places.RING if sequence % 2 == 0 else (slots + 1) * ring + 16 - start
        for i in range(count):
            fields = (start + i, sequence, sequence % slots, start // 2, start + 1, line, i, count - i, 1)
            matrix[:, at + i] = torch.tensor(fields, dtype=torch.int32)
        at, sequence = at + count, sequence + 1
    return matrix.to(device)


def indices(rows: int, window: int, size: str) -> Case:
    longest, block_tokens = 500, 64

    def build(device: torch.device, seed: int) -> Problem:
        matrix = some_rows(rows, longest, 3, 2 * window, device, seed)
        shape = rows, -(-(longest + 10) // block_tokens)
        tables = torch.randint(0, 1000, shape, generator=generator(device, seed), device=device, dtype=torch.int32)
        frequencies = randn((2, 32), device, seed).abs()
        layout = places.Layout(window, ring=2 * window, pending_ring=4, slots=3, block_tokens=block_tokens)

        def run(make):
            found = make(matrix, tables, frequencies, layout)
            return tuple(getattr(found, name) for name in places.Places.__slots__)

        return Problem(run=lambda: run(places.row_places), reference=lambda: run(places.row_places_reference))

    return Case("row_places", f"{rows} rows, window {window}", build, 0.0, size)


def entries(rows: int, count: int, candidates: bool, size: str) -> Case:
    """Behind the last number, and somewhere else too, there is none."""
    blocks, per_block = 40, 16

    def build(device: torch.device, seed: int) -> Problem:
        g = generator(device, seed)

        def draw(most: int, *shape: int) -> torch.Tensor:
            return torch.randint(0, most, shape, generator=g, device=device, dtype=torch.int32)

        tables, sequence = draw(1000, rows, blocks), draw(rows, rows)
        allowed = draw(blocks * per_block // places.CANDIDATE_BLOCK, rows, 30) if candidates else None
        numbers = draw(30 * places.CANDIDATE_BLOCK if candidates else blocks * per_block, rows, count)
        numbers[:, -2:], numbers[0, 1] = -1, -1
        what = numbers, tables, sequence, per_block, allowed
        return Problem(run=lambda: places.pool_entries(*what), reference=lambda: places.pool_entries_reference(*what))

    return Case("pool_entries", f"{rows}x{count}" + " of candidates" * candidates, build, 0.0, size)


def pairs(rows: int, dim: int, size: str) -> Case:
    def build(device: torch.device, seed: int) -> Problem:
        fresh, pending = randn((rows, 2, dim), device, seed), randn((20, 2, dim), device, seed + 1)
        in_piece = torch.arange(rows, device=device, dtype=torch.int32) % 3
        before = torch.randint(0, 20, (rows,), generator=generator(device, seed), device=device)
        what = fresh, pending, in_piece, before
        return Problem(run=lambda: places.pending_pairs(*what), reference=lambda: places.pending_pairs_reference(*what))

    return Case("pending_pairs", f"{rows} rows of {dim}", build, 0.0, size)
