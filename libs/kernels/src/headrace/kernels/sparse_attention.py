"""Sparse latent attention over selected entries: CSA2 decode and prefill (V4.1), and the V4 and V3.2 layouts.

Each query row brings its own list of entries: `indices` into a first source (V4.1: the FP8 window) and, optionally,
`extra_indices` into a second one of another layout (V4.1: the FP4 compressed KV). One softmax runs over both, plus a
sink logit per head that only enters the denominator:
    out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink)),   s_j = scale * q . k_j,   v_j = k_j[:512]
Rows are flat, so decode (one row a sequence), verification (ragged rows) and prefill are the same call. Optionally the
output's last 64 columns are rotated back at the query's position (DeepSeek-V4.1: values carry RoPE). q comes rotated: a
rotated tile is not a plain load any more, and the compiler would keep all of it in registers that the sums need. It does
not choose the entries, and does not quantise. Source: DeepSeek-V3.2, V4 and V4.1 reports and released configs.
"""

import torch

from headrace.kernels import tuning
from headrace.kernels._triton import cdiv, next_power_of_2, processor_count, tl, triton
from headrace.kernels.attention_core import (
    LOG2E,
    NO_SCORE_,
    PAIRS_SCALE,
    attend,
    load_keys,
    load_queries,
    rotate_back,
    store_values,
)
from headrace.kernels.kv_layouts import LAYOUT_IDS, PagedKV
from headrace.kernels.rope import rope_reference

VALUE_DIM = 512


def sparse_attention_reference(
    q: torch.Tensor,
    kv: PagedKV,
    indices: torch.Tensor,
    scale: float,
    extra_kv: PagedKV | None = None,
    extra_indices: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    out_rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification, in `dtype`. Shapes as in `sparse_attention`; the output is not rounded to bf16."""
    q = q.to(dtype)
    keys = kv.read(indices)
    present = indices >= 0
    if extra_kv is not None:
        keys = torch.cat([keys, extra_kv.read(extra_indices)], 1)
        present = torch.cat([present, extra_indices >= 0], 1)
    keys = keys.to(dtype)
    score = torch.einsum("thd,tnd->thn", q, keys) * scale
    score = score.masked_fill(~present.unsqueeze(1), float("-inf"))
    lse = torch.logsumexp(score, -1)  # [T, H]
    total = lse if sink is None else torch.logaddexp(lse, sink.to(dtype))
    weight = torch.exp(score - torch.where(total.isinf(), 0.0, total).unsqueeze(-1))
    out = torch.einsum("thn,tnd->thd", weight, keys[..., :VALUE_DIM])
    if out_rope is not None:
        out = rope_reference(out, out_rope[0], out_rope[1], inverse=True)
    return out, lse


def sparse_attention(
    q: torch.Tensor,
    kv: PagedKV,
    indices: torch.Tensor,
    scale: float,
    extra_kv: PagedKV | None = None,
    extra_indices: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    out_rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q bf16 [T, H, D]; indices int32 [T, n]; extra_indices int32 [T, m]; sink fp32 [H]; out_rope (cos, sin)
    fp32 [T, 32] of the query positions.

    Returns out bf16 [T, H, 512] and lse fp32 [T, H] (natural log, without the sink; -inf for a row without entries,
    whose output is 0). D is 512, or 576 for layout v32_fp8 and for bf16 of that size. With `batch_invariant` a row's
    result does not depend on the other rows: one split always.
    """
    rows, heads, dim = q.shape
    if dim not in (VALUE_DIM, VALUE_DIM + 64) or dim != kv.dim or (extra_kv is not None and extra_kv.dim != dim):
        raise ValueError(f"q has {dim} columns, kv {kv.dim}, extra kv {extra_kv.dim if extra_kv else 'absent'}: all 512 or 576")
    if extra_kv is not None and (extra_kv.layout == "v4_fp8") != (kv.layout == "v4_fp8"):
        raise ValueError(f"kv is {kv.layout} and extra kv {extra_kv.layout}: v4_fp8 goes with v4_fp8 alone")
    if scale <= 0:
        raise ValueError(f"the softmax scale must be positive, got {scale}")
    q = q.contiguous()
    out = torch.empty(rows, heads, VALUE_DIM, dtype=torch.bfloat16, device=q.device) if out is None else out
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if not rows:
        return out, lse
    extra = extra_kv or kv
    extra_indices = indices if extra_indices is None else extra_indices
    n, m = indices.shape[1], extra_indices.shape[1] if extra_kv is not None else 0
    small = {kv.layout, extra.layout} <= {"window_fp8", "main_fp4"}
    block_h = min(64, max(16, next_power_of_2(heads)))
    config = tuning.sparse_attention(small, block_h)
    pairs = small and bool(config["PAIRS"])
    head_blocks = cdiv(heads, block_h)
    tiles = cdiv(n, config["BLOCK_N"]) + cdiv(m, config["BLOCK_N"])
    splits = 1 if batch_invariant else _splits(rows * head_blocks, tiles, processor_count())
    tiles_per_split = cdiv(tiles, splits)
    splits = max(1, cdiv(tiles, tiles_per_split)) if tiles else 1
    partial, partial_lse = out, lse
    if splits > 1:
        partial = torch.empty(splits, rows, heads, VALUE_DIM, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(splits, rows, heads, dtype=torch.float32, device=q.device)
    cos, sin = out_rope if out_rope is not None else (lse, lse)
    _sparse_attention_kernel[(rows * head_blocks, splits)](
        q, _view(kv, torch.bfloat16), _view(kv, torch.int32), indices,
        _view(extra, torch.bfloat16), _view(extra, torch.int32), extra_indices,
        sink if sink is not None else lse, cos, sin, partial, partial_lse,
        rows, heads, n, m, indices.stride(0), extra_indices.stride(0), tiles_per_split,
        scale * LOG2E * (PAIRS_SCALE if pairs else 1),
        kv.page_stride, kv.offset, extra.page_stride, extra.offset,
        D=dim, FORM=1 if dim == 576 else 2 if kv.layout == "v4_fp8" else 0,
        PAGE=kv.page_size, LAYOUT=LAYOUT_IDS[kv.layout], EXTRA_PAGE=extra.page_size,
        EXTRA_LAYOUT=LAYOUT_IDS[extra.layout], HAS_EXTRA=m > 0, HAS_SINK=sink is not None, HAS_ROPE=out_rope is not None,
        SPLIT=splits > 1, BLOCK_H=block_h, BLOCK_N=config["BLOCK_N"], STAGES=config["STAGES"],
        SPREAD=config["SPREAD"], PAIRS=pairs, WHOLE=n % config["BLOCK_N"] == 0,
        EXTRA_WHOLE=m % config["BLOCK_N"] == 0, num_warps=config["num_warps"],
    )  # fmt: skip
    if splits > 1:
        combine_splits(partial, partial_lse, out, lse, sink, out_rope)
    return out, lse


def combine_splits(
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None = None,
    out_rope: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Merge partial fp32 [S, T, H, 512] (each normalised) with base-2 lse [S, T, H] into out and lse, in split order.

    A split whose lse is -inf saw no key; its partial output may be unwritten and is not read.
    """
    splits, rows, heads, _ = partial.shape
    cos, sin = out_rope if out_rope is not None else (lse, lse)
    _combine_kernel[(rows, cdiv(heads, 4))](
        partial, partial_lse, sink if sink is not None else lse, cos, sin, out, lse,
        rows, heads, splits,
        HAS_SINK=sink is not None, HAS_ROPE=out_rope is not None, BLOCK_H=4, num_warps=4,
    )  # fmt: skip


def _splits(programs: int, tiles: int, processors: int) -> int:
    """Splits that fill the device, with at least two tiles each where there are so many."""
    return max(1, min(processors // max(programs, 1), cdiv(tiles, 2)))


def _view(kv: PagedKV, dtype: torch.dtype) -> torch.Tensor:
    flat = kv.bytes
    size = dtype.itemsize
    return flat[: flat.numel() // size * size].view(dtype)


@triton.jit
def _sparse_attention_kernel(
    q_ptr, kv16, kv32, index_ptr, extra16, extra32, extra_index_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, lse_ptr,
    rows, heads, n, m, index_stride, extra_index_stride, tiles_per_split, scale,
    page_stride, offset, extra_page_stride, extra_offset,
    D: tl.constexpr, FORM: tl.constexpr,
    PAGE: tl.constexpr, LAYOUT: tl.constexpr, EXTRA_PAGE: tl.constexpr, EXTRA_LAYOUT: tl.constexpr,
    HAS_EXTRA: tl.constexpr, HAS_SINK: tl.constexpr, HAS_ROPE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SPREAD: tl.constexpr,
    PAIRS: tl.constexpr, WHOLE: tl.constexpr, EXTRA_WHOLE: tl.constexpr,
):  # fmt: skip
    head_blocks = tl.cdiv(heads, BLOCK_H)
    row = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = (tl.program_id(0) % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(1)
    live = head < heads
    cos_ptr += row * 32
    sin_ptr += row * 32
    q, q_tail = load_queries(q_ptr, row * heads + head, live, D, PAIRS)
    top = tl.full([BLOCK_H], NO_SCORE_, tl.float32)
    IN_PARTS: tl.constexpr = LAYOUT > 0  # see `weigh`: keys that need no decoding leave no registers for them
    if IN_PARTS:
        total = tl.zeros([BLOCK_H, 2, 4], tl.float32)
    else:
        total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, 512], tl.float32)
    acc_tail = tl.zeros([BLOCK_H, 64], tl.float32)
    first_tiles = tl.cdiv(n, BLOCK_N)
    begin = split * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, first_tiles)
    indices = index_ptr + row * index_stride
    for tile in tl.range(begin, end, num_stages=STAGES):
        index = _load_index(indices, tile, n, BLOCK_N, WHOLE)
        k, rope = load_keys(kv16, kv32, index, page_stride, offset, PAGE, LAYOUT, FORM, PAIRS)
        visible = (index >= 0)[None, :]
        top, total, acc, acc_tail = attend(q, q_tail, top, total, acc, acc_tail, k, rope, visible, scale, FORM, SPREAD)
    if HAS_EXTRA:
        begin = tl.maximum(begin - first_tiles, 0)
        end = tl.minimum((split + 1) * tiles_per_split - first_tiles, tl.cdiv(m, BLOCK_N))
        indices = extra_index_ptr + row * extra_index_stride
        for tile in tl.range(begin, end, num_stages=STAGES):
            index = _load_index(indices, tile, m, BLOCK_N, EXTRA_WHOLE)
            k, rope = load_keys(
                extra16, extra32, index, extra_page_stride, extra_offset, EXTRA_PAGE, EXTRA_LAYOUT, FORM, PAIRS
            )
            visible = (index >= 0)[None, :]
            top, total, acc, acc_tail = attend(q, q_tail, top, total, acc, acc_tail, k, rope, visible, scale, FORM, SPREAD)

    if IN_PARTS:
        total = tl.sum(tl.sum(total, 2), 1)
    lse = tl.where(total > 0, top + tl.log2(total), float("-inf"))
    denominator = total
    at = row * heads + head
    if SPLIT:
        at += split.to(tl.int64) * rows * heads
    else:
        lse = lse / LOG2E_
        if HAS_SINK:
            denominator += tl.exp2(tl.load(sink_ptr + head, mask=live, other=0.0) * LOG2E_ - top)
    tl.store(lse_ptr + at, lse, mask=live)
    factor = tl.where(denominator > 0, 1.0 / denominator, 0.0)
    store_values(out_ptr, at, live, factor, acc, acc_tail, cos_ptr, sin_ptr, FORM, HAS_ROPE and not SPLIT, PAIRS)


@triton.jit
def _load_index(indices, tile, count, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr):
    """Entry indices of a tile, -1 beyond the list. WHOLE: no tile goes beyond it."""
    at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if WHOLE:
        return tl.load(indices + at)
    else:
        return tl.load(indices + at, mask=at < count, other=-1)


@triton.jit
def _combine_kernel(
    partial_ptr, partial_lse_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, lse_ptr, rows, heads, splits,
    HAS_SINK: tl.constexpr, HAS_ROPE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = head < heads
    top = tl.full([BLOCK_H], NO_SCORE_, tl.float32)
    for s in range(splits):
        top = tl.maximum(top, tl.load(partial_lse_ptr + (s * rows + row) * heads + head, mask=live, other=NO_SCORE_))
    total = tl.zeros([BLOCK_H], tl.float32)
    body = tl.zeros([BLOCK_H, 512], tl.float32)
    for s in range(splits):
        at = (s * rows + row) * heads + head
        weight = tl.exp2(tl.load(partial_lse_ptr + at, mask=live, other=float("-inf")) - top)
        seen = (live & (weight > 0))[:, None]
        value = tl.load(partial_ptr + at[:, None] * 512 + tl.arange(0, 512)[None, :], mask=seen, other=0.0)
        body += weight[:, None] * value
        total += weight
    lse = tl.where(total > 0, top + tl.log2(total), float("-inf"))
    denominator = total
    if HAS_SINK:
        denominator += tl.exp2(tl.load(sink_ptr + head, mask=live, other=0.0) * LOG2E_ - top)
    body *= tl.where(denominator > 0, 1.0 / denominator, 0.0)[:, None]
    at = row * heads + head
    tl.store(lse_ptr + at, lse / LOG2E_, mask=live)
    start = out_ptr + at[:, None] * 512
    tl.store(start + tl.arange(0, 512)[None, :], body.to(tl.bfloat16), mask=live[:, None])
    if HAS_ROPE:
        tl.debug_barrier()
        rotate_back(start + 448, live, cos_ptr + row * 32, sin_ptr + row * 32)


LOG2E_ = tl.constexpr(LOG2E)
