"""FP8 matrix products with block scales, dense and grouped: D[m, n] = sum_k A[m, k] B[n, k]   (V3 family).

A is e4m3 with an fp32 scale per row and 128 columns; B is e4m3 with a scale per 128x128 block. Each 128-wide slice of K
is summed by the matrix unit, then scaled into an fp32 accumulator: the matrix unit alone keeps too few bits over long
sums. Three launch forms of the same arithmetic:
  wide    tiles of rows x columns, for many rows
  tailed  a wide tile and a narrower one at its right, whose product runs while the partial sum of the first is scaled; else
          the matrix unit would wait for every scaling, unless other programs of the processor keep it busy
  narrow  B may be the left operand, so that a few rows fill a 16-wide tile instead of wasting a 64-row one; K may be split
          over programs, whose parts the last one to arrive adds in split order, so that repeated runs are bit-equal
Grouped products (mixture of experts) take B [G, n, k] and rows in one of two layouts:
  contiguous  rows of all groups in one list, each group's segment beginning at a multiple of 128; `group_of_row` names
              each row's group, -1 for padding, whose output is not written
  masked      A [G, m, k] with `counts` [G] rows used in each group; other rows are neither needed nor written
"""

import torch

from headrace.kernels import quantize, tuning
from headrace.kernels._triton import TensorDescriptor, cdiv, dot, processor_count, tl, triton, workspace

BLOCK = 128


def gemm_fp8_reference(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The specification, in `dtype`. a [m, k], a_scale [m, k / 128], b [n, k], b_scale [n / 128, k / 128] -> [m, n]."""
    left = quantize.dequantize_fp8(a, a_scale, BLOCK, dtype)
    return left @ quantize.dequantize_block_fp8(b, b_scale, BLOCK, dtype).T


def grouped_gemm_fp8_reference(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    group_of_row: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The specification of both row layouts; rows that the kernel does not write are 0 here."""
    out = torch.zeros(*a.shape[:-1], b.shape[1], dtype=dtype, device=a.device)
    for g in range(b.shape[0]):
        rows = (g, slice(0, int(counts[g]))) if counts is not None else (group_of_row == g,)
        out[rows] = gemm_fp8_reference(a[rows], a_scale[rows], b[g], b_scale[g], dtype)
    return out


def gemm_fp8(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """a e4m3 [m, k], a_scale fp32 [m, k/128] of any strides, b e4m3 [n, k], b_scale fp32 [n/128, k/128] -> bf16 [m, n].

    k and n are multiples of 128 and 16. With `batch_invariant` one launch form and no split serve every m.
    """
    return _launch(a, a_scale, b.unsqueeze(0), b_scale.unsqueeze(0), None, None, batch_invariant, out)


def grouped_gemm_fp8(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    group_of_row: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    expected_rows: int | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """b e4m3 [G, n, k], b_scale fp32 [G, n/128, k/128]; give `group_of_row` int32 [m] or `counts` int32 [G].

    contiguous: a [m, k], a_scale [m, k/128] -> [m, n]; masked: a [G, m, k], a_scale [G, m, k/128] -> [G, m, n].
    `expected_rows` per group (host integer, masked layout) only chooses the tile.
    """
    if (group_of_row is None) == (counts is None):
        raise ValueError("a grouped product takes exactly one of group_of_row (contiguous rows) and counts (masked rows)")
    return _launch(a, a_scale, b, b_scale, group_of_row, counts, batch_invariant, out, expected_rows)


def _launch(a, a_scale, b, b_scale, group_of_row, counts, batch_invariant, out, expected_rows=None):
    groups, n, k = b.shape
    m = a.shape[-2]
    if a.shape[-1] != k or k % BLOCK or n % 16:
        raise ValueError(f"a has {a.shape[-1]} columns and b [{n}, {k}]: k must agree and divide by 128, n by 16")
    masked = counts is not None
    rows = groups * m if masked else m
    out = torch.empty(*a.shape[:-1], n, dtype=torch.bfloat16, device=a.device) if out is None else out
    if not rows:
        return out
    kind = "masked" if masked else "contiguous" if group_of_row is not None else "dense"
    busy_rows = min(m, expected_rows or m)
    config = tuning.gemm_fp8(kind, busy_rows, n, k, batch_invariant)
    a = a.view(rows, k)
    a_scale = a_scale.reshape(rows, -1) if masked else a_scale
    index = counts if masked else group_of_row if group_of_row is not None else a_scale
    bm, bn = config["BLOCK_M"], config["BLOCK_N"]
    row_tiles, column_tiles = cdiv(m, bm), cdiv(n, bn)
    mode = {"dense": 0, "contiguous": 1, "masked": 2}[kind]
    shared = {"K": k, "MODE": mode, "BLOCK_M": bm, "BLOCK_N": bn, "STAGES": config["STAGES"], "num_warps": config["num_warps"]}
    grid_m = row_tiles * (groups if masked else 1)
    left = TensorDescriptor.from_tensor(a, [bm, BLOCK])
    if config["FORM"] == "narrow":
        turns = cdiv(k // BLOCK, 1 + config["PAIR"])
        splits = _splits(grid_m * column_tiles, turns, config["WAVES"]) if not batch_invariant and mode == 0 else 1
        partial, counter = workspace(a.device, *parts_space(splits, grid_m * column_tiles, bm * bn))
        right = TensorDescriptor.from_tensor(b.view(groups * n, k), [bn, BLOCK])
        programs = (column_tiles, grid_m, splits) if config["GROUP_M"] == 1 else (grid_m * column_tiles, 1, splits)
        _narrow_kernel[programs](
            left, right, a_scale, b_scale, index, out, partial, counter, m, rows, n,
            a_scale.stride(0), a_scale.stride(1), SPLIT=splits > 1, PAIR=config["PAIR"], ROWS_LEFT=config["ROWS_LEFT"],
            GROUP_M=config["GROUP_M"], **shared,
        )  # fmt: skip
        return out
    if config["FORM"] == "tailed":
        right, tail = (TensorDescriptor.from_tensor(b.view(groups * n, k), [width, BLOCK]) for width in (bn, config["TAIL"]))
        _tailed_kernel[(grid_m * cdiv(n, bn + config["TAIL"]),)](
            left, right, tail, a_scale, b_scale, index, out, m, n, row_tiles, a_scale.stride(0), a_scale.stride(1),
            TAIL=config["TAIL"], GROUP_M=config["GROUP_M"], **shared,
        )  # fmt: skip
        return out
    right = TensorDescriptor.from_tensor(b.view(groups * n, k), [bn, BLOCK])
    _wide_kernel[(grid_m * column_tiles,)](
        left, right, a_scale, b_scale, index, out, m, n, row_tiles, a_scale.stride(0), a_scale.stride(1),
        GROUP_M=config["GROUP_M"], **shared,
    )  # fmt: skip
    return out


def _splits(programs: int, steps: int, waves: int) -> int:
    """Parts of K that give about `waves` programs per processor, each at least two turns long and all non-empty."""
    splits = max(1, min(waves * processor_count() // programs, steps // 2))
    return cdiv(steps, cdiv(steps, splits))


def parts_space(splits: int, tiles: int, size: int) -> tuple[int, int]:
    """Floats and counters that `tiles` sums of `size` elements need, each in so many parts."""
    return (splits * tiles * size, tiles) if splits > 1 else (1, 1)


@triton.jit
def _tile_rows(index_ptr, tile, m, row_tiles, MODE: tl.constexpr, BLOCK_M: tl.constexpr):
    """(group, first row of the tile, rows [BLOCK_M], mask of rows to write) of a row tile; group -1: nothing to do."""
    if MODE == 2:
        group = tile // row_tiles
        local = (tile % row_tiles) * BLOCK_M
        count = tl.load(index_ptr + group)
        first = group * m + local
        row = first + tl.arange(0, BLOCK_M)
        live = local + tl.arange(0, BLOCK_M) < count
        group = tl.where(local < count, group, -1)
    elif MODE == 1:
        first = tile * BLOCK_M
        row = first + tl.arange(0, BLOCK_M)
        group = tl.load(index_ptr + first)
        live = tl.load(index_ptr + row, mask=row < m, other=-2) == group
    else:
        first = tile * BLOCK_M
        row = first + tl.arange(0, BLOCK_M)
        live = row < m
        group = 0
    return group, first, row, live


@triton.jit
def _place(column_tiles, GROUP_M: tl.constexpr):
    """(row tile, column tile) of this program. Blocks of GROUP_M row tiles walk all column tiles, so that both operands stay
    in the L2 cache."""
    pid = tl.program_id(0)
    row_tiles = tl.num_programs(0) // column_tiles
    per_group = GROUP_M * column_tiles
    first_row_tile = (pid // per_group) * GROUP_M
    height = tl.minimum(row_tiles - first_row_tile, GROUP_M)
    return first_row_tile + (pid % per_group) % height, (pid % per_group) // height


@triton.jit
def _wide_kernel(
    a_desc, b_desc, a_scale_ptr, b_scale_ptr, index_ptr, out_ptr, m, n, row_tiles, stride_am, stride_ak,
    K: tl.constexpr, MODE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = K // 128
    column_tiles = tl.cdiv(n, BLOCK_N)
    tile, column = _place(column_tiles, GROUP_M)
    column *= BLOCK_N
    group, first, row, live = _tile_rows(index_ptr, tile, m, row_tiles, MODE, BLOCK_M)
    if group < 0:
        return
    b_row = group * n + column
    scale_rows = tl.cdiv(n, 128)
    a_scale_row = a_scale_ptr + row.to(tl.int64) * stride_am
    b_scale_row = b_scale_ptr + (group * scale_rows + column // 128) * STEPS
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        a = a_desc.load([first, step * 128])
        a_scale = tl.load(a_scale_row + step * stride_ak, mask=live, other=0.0)
        b = b_desc.load([b_row, step * 128])
        part = dot(a, b.T, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        acc += part * (a_scale * tl.load(b_scale_row + step))[:, None]
    columns = column + tl.arange(0, BLOCK_N)
    out_row = out_ptr + row.to(tl.int64)[:, None] * n
    tl.store(out_row + columns[None, :], acc.to(tl.bfloat16), mask=live[:, None] & (columns < n)[None, :])


@triton.jit
def _tailed_kernel(
    a_desc, b_desc, tail_desc, a_scale_ptr, b_scale_ptr, index_ptr, out_ptr, m, n, row_tiles, stride_am, stride_ak,
    K: tl.constexpr, MODE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
    GROUP_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Columns: BLOCK_N, then TAIL, multiples of 64. The tail's product of a step is carried to the next one: the compiler
    waits for all products in flight right after a product that the same turn uses, so the order here is

        product | wait | scale the tail of the step before | start the tail's product | scale the product

    and only the scaling of the narrow tail leaves the matrix unit idle. Any use of `late` after its new product has started
    would need a copy of registers that the unit still writes, and ptxas then makes all products wait for each other (C7514).
    """
    STEPS: tl.constexpr = K // 128
    column_tiles = tl.cdiv(n, BLOCK_N + TAIL)
    tile, column = _place(column_tiles, GROUP_M)
    column *= BLOCK_N + TAIL
    group, first, row, live = _tile_rows(index_ptr, tile, m, row_tiles, MODE, BLOCK_M)
    if group < 0:
        return
    b_row = group * n + column
    scale_rows = tl.cdiv(n, 128)
    a_scale_row = a_scale_ptr + row.to(tl.int64) * stride_am
    b_scale_group = b_scale_ptr + group * scale_rows * STEPS
    b_scale_0 = b_scale_group + tl.minimum(column // 128, scale_rows - 1) * STEPS
    b_scale_64 = b_scale_group + tl.minimum((column + 64) // 128, scale_rows - 1) * STEPS
    b_scale_tail = b_scale_group + tl.minimum((column + BLOCK_N) // 128, scale_rows - 1) * STEPS
    right = (tl.arange(0, BLOCK_N) >= 64)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_tail = tl.zeros([BLOCK_M, TAIL], tl.float32)
    late = tl.zeros([BLOCK_M, TAIL], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        before = tl.maximum(step - 1, 0)
        late_scale = tl.load(a_scale_row + before * stride_ak, mask=live, other=0.0) * tl.load(b_scale_tail + before)
        a_scale = tl.load(a_scale_row + step * stride_ak, mask=live, other=0.0)
        a = a_desc.load([first, step * 128])
        b = b_desc.load([b_row, step * 128])
        b_tail = tail_desc.load([b_row + BLOCK_N, step * 128])
        part = dot(a, b.T, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        acc_tail += late * late_scale[:, None]
        late = dot(a, b_tail.T, tl.zeros([BLOCK_M, TAIL], tl.float32))
        scale = (a_scale * tl.load(b_scale_0 + step))[:, None]
        scale_64 = (a_scale * tl.load(b_scale_64 + step))[:, None]
        acc += part * tl.where(right, scale_64, scale)
    last = STEPS - 1
    late_scale = tl.load(a_scale_row + last * stride_ak, mask=live, other=0.0) * tl.load(b_scale_tail + last)
    acc_tail += late * late_scale[:, None]
    columns = column + tl.arange(0, BLOCK_N)
    out_row = out_ptr + row.to(tl.int64)[:, None] * n
    tl.store(out_row + columns[None, :], acc.to(tl.bfloat16), mask=live[:, None] & (columns < n)[None, :])
    columns = column + BLOCK_N + tl.arange(0, TAIL)
    tl.store(out_row + columns[None, :], acc_tail.to(tl.bfloat16), mask=live[:, None] & (columns < n)[None, :])


@triton.jit
def _narrow_kernel(
    a_desc, b_desc, a_scale_ptr, b_scale_ptr, index_ptr, out_ptr, partial_ptr, counter_ptr, m, rows, n,
    stride_am, stride_ak,
    K: tl.constexpr, MODE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS_LEFT: tl.constexpr,
    GROUP_M: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """PAIR: two steps a turn, the second as the tail of _tailed_kernel; past the last step its operands are zero."""
    STEPS: tl.constexpr = K // 128
    TURN: tl.constexpr = 2 if PAIR else 1
    column_tiles = tl.cdiv(n, BLOCK_N)
    if GROUP_M == 1:  # a short program feels the divisions of _place
        column_tile, tile = tl.program_id(0), tl.program_id(1)
    else:
        tile, column_tile = _place(column_tiles, GROUP_M)
    column = column_tile * BLOCK_N
    group, first, row, live = _tile_rows(index_ptr, tile, m, tl.cdiv(m, BLOCK_M), MODE, BLOCK_M)
    if group < 0:
        return
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    per_split = tl.cdiv(tl.cdiv(STEPS, TURN), splits) * TURN
    begin, end = split * per_split, tl.minimum((split + 1) * per_split, STEPS)
    b_row = group * n + column
    a_scale_row = a_scale_ptr + row.to(tl.int64) * stride_am
    b_scale_row = b_scale_ptr + (group * tl.cdiv(n, 128) + column // 128) * STEPS
    acc = _zeros(ROWS_LEFT, BLOCK_M, BLOCK_N)
    late = _zeros(ROWS_LEFT, BLOCK_M, BLOCK_N)
    for step in tl.range(begin, end, TURN, num_stages=STAGES):
        b = b_desc.load([b_row, step * 128])
        a = a_desc.load([first, step * 128])
        scale = tl.load(a_scale_row + step * stride_ak, mask=live, other=0.0) * tl.load(b_scale_row + step)
        if PAIR:
            b_late = b_desc.load([b_row, step * 128 + 128])
            a_late = a_desc.load([first, step * 128 + 128])
            before = tl.maximum(step - 1, begin)
            late_scale = tl.load(a_scale_row + before * stride_ak, mask=live, other=0.0) * tl.load(b_scale_row + before)
        part = _product(a, b, ROWS_LEFT)
        if PAIR:
            if step > begin:  # a block of its own: else the compiler moves these sums behind the next product
                acc += late * _per_row(late_scale, ROWS_LEFT)
            late = _product(a_late, b_late, ROWS_LEFT)
        acc += part * _per_row(scale, ROWS_LEFT)
    if PAIR:
        last = end - 1
        late_scale = tl.load(a_scale_row + last * stride_ak, mask=live, other=0.0) * tl.load(b_scale_row + last)
        acc += late * _per_row(late_scale, ROWS_LEFT)
    columns = column + tl.arange(0, BLOCK_N)
    if ROWS_LEFT:
        at = row.to(tl.int64)[:, None] * n + columns[None, :]
        mask = live[:, None] & (columns < n)[None, :]
    else:
        at = row.to(tl.int64)[None, :] * n + columns[:, None]
        mask = live[None, :] & (columns < n)[:, None]
    if SPLIT:
        if not leave_part(acc, partial_ptr, counter_ptr, tile * column_tiles + column_tile):
            return
        acc = add_parts(acc, partial_ptr, counter_ptr, tile * column_tiles + column_tile)
    tl.store(out_ptr + at, acc.to(tl.bfloat16), mask=mask)


@triton.jit
def _product(a, b, ROWS_LEFT: tl.constexpr):
    """a [M, 128], b [N, 128] -> a b^T [M, N], or, with the weight on the left, b a^T [N, M]."""
    if ROWS_LEFT:
        return dot(a, b.T, _zeros(ROWS_LEFT, a.shape[0], b.shape[0]))
    else:
        return dot(b, a.T, _zeros(ROWS_LEFT, a.shape[0], b.shape[0]))


@triton.jit
def _zeros(ROWS_LEFT: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    return tl.zeros([M, N] if ROWS_LEFT else [N, M], tl.float32)


@triton.jit
def _per_row(scale, ROWS_LEFT: tl.constexpr):
    """Scales of rows [M], to multiply with a product of `_product`."""
    if ROWS_LEFT:
        return scale[:, None]
    else:
        return scale[None, :]


@triton.jit
def leave_part(acc, partial_ptr, counter_ptr, tile):
    """Write this program's part of a tile's sum; true for the last of the tile's programs (axis 2 of the grid) to arrive.

    Parts lie as tiles, not as rows of the result: a thread's addresses are then constants beside one that all share.
    """
    at = _parts_at(partial_ptr, tile, acc.shape[0], acc.shape[1])
    tl.store(at + tl.program_id(2).to(tl.int64) * (acc.shape[0] * acc.shape[1]), acc)
    tl.debug_barrier()  # every thread's part is written before this program says so
    return tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == tl.num_programs(2) - 1


@triton.jit
def add_parts(like, partial_ptr, counter_ptr, tile):
    """The sum of a tile's parts in their order, fp32 of the shape of `like`; the tile's counter is zero again.

    A few are read at once: one after another, each would wait for memory anew; too many, and a program takes so many registers
    that fewer of them fit a processor."""
    SIZE: tl.constexpr = like.shape[0] * like.shape[1]
    splits = tl.num_programs(2)
    at = _parts_at(partial_ptr, tile, like.shape[0], like.shape[1])
    total = tl.zeros(like.shape, tl.float32)
    if SIZE <= 4096:
        for first in range(0, splits, 4):
            a = tl.load(at, cache_modifier=".cg")
            b = _part_or_zeros(at + SIZE, splits - first - 1)
            c = _part_or_zeros(at + 2 * SIZE, splits - first - 2)
            d = _part_or_zeros(at + 3 * SIZE, splits - first - 3)
            total = total + a + b + c + d  # from left to right
            at += 4 * SIZE
    elif SIZE <= 8192:
        for first in range(0, splits, 2):
            a = tl.load(at, cache_modifier=".cg")
            b = _part_or_zeros(at + SIZE, splits - first - 1)
            total = total + a + b
            at += 2 * SIZE
    else:
        for _ in range(splits):
            total += tl.load(at, cache_modifier=".cg")
            at += SIZE
    tl.store(counter_ptr + tile, 0)
    return total


@triton.jit
def _parts_at(partial_ptr, tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the first part of a tile lies; the others follow it."""
    first = tl.num_programs(2) * (ROWS * COLUMNS) * tile.to(tl.int64)
    return partial_ptr + first + (tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])


@triton.jit
def _part_or_zeros(at, left):
    return tl.load(at, mask=tl.zeros(at.shape, tl.int32) + left > 0, other=0.0, cache_modifier=".cg")
