"""Products with small-format weights and bf16 arithmetic, dense and grouped: V4.1's linears, experts and logits.

D[m, n] = sum_k X[m, k] W[n, k] with fp32 sums. Every weight format decodes exactly to bf16 (a power-of-two scale times at
most four significant bits), so nothing is lost against scaling partial sums, and on hardware without a block-scaled matrix
unit one bf16 product is faster than a promotion every 32 columns. Weights W [n, k]:
  bf16    plain
  fp8     e4m3, a UE8M0 scale per 32x32 block: scale [ceil(n / 32), k / 32]
  mxfp4   e2m1 packed [n, k / 2], even column in the low nibble, a UE8M0 scale per row and 32 columns: scale [n, k / 32]
X is bf16, or e4m3 with a UE8M0 scale per row and 32 columns. The weight is always the left operand: a few token rows then
fill a narrow tile. Grouped row layouts are those of `gemm_fp8`. Source: DeepSeek-V4.1 release, quantised linears.
"""

import torch

from headrace.kernels import quantize, tuning
from headrace.kernels._triton import cdiv, dot, tl, triton, workspace
from headrace.kernels.attention_core import decode_e2m1
from headrace.kernels.gemm_fp8 import _splits, _tile_rows

FORMATS = {"bf16": 0, "fp8": 1, "mxfp4": 2}
STEP = 128  # columns of k per step


def dequantize_weight(weight: torch.Tensor, scale: torch.Tensor | None, name: str, dtype=torch.float32) -> torch.Tensor:
    """W [n, k] of the named format -> [n, k]."""
    if name == "bf16":
        return weight.to(dtype)
    if name == "fp8":
        return quantize.dequantize_block_fp8(weight, scale, 32, dtype)
    return quantize.dequantize_mxfp4(weight, scale, dtype)


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
    out_dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """x bf16 or e4m3 [m, k] (masked: [G, m, k]), weight [n, k] or [G, n, k] in format `name`, both contiguous.

    k is a multiple of 128. Give group_of_row int32 [m] or counts int32 [G] with a grouped weight. Returns [m, n] or
    [G, m, n] in out_dtype; rows without a group are not written. `batch_invariant`: one tile and no split for every m.
    """
    weight, scale = (t if t is None or t.dim() == 3 else t.unsqueeze(0) for t in (weight, scale))
    groups, n = weight.shape[:2]
    k = weight.shape[2] * (2 if name == "mxfp4" else 1)
    m = x.shape[-2]
    if x.shape[-1] != k or k % STEP:
        raise ValueError(f"x has {x.shape[-1]} columns and the weight {k}: must agree and be a multiple of {STEP}")
    masked = counts is not None
    rows = groups * m if masked else m
    out = torch.empty(*x.shape[:-1], n, dtype=out_dtype, device=x.device)
    if not rows:
        return out
    busy = min(m, expected_rows or (m if masked or group_of_row is None else cdiv(m, groups)))
    config = tuning.gemm_upcast(name, busy, n, k, batch_invariant)
    bm, bn = config["BLOCK_M"], config["BLOCK_N"]
    mode = 2 if masked else 1 if group_of_row is not None else 0
    row_tiles, column_tiles = cdiv(m, bm), cdiv(n, bn)
    grid_m = row_tiles * (groups if masked else 1)
    splits = 1
    if mode == 0 and not batch_invariant:
        splits = _splits(grid_m * column_tiles, k // STEP, config["WAVES"])
    partial, counter = workspace(x.device, splits * rows * n if splits > 1 else 1, grid_m * column_tiles)
    words = x if scale is None else scale.contiguous().view(torch.uint8).view(torch.int32)
    x_words = x if x_scale is None else x_scale.contiguous().view(torch.uint8).view(torch.int32)
    index = counts if masked else group_of_row if mode == 1 else x
    _upcast_kernel[(column_tiles, grid_m, splits)](
        x.contiguous(), x_words, weight if name == "bf16" else weight.view(torch.uint8), words, index, out, partial, counter,
        m, rows, n, cdiv(n, 32) if name == "fp8" else n,
        K=k, MODE=mode, FORMAT=FORMATS[name], X_FP8=x_scale is not None, SPLIT=splits > 1, BLOCK_M=bm, BLOCK_N=bn,
        STAGES=config["STAGES"], num_warps=config["num_warps"],
    )  # fmt: skip
    return out


@triton.jit
def _upcast_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, index_ptr, out_ptr, partial_ptr, counter_ptr, m, rows, n, scale_rows,
    K: tl.constexpr, MODE: tl.constexpr, FORMAT: tl.constexpr, X_FP8: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = K // 128
    tile = tl.program_id(1)
    group, first, row, live = _tile_rows(index_ptr, tile, m, tl.cdiv(m, BLOCK_M), MODE, BLOCK_M)
    if group < 0:
        return
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    per_split = tl.cdiv(STEPS, splits)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    within = column < n
    row = row.to(tl.int64)
    w_row = (group * n + tl.where(within, column, 0)).to(tl.int64)
    if FORMAT == 1:
        scale_at = w_scale_ptr + (group * scale_rows + tl.where(within, column, 0) // 32).to(tl.int64) * STEPS
    else:
        scale_at = w_scale_ptr + w_row * STEPS
    k = tl.arange(0, 128)
    x_row = row[:, None] * K
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(split * per_split, tl.minimum((split + 1) * per_split, STEPS), num_stages=STAGES):
        x = tl.load(x_ptr + x_row + (step * 128 + k)[None, :], mask=live[:, None], other=0.0)
        if X_FP8:
            x_scale = _ue8m0_word(tl.load(x_scale_ptr + row * STEPS + step, mask=live, other=0))
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
    at = row[None, :] * n + column[:, None]
    mask = live[None, :] & within[:, None]
    if SPLIT:
        tl.store(partial_ptr + split.to(tl.int64) * rows * n + at, acc, mask=mask)
        tl.debug_barrier()  # every thread's part is written before this program says so
        slot = counter_ptr + tile * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(slot, 1, sem="acq_rel") != splits - 1:
            return
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        part_at = partial_ptr + at
        for _ in range(splits):
            acc += tl.load(part_at, mask=mask, other=0.0, cache_modifier=".cg")
            part_at += rows * n
        tl.store(slot, 0)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


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
