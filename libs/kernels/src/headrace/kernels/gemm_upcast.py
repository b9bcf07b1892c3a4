"""Products with small-format weights and bf16 arithmetic, dense and grouped: V4.1's linears, experts and logits.

D[m, n] = sum_k X[m, k] W[n, k] with fp32 sums. Every weight format decodes exactly to bf16 (a power-of-two scale times at
most four significant bits), so nothing is lost against scaling partial sums, and on hardware without a block-scaled matrix
unit one bf16 product is faster than a promotion every 32 columns. Weights W [n, k]:
  bf16    plain
  fp8     e4m3, a UE8M0 scale per 32x32 block: scale [ceil(n / 32), k / 32]
  mxfp4   e2m1 packed [n, k / 2], even column in the low nibble, a UE8M0 scale per row and 32 columns: scale [n, k / 32]
  fp8_words, mxfp4_words   the same values as `pack_words` lays them out once, at load: int32 words that decode to pairs of
          bf16 by shifts, masks and one multiplication, in the order in which the matrix unit wants them
X is bf16, or e4m3 with a UE8M0 scale per row and 32 columns. The weight is always the left operand: a few token rows then
fill a narrow tile. Grouped row layouts are those of `gemm_fp8`. Source: DeepSeek-V4.1 release, quantised linears.
"""

import itertools

import torch

from headrace.kernels import quantize, tuning
from headrace.kernels._triton import _INTERPRETED, cdiv, dot, tl, triton, workspace
from headrace.kernels.attention_core import decode_e2m1, unpack_bf16
from headrace.kernels.gemm_fp8 import _splits, _tile_rows, add_parts, leave_part, parts_space
from headrace.kernels.rope import rotated
from headrace.kernels.swiglu import TURN, gated

FORMATS = {"bf16": 0, "fp8": 1, "mxfp4": 2, "fp8_words": 3, "mxfp4_words": 4}
VALUES = {"bf16": 1, "fp8": 1, "mxfp4": 2, "fp8_words": 4, "mxfp4_words": 8}  # per element of the weight's tensor
PACKED = {"fp8": "fp8_words", "mxfp4": "mxfp4_words"}
STEP = 128  # columns of k per step
# A packed value's bits, read as bf16, are 2^-120 (e4m3) or 2^-126 (e2m1) of it. Scales are stored as the exponent of the bf16
# factor that makes up for that, but for 2^48: factors up to 2^176 / 2^182 of a UE8M0 byte then fit, and sums take the rest.
FIELD = {"fp8_words": 120 - 48, "mxfp4_words": 126 - 48}


def dequantize_weight(weight: torch.Tensor, scale: torch.Tensor | None, name: str, dtype=torch.float32) -> torch.Tensor:
    """W [n, k] of the named format -> [n, k]."""
    if name == "bf16":
        return weight.to(dtype)
    if name == "fp8":
        return quantize.dequantize_block_fp8(weight, scale, 32, dtype)
    return quantize.dequantize_mxfp4(weight, scale, dtype)


def pack_words(weight: torch.Tensor, scale: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, str]:
    """(W [..., n, k], its scale, "fp8" or "mxfp4") -> (words int32, scales int32 [..., k / 128, scale rows], packed name).

    Each 128 columns of a row stay together. mxfp4: 16 words; word w holds for its halves h = 0 (low), 1 the columns
    32 i + 2 w + h, i = 0..3; fp8: 32 words with columns 64 i + 2 w + h, i = 0, 1. Their bits, highest first, lie at `_PLACES`
    [packed name][i], of the high half 16 further, from bit 32 on again at 0. A scale word holds the four scales of 128 columns
    as exponents of bf16: of the first two in its halves, of the other two in its halves once it is rotated by 8 bits.
    """
    field = scale.view(torch.uint8).int() + FIELD[PACKED[name]]
    if int(field.max()) > 254:
        highest = 254 - FIELD[PACKED[name]]
        raise ValueError(
            f"{name} scale 2^{int(scale.view(torch.uint8).max()) - 127} is above 2^{highest - 127}, the largest packed"
        )
    first, second, third, fourth = (field.unflatten(-1, (-1, 4)).transpose(-2, -3) << 7).unbind(-1)  # each [..., k / 128, rows]
    rotated = third | fourth << 16
    fields = (first | second << 16 | rotated >> 8 | rotated << 24).contiguous()
    places = _PLACES[PACKED[name]]
    raw = weight.view(torch.uint8)
    code = raw if name == "fp8" else torch.stack([raw & 15, raw >> 4], -1).flatten(-2)
    code = code.unflatten(-1, (-1, len(places), 64 // len(places), 2))  # [..., atom, i, w, h]
    words = torch.zeros(code[..., 0, :, 0].shape, dtype=torch.int32, device=code.device)
    for i, h in itertools.product(range(len(places)), range(2)):
        part = code[..., i, :, h].int()
        for bit, place in enumerate(reversed(places[i])):
            words |= (part >> bit & 1) << (place + 16 * h) % 32
    return words.flatten(-2), fields, PACKED[name]


def held(weight: torch.Tensor, scale: torch.Tensor | None, name: str) -> tuple[torch.Tensor, torch.Tensor | None, str]:
    """(W [n, k] or [G, n, k] as stored, its scale, its format) -> the same in the format to hold it in, for every batch.

    Packed where it can be: k a multiple of 128 and no scale too large for `pack_words`. On an H200 that won for experts at 1 to
    4,096 rows, and for FP8 linears at 256 rows and in whole steps of 1 to 4,096 (benchmarks/kernels.md). Groups are packed one
    by one: packing takes about eight times the memory of what it packs.
    """
    if name not in PACKED or weight.shape[-1] * VALUES[name] % STEP:
        return weight, scale, name
    if int(scale.view(torch.uint8).max()) + FIELD[PACKED[name]] > 254:
        return weight, scale, name
    if weight.dim() == 2:
        return pack_words(weight, scale, name)
    words = torch.empty_like(weight.view(torch.uint8).view(torch.int32))
    fields = torch.empty(weight.shape[0], *_fields_shape(scale), dtype=torch.int32, device=weight.device)
    for g in range(weight.shape[0]):
        words[g], fields[g], _ = pack_words(weight[g], scale[g], name)
    return words, fields, PACKED[name]


def _fields_shape(scale: torch.Tensor) -> tuple[int, int]:
    return scale.shape[-1] // 4, scale.shape[-2]


# bf16 keeps the sign at bit 15, the low exponent bits of e2m1 and its mantissa at 8 to 6, of e4m3 at 10 to 4. As few operations
# as can be bring bits there, for every pair of values takes them. Of e2m1: none, a shift left by 6, a
# turn right by 4, and a turn right by 6 with a shift left by 2; of e4m3: none, and a turn right by 4 with a shift left by 4.
# A turn is one instruction on a card, and takes bits from the other half.
_PLACES = {
    "mxfp4_words": ((15, 8, 7, 6), (9, 2, 1, 0), (19, 12, 11, 10), (21, 14, 13, 4)),
    "fp8_words": ((15, 10, 9, 8, 7, 6, 5, 4), (19, 14, 13, 12, 11, 2, 1, 0)),
}


def gemm_upcast_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    name: str,
    x_scale: torch.Tensor | None = None,
    group_of_row: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The specification, in `dtype`; shapes as in `gemm_upcast`. Rows that the kernel does not write are 0 here."""
    x = x.to(dtype) if x_scale is None else quantize.dequantize_fp8_ue8m0(x, x_scale, 32, dtype)
    if weight.dim() == 2:
        return x @ dequantize_weight(weight, scale, name, dtype).T
    if counts is None and group_of_row is None:  # side by side
        decoded = [
            dequantize_weight(weight[g], None if scale is None else scale[g], name, dtype) for g in range(weight.shape[0])
        ]
        return torch.einsum("mgk,gnk->mgn", x, torch.stack(decoded))
    out = torch.zeros(*x.shape[:-1], weight.shape[1], dtype=dtype, device=x.device)
    for g in range(weight.shape[0]):
        rows = (g, slice(0, int(counts[g]))) if counts is not None else (group_of_row == g,)
        out[rows] = x[rows] @ dequantize_weight(weight[g], None if scale is None else scale[g], name, dtype).T
    return out


def gemm_upcast(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    name: str,
    x_scale: torch.Tensor | None = None,
    group_of_row: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    expected_rows: int | None = None,
    alignment: int = 128,
    out_dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
    side_by_side: bool = False,
    swiglu: tuple[float | None, torch.Tensor | None] | None = None,
    rope: tuple[torch.Tensor, torch.Tensor, int] | None = None,
    source_of_row: torch.Tensor | None = None,
    in_parts: bool = False,
) -> torch.Tensor:
    """x bf16 or e4m3 [m, k] (masked: [G, m, k]), weight [n, k] or [G, n, k] in format `name`, both contiguous.

    k is a multiple of 128. Give group_of_row int32 [m] or counts int32 [G] with a grouped weight. Returns [m, n] or
    [G, m, n] in out_dtype; rows without a group are not written. A group's contiguous rows begin at a multiple of `alignment`
    (16 to 128). `expected_rows` per group only chooses the tile. `batch_invariant`: one tile and no split for every m.
    `side_by_side`: every row has a part for each group, x [m, G, k] -> [m, G, n].
    `swiglu` (limit, weights fp32 of rows or None): what `headrace.kernels.swiglu` makes of the bf16 product of a weight whose
    rows are interleaved, [m, n / 2]; in the same launch, with the same result.
    `rope` (cos, sin, D): what `headrace.kernels.rope` makes of the bf16 product's heads of D columns, so too.
    `source_of_row` int32 [m], with group_of_row: the row of x [T, k] that each grouped row is; the result is that of the rows
    copied to where they lie, [m, n]. Of rows without a group it may hold anything.
    `in_parts`, of one plain product: where its sum is split, fp32 [parts, m, n] whose sum in this order, rounded to bf16, is
    the product. For who adds them on reading (`mhc_pass`); here the last program of a tile would read all of them alone.
    """
    weight, scale = (t if t is None or t.dim() == 3 else t.unsqueeze(0) for t in (weight, scale))
    groups, n = weight.shape[:2]
    k = weight.shape[2] * VALUES[name]
    if source_of_row is not None and (group_of_row is None or source_of_row.shape != group_of_row.shape):
        rows = "no group_of_row" if group_of_row is None else f"{group_of_row.shape[0]} in group_of_row"
        raise ValueError(f"source_of_row names the rows of contiguous groups: {source_of_row.shape[0]} there, {rows}")
    m = x.shape[0] if side_by_side else x.shape[-2] if source_of_row is None else source_of_row.shape[0]
    if x.shape[-1] != k or k % STEP:
        raise ValueError(f"x has {x.shape[-1]} columns and the weight {k}: must agree and be a multiple of {STEP}")
    masked = counts is not None
    rows = groups * m if masked or side_by_side else m
    if swiglu is not None and (n % (2 * TURN) or side_by_side or out_dtype != torch.bfloat16):
        raise ValueError(f"SwiGLU needs a bf16 product of a multiple of {2 * TURN} weight rows, got {out_dtype} and {n}")
    limit, row_weight = swiglu or (None, None)
    cos, sin, head = (x, x, 0) if rope is None else (rope[0].contiguous(), rope[1].contiguous(), rope[2])
    if rope is not None and (head % 256 or n % head or weight.shape[0] > 1 or swiglu or out_dtype != torch.bfloat16):
        raise ValueError(f"RoPE needs one bf16 product of whole heads of a multiple of 256 columns, got {n} and {head}")
    if in_parts and (weight.shape[0] > 1 or swiglu or rope or out_dtype != torch.bfloat16):
        raise ValueError(f"parts are of one bf16 product without an epilogue, got {weight.shape[0]} products of {out_dtype}")
    shape = x.shape[:-1] if source_of_row is None else source_of_row.shape
    out = torch.empty(*shape, n // 2 if swiglu else n, dtype=out_dtype, device=x.device)
    if not rows:
        return out
    busy = min(m, expected_rows or (cdiv(m, groups) if group_of_row is not None else m))
    config = tuning.gemm_upcast(name, busy, n, k, batch_invariant)
    bm, bn = config["BLOCK_M"], config["BLOCK_N"] if swiglu is None else max(config["BLOCK_N"], 2 * TURN)
    if group_of_row is not None:
        bm = min(bm, alignment)  # a tile has rows of one group
    mode = 3 if side_by_side else 2 if masked else 1 if group_of_row is not None else 0
    row_tiles, column_tiles = cdiv(m, bm), cdiv(n, bn)
    grid_m = row_tiles * (groups if mode > 1 else 1)
    atoms = config.get("ATOMS", 1)
    atoms = atoms if k % (STEP * atoms) == 0 else 1
    splits = 1
    if mode in (0, 3) and not batch_invariant:
        splits = _splits(grid_m * column_tiles, k // (STEP * atoms), config["WAVES"])
    split = 0 if splits == 1 else 2 if in_parts else 1
    if split == 2:
        out = torch.empty(splits, *shape, n, dtype=torch.float32, device=x.device)
    partial, counter = workspace(x.device, *parts_space(splits if split == 1 else 1, grid_m * column_tiles, bm * bn))
    words = x if scale is None else scale.contiguous().view(torch.uint8).view(torch.int32)
    x_words = x if x_scale is None else x_scale.contiguous().view(torch.uint8).view(torch.int32)
    index = counts if masked else group_of_row if mode == 1 else x
    epilogue = {"GATED": swiglu is not None, "LIMIT": limit is not None, "ROW_WEIGHT": row_weight is not None}
    epilogue |= {"HEAD": head, "HALF": cos.shape[-1] if rope else 0, "GATHER": source_of_row is not None}
    source = x if source_of_row is None else source_of_row.contiguous()
    given = source, x if row_weight is None else row_weight.contiguous(), limit or 0.0, cos, sin
    if name in FIELD:
        _words_kernel[(column_tiles, grid_m, splits)](
            x.contiguous(), x if x_scale is None else x_scale.contiguous(), weight, scale, index, out, partial, counter,
            *given, m, rows, n, scale.shape[2], groups,
            K=k, MODE=mode, VALUES=VALUES[name], X_FP8=x_scale is not None, SPLIT=split, BLOCK_M=bm, BLOCK_N=bn,
            ATOMS=atoms, PAIRS=config["PAIRS"], STAGES=config["STAGES"], num_warps=config["num_warps"], **epilogue,
        )  # fmt: skip
        return out
    _upcast_kernel[(column_tiles, grid_m, splits)](
        x.contiguous(), x_words, weight if name == "bf16" else weight.view(torch.uint8), words, index, out, partial, counter,
        *given, m, rows, n, cdiv(n, 32) if name == "fp8" else n, groups,
        K=k, MODE=mode, FORMAT=FORMATS[name], X_FP8=x_scale is not None, SPLIT=split, BLOCK_M=bm, BLOCK_N=bn,
        STAGES=config["STAGES"], num_warps=config["num_warps"], **epilogue,
    )  # fmt: skip
    return out


@triton.jit
def _upcast_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, index_ptr, out_ptr, partial_ptr, counter_ptr, source_ptr,
    row_weight_ptr, limit, cos_ptr, sin_ptr, m, rows, n, scale_rows, groups, HEAD: tl.constexpr, HALF: tl.constexpr,
    GATED: tl.constexpr, LIMIT: tl.constexpr, ROW_WEIGHT: tl.constexpr, GATHER: tl.constexpr,
    K: tl.constexpr, MODE: tl.constexpr, FORMAT: tl.constexpr, X_FP8: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = K // 128
    tile = tl.program_id(1)
    group, row, live = _rows_of_tile(index_ptr, tile, m, groups, MODE, BLOCK_M)
    if group < 0:
        return
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    per_split = tl.cdiv(STEPS, splits)
    begin, end = split * per_split, tl.minimum((split + 1) * per_split, STEPS)
    tl.assume(begin < end)  # a loop that may be empty keeps products from overlapping
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    within = column < n
    row = row.to(tl.int64)
    source = _source_of(source_ptr, row, live, m, GATHER)
    w_row = (group * n + tl.where(within, column, 0)).to(tl.int64)
    if FORMAT == 1:
        scale_at = w_scale_ptr + (group * scale_rows + tl.where(within, column, 0) // 32).to(tl.int64) * STEPS
    else:
        scale_at = w_scale_ptr + w_row * STEPS
    k = tl.arange(0, 128)
    x_row = source[:, None] * K
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        x = tl.load(x_ptr + x_row + (step * 128 + k)[None, :], mask=live[:, None], other=0.0)
        if X_FP8:
            x_scale = _ue8m0_word(tl.load(x_scale_ptr + source * STEPS + step, mask=live, other=0))
            x = _scale_groups(x.to(tl.float32), x_scale)
        if FORMAT == 0:
            w = tl.load(w_ptr + w_row[:, None] * K + (step * 128 + k)[None, :])
        else:
            scale = _ue8m0_word(tl.load(scale_at + step))
            if FORMAT == 1:
                raw = tl.load(w_ptr + w_row[:, None] * K + (step * 128 + k)[None, :])
                w = _scale_groups(raw.to(tl.float8e4nv, bitcast=True).to(tl.float32), scale)
            else:
                raw = tl.load(w_ptr + w_row[:, None] * (K // 2) + (step * 64 + tl.arange(0, 64))[None, :])
                even, odd = decode_e2m1(raw)
                value = tl.reshape(tl.join(even, odd), [BLOCK_N, 128])
                w = _scale_groups(value, scale * 16384.0)
        acc = dot(w, tl.trans(x), acc)
    _store_product(acc, row, live, column, within, tile, split, out_ptr, partial_ptr, counter_ptr, row_weight_ptr, limit,
                   cos_ptr, sin_ptr, rows, n, SPLIT, HEAD, HALF, GATED, LIMIT, ROW_WEIGHT)  # fmt: skip


@triton.jit
def _rows_of_tile(index_ptr, tile, m, groups, MODE: tl.constexpr, BLOCK_M: tl.constexpr):
    """(group, rows [BLOCK_M] of x and of the result, mask of rows to write); group -1: nothing to do. MODE 3: side by side."""
    row_tiles = tl.cdiv(m, BLOCK_M)
    if MODE == 3:
        group = tile // row_tiles
        local = (tile % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
        row = local * groups + group
        live = local < m
    else:
        group, first, row, live = _tile_rows(index_ptr, tile, m, row_tiles, MODE, BLOCK_M)
    return group, row, live


@triton.jit
def _source_of(source_ptr, row, live, m, GATHER: tl.constexpr):
    """Rows of x int64 [BLOCK_M] that `row` are; read whether they live or not, so that this load waits for no other."""
    if GATHER:
        source = tl.load(source_ptr + row, mask=row < m, other=0).to(tl.int64)
        source = tl.where(live, source, 0)
    else:
        source = row
    return source


@triton.jit
def _store_product(
    acc, row, live, column, within, tile, split, out_ptr, partial_ptr, counter_ptr, row_weight_ptr, limit, cos_ptr,
    sin_ptr, rows, n, SPLIT: tl.constexpr, HEAD: tl.constexpr, HALF: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    ROW_WEIGHT: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M] -> out [rows, n]; SPLIT 1: the last program to arrive adds the parts of a sum in order; 2: out is
    fp32 [splits, rows, n] and gets the parts."""
    if SPLIT == 2:
        at = out_ptr + split.to(tl.int64) * rows * n + row[None, :] * n + column[:, None]
        tl.store(at, acc, mask=live[None, :] & within[:, None])
    elif SPLIT:
        number = tile * tl.num_programs(0) + tl.program_id(0)
        if leave_part(acc, partial_ptr, counter_ptr, number):
            total = add_parts(acc, partial_ptr, counter_ptr, number)
            _store_whole(total, row, live, column, within, out_ptr, row_weight_ptr, limit, cos_ptr, sin_ptr, n,
                         HEAD, HALF, GATED, LIMIT, ROW_WEIGHT)  # fmt: skip
    else:
        _store_whole(acc, row, live, column, within, out_ptr, row_weight_ptr, limit, cos_ptr, sin_ptr, n,
                     HEAD, HALF, GATED, LIMIT, ROW_WEIGHT)  # fmt: skip


@triton.jit
def _store_whole(
    acc, row, live, column, within, out_ptr, row_weight_ptr, limit, cos_ptr, sin_ptr, n,
    HEAD: tl.constexpr, HALF: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ROW_WEIGHT: tl.constexpr,
):  # fmt: skip
    if GATED:  # rows of the weight come in turns of 32, see `swiglu.interleave`
        N: tl.constexpr = acc.shape[0]
        M: tl.constexpr = acc.shape[1]
        turns = tl.permute(tl.reshape(acc.to(tl.bfloat16), [N // 64, 2, 32, M]), (0, 2, 3, 1))
        gate, up = tl.split(turns)
        h = tl.reshape(gated(gate.to(tl.float32), up.to(tl.float32), limit, LIMIT), [N // 2, M])
        if ROW_WEIGHT:
            h *= tl.load(row_weight_ptr + row, mask=live, other=0.0)[None, :]
        half = n // 2
        column = tl.program_id(0) * (N // 2) + tl.arange(0, N // 2)
        mask = live[None, :] & (column < half)[:, None]
        tl.store(out_ptr + row[None, :] * half + column[:, None], h.to(tl.bfloat16), mask=mask)
    else:
        mask = live[None, :] & within[:, None]
        value = acc.to(out_ptr.dtype.element_ty)
        if HEAD:
            N: tl.constexpr = acc.shape[0]
            first = tl.program_id(0) * N % HEAD
            if first + N > HEAD - 2 * HALF:
                value = _turned(value, row, live, first, cos_ptr, sin_ptr, HEAD, HALF)
        tl.store(out_ptr + row[None, :] * n + column[:, None], value, mask=mask)


@triton.jit
def _turned(value, row, live, first, cos_ptr, sin_ptr, HEAD: tl.constexpr, HALF: tl.constexpr):
    """bf16 [N, M], columns `first` on of a head -> the same with its last 2 HALF columns rotated (`rope`)."""
    N: tl.constexpr = value.shape[0]
    M: tl.constexpr = value.shape[1]
    even, odd = tl.split(tl.permute(tl.reshape(value, [N // 2, 2, M]), (0, 2, 1)))
    even, odd = even.to(tl.float32), odd.to(tl.float32)
    pair = first // 2 + tl.arange(0, N // 2) - (HEAD // 2 - HALF)
    turned = (pair >= 0)[:, None] & live[None, :]
    at = row[None, :] * HALF + pair[:, None]
    cos = tl.load(cos_ptr + at, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + at, mask=turned, other=0.0)
    new_even, new_odd = rotated(even, odd, cos, sin)
    both = tl.join(tl.where(turned, new_even, even), tl.where(turned, new_odd, odd))
    return tl.reshape(tl.permute(both, (0, 2, 1)), [N, M]).to(tl.bfloat16)


@triton.jit
def _words_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, index_ptr, out_ptr, partial_ptr, counter_ptr, source_ptr,
    row_weight_ptr, limit, cos_ptr, sin_ptr, m, rows, n, scale_rows, groups, HEAD: tl.constexpr, HALF: tl.constexpr,
    GATED: tl.constexpr, LIMIT: tl.constexpr, ROW_WEIGHT: tl.constexpr, GATHER: tl.constexpr,
    K: tl.constexpr, MODE: tl.constexpr, VALUES: tl.constexpr, X_FP8: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ATOMS: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `_upcast_kernel`, for packed weights. A step takes ATOMS times 128 columns; each of its VALUES / 2 pieces is a product
    of its own, whose left operand is decoded where the words were loaded: nothing moves between threads."""
    PIECES: tl.constexpr = VALUES // 2
    WORDS: tl.constexpr = ATOMS * 128 // VALUES
    PART: tl.constexpr = 128 // PIECES  # columns of a piece in each atom
    STEPS: tl.constexpr = K // (128 * ATOMS)
    tile = tl.program_id(1)
    group, row, live = _rows_of_tile(index_ptr, tile, m, groups, MODE, BLOCK_M)
    if group < 0:
        return
    split = tl.program_id(2)
    per_split = tl.cdiv(STEPS, tl.num_programs(2))
    begin, end = split * per_split, tl.minimum((split + 1) * per_split, STEPS)
    tl.assume(begin < end)  # a loop that may be empty keeps products from overlapping
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    within = column < n
    row = row.to(tl.int64)
    source = _source_of(source_ptr, row, live, m, GATHER)
    inside = tl.where(within, column, 0)
    word_at = w_ptr + (group * n + inside).to(tl.int64)[:, None] * (K // VALUES) + tl.arange(0, WORDS)[None, :]
    if VALUES == 4:
        inside = inside // 32
    atom = tl.arange(0, ATOMS)
    scale_at = w_scale_ptr + (group.to(tl.int64) * (K // 128) + atom)[None, :] * scale_rows + inside[:, None]
    part = tl.arange(0, ATOMS * PART)
    x_at = x_ptr + source[:, None] * K + (part // PART * 128 + part % PART)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        words = tl.load(word_at + step * WORDS)
        scale = tl.load(scale_at + step * ATOMS * scale_rows)
        for i in tl.static_range(PIECES):
            x = tl.load(x_at + step * (ATOMS * 128) + i * PART, mask=live[:, None], other=0.0)
            if X_FP8:
                block = step * (ATOMS * 4) + part // PART * 4 + (i * PART + part % PART) // 32
                byte = tl.load(x_scale_ptr + source[:, None] * (K // 32) + block[None, :], mask=live[:, None], other=0)
                x = (x.to(tl.float32) * (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)).to(tl.bfloat16)
            acc = dot(_decode_words(words, scale, i, VALUES, PAIRS), tl.trans(x), acc)
    acc *= 281474976710656.0  # 2^48: see FIELD
    _store_product(acc, row, live, column, within, tile, split, out_ptr, partial_ptr, counter_ptr, row_weight_ptr, limit,
                   cos_ptr, sin_ptr, rows, n, SPLIT, HEAD, HALF, GATED, LIMIT, ROW_WEIGHT)  # fmt: skip


_BOTH_HALVES = "{ .reg .b16 low, high; .reg .b32 both; mov.b32 {low, high}, $2; mov.b32 both, "
_TIMES_LOW = tl.constexpr(_BOTH_HALVES + "{low, low}; mul.bf16x2 $0, $1, both; }")
_TIMES_HIGH = tl.constexpr(_BOTH_HALVES + "{high, high}; mul.bf16x2 $0, $1, both; }")


@triton.jit
def _decode_words(words, scale, PIECE: tl.constexpr, VALUES: tl.constexpr, PAIRS: tl.constexpr):
    """Packed int32 [R, W] and scale words [R, ATOMS] -> piece PIECE as bf16 [R, 2 W], 2^-48 of its value (`pack_words`).

    PAIRS: 0 multiplies element by element, in plain Triton; 1 two at a time in NVIDIA's assembly, with the same result.
    """
    R: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    ATOMS: tl.constexpr = scale.shape[1]
    SIGN: tl.constexpr = -2147450880  # bit 15 of both halves, as int32
    if VALUES == 8:
        ALL: tl.constexpr = SIGN + 0x01C001C0
        if PIECE == 0:
            bits = words & ALL
        elif PIECE == 1:
            bits = (words << 6) & ALL
        elif PIECE == 2:
            bits = _turned_right(words, 4) & ALL
        else:
            bits = (_turned_right(words, 6) & (SIGN + 0x01800180)) | ((words << 2) & 0x00400040)
    else:
        if PIECE == 0:
            bits = words & (SIGN + 0x07F007F0)
        else:
            bits = (_turned_right(words, 4) & (SIGN + 0x07800780)) | ((words << 4) & 0x00700070)
    factors = _bf16_pair(scale, PIECE * 4 // VALUES)
    if VALUES == 8:
        factors = tl.broadcast_to(factors[:, :, None], [R, ATOMS, W // ATOMS])
        HALF: tl.constexpr = PIECE % 2
    else:  # words of the first 32 columns take the low half, the others the high half
        factors = tl.join(factors & 0xFFFF, (factors >> 16) & 0xFFFF)
        factors = tl.broadcast_to(tl.reshape(factors, [R, ATOMS * 2])[:, :, None], [R, ATOMS * 2, W // (ATOMS * 2)])
        HALF: tl.constexpr = 0
    factors = tl.reshape(factors, [R, W])
    if _INTERPRETED:
        factor = (factors << 16 if HALF == 0 else factors & -65536).to(tl.float32, bitcast=True)
        low, high = (bits << 16).to(tl.float32, bitcast=True), (bits & -65536).to(tl.float32, bitcast=True)
        return tl.reshape(tl.join(low * factor, high * factor), [R, 2 * W]).to(tl.bfloat16)
    elif PAIRS:
        text: tl.constexpr = _TIMES_LOW if HALF == 0 else _TIMES_HIGH
        bits = tl.inline_asm_elementwise(text, "=r,r,r", [bits, factors], dtype=tl.int32, is_pure=True, pack=1)
        return unpack_bf16(bits)
    else:
        factor = (factors if HALF == 0 else factors >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return unpack_bf16(bits) * tl.reshape(tl.join(factor, factor), [R, 2 * W])


@triton.jit
def _turned_right(words, BY: tl.constexpr):
    """int32 turned by so many bits."""
    words = words.to(tl.uint32, bitcast=True)
    return ((words >> BY) | (words << (32 - BY))).to(tl.int32, bitcast=True)


@triton.jit
def _bf16_pair(scale, SECOND: tl.constexpr):
    """Scale words (`pack_words`) -> two bf16 factors in the halves of int32: of the first or the second two of four blocks."""
    if SECOND:
        scale = _turned_right(scale, 24)
    return scale & 0x7F807F80


@triton.jit
def _ue8m0_word(word):
    """int32 [R], four UE8M0 bytes each -> fp32 scales [R, 4]."""
    R: tl.constexpr = word.shape[0]
    even = tl.join(word & 0xFF, (word >> 16) & 0xFF)
    odd = tl.join((word >> 8) & 0xFF, (word >> 24) & 0xFF)
    return (tl.reshape(tl.join(even, odd), [R, 4]) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scale_groups(value, scale):
    """fp32 [R, 128] times scale [R, 4] per 32 columns -> bf16 [R, 128]."""
    R: tl.constexpr = value.shape[0]
    return tl.reshape(tl.reshape(value, [R, 4, 32]) * scale[:, :, None], [R, 128]).to(tl.bfloat16)
