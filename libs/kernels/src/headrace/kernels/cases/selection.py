"""Index scores, candidate blocks, exact top-k."""

from collections.abc import Iterator

import torch

from headrace.kernels.cases import Case, Problem, generator, randn
from headrace.kernels.indexer import block_max, block_max_reference, index_scores, index_scores_reference
from headrace.kernels.kv_layouts import PagedKV
from headrace.kernels.quantize import pack_index_record, unpack_index_record
from headrace.kernels.topk import topk, topk_reference


def cases() -> Iterator[Case]:
    for candidates in (False, True):
        for rows, page in ((3, 16), (4, 32)):  # fewer entries than a tile has, over pages
            yield index(rows, 16, 50, candidates, "small", page=page)
        for rows, page in ((5, 64), (8, 128), (14, 64)):  # tiles of 64 and 128, two a program, in a page and over two
            yield index(rows, 32, 300, candidates, "small", page=page)
        yield index(17, 32, 3000, candidates, "full")
    yield index(128, 32, 16384, False, "full", timed=True)
    yield index(128, 32, 65536, False, "full", timed=True)
    yield index(128, 32, 65536, True, "full", timed=True)
    small = [(4, 700, 32), (3, 20, 32), (0, 20, 4), (3, 1003, 16), (1, 20000, 8)]
    full = [(33, 5000, 512), (5, 40000, 512), (3, 600000, 64), (140, 9000, 2048)]
    for rows, n, k, size in [(*c, "small") for c in small] + [(*c, "full") for c in full]:
        yield select(rows, n, k, size)
    timed = [(128, 16384, 512), (128, 65536, 512), (64, 131072, 512), (256, 131072, 512), (4096, 16384, 512), (128, 8192, 2048)]
    for rows, n, k in timed:
        yield select(rows, n, k, "full", timed=True)
    yield best_of_blocks(3, 43, "small")
    yield best_of_blocks(100, 10001, "full")
    yield best_of_blocks(128, 65536, "full", timed=True)


def index(
    rows: int, heads: int, entries: int, candidates: bool, size: str, timed: bool = False, page: int = 128
) -> Case:
    chosen = (5 if entries < 100 else 30) if size == "small" else 2048 if timed else 100

    def build(device: torch.device, seed: int) -> Problem:
        g = generator(device, seed)
        sequences = 2 if not timed else rows
        width = -(-entries // page)
        kv = PagedKV.allocate("index_fp4", sequences * width + 1, page, device=device.type)
        table = torch.randperm(sequences * width, generator=g, device=device).view(sequences, width).int()
        for b in range(sequences):
            at = torch.arange(entries, device=device)
            kv.write(table[b, at // page].long() * page + at % page, randn((entries, 128), device, seed + b))
        q = unpack_index_record(pack_index_record(randn((rows, heads, 128), device, seed + 1)), torch.bfloat16)
        weights = randn((rows, heads), device, seed + 2)
        row_sequence = (torch.arange(rows, device=device) % sequences).int()
        visible = torch.full((rows,), entries, dtype=torch.int32, device=device)
        if not timed:
            visible = torch.randint(0, entries + 1, (rows,), generator=g, device=device).int()
            visible[0] = 0
        blocks = None
        if candidates:
            pick = torch.rand((rows, -(-entries // 8)), generator=g, device=device).topk(min(chosen, -(-entries // 8))).indices
            blocks = pick.sort().values.int()
            blocks[1, -2:] = -1
        arguments = (q, weights, kv, table, row_sequence, visible, entries, blocks)

        def finite(scores):
            return torch.where(scores == float("-inf"), 0.0, scores), (scores == float("-inf"))

        return Problem(
            run=lambda: index_scores(*arguments), reference=lambda: index_scores_reference(*arguments), select=finite
        )

    scored = chosen * 8 if candidates else entries
    return Case("index_scores", f"{rows} rows, {heads} heads, {entries} entries" + f", {chosen} candidate blocks" * candidates,
                build, (1e-4, 0.0), size, timed, flops=2.0 * rows * scored * heads * 128,
                bytes=float(rows * scored * (68 + 4)), target=0.8)  # fmt: skip


def select(rows: int, n: int, k: int, size: str, timed: bool = False) -> Case:
    def build(device: torch.device, seed: int) -> Problem:
        scores = randn((rows, n), device, seed)
        lengths = None
        if not timed and rows:
            scores = torch.relu(scores)  # half are exact ties
            scores[1:2] = float("-inf")
            scores[2:3, : n // 2] = -scores[2:3, : n // 2] - 1
            scores[3:4] = (torch.arange(n, device=device) % 50 == 0).float()  # few values, far more equals than k
            lengths = torch.randint(0, n + 1, (rows,), generator=generator(device, seed), device=device).int()
            lengths[0] = n
            scores = torch.nn.functional.pad(scores, (0, -n % 4), value=9e9)[:, :n]  # what lies behind a row is no score
        return Problem(run=lambda: topk(scores, k, lengths), reference=lambda: topk_reference(scores, k, lengths))

    return Case("topk", f"{rows}x{n} top {k}", build, 0.0, size, timed, bytes=float(rows * (n * 4 + k * 4)), target=0.8)


def best_of_blocks(rows: int, n: int, size: str, timed: bool = False) -> Case:
    def build(device: torch.device, seed: int) -> Problem:
        scores = randn((rows, n), device, seed)
        visible = torch.randint(0, n + 1, (rows,), generator=generator(device, seed), device=device).int()
        visible[0] = 0
        return Problem(
            run=lambda: block_max(scores, visible),
            reference=lambda: block_max_reference(scores, visible),
            select=lambda best: best.clamp(max=9e9),
        )

    return Case("block_max", f"{rows}x{n}", build, 0.0, size, timed, bytes=float(rows * n * 4.5), target=0.8)
