"""Dense multi-head latent attention over a paged cache, absorbed form: V2/V3 decode and verification.

One latent of 512 elements plus 64 RoPE elements per token is the key of every head; its first 512 elements are the
value. The S query rows of a sequence are its last S positions. Long sequences are split at fixed, absolute token
positions and merged in order, so a result depends on the split size alone. It does not absorb weights or apply RoPE.
Source: DeepSeek-V2 report, section 2.1.
"""

import torch

from headrace.kernels import tuning
from headrace.kernels._triton import TensorDescriptor, cdiv, dot, processor_count, tl, triton
from headrace.kernels.attention_core import (
    LOG2E,
    NO_SCORE_,
    attend,
    load_keys,
    load_queries,
    store_values,
    weigh,
)
from headrace.kernels.kv_layouts import LAYOUT_IDS, PagedKV
from headrace.kernels.sparse_attention import VALUE_DIM, _view, combine_splits

INVARIANT_SPLIT = 1024  # tokens


def mla_decode_reference(
    q: torch.Tensor,
    kv: PagedKV,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    causal: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification, in `dtype`. Shapes as in `mla_decode`."""
    batch, queries, heads, _ = q.shape
    out = torch.zeros(batch, queries, heads, VALUE_DIM, dtype=dtype, device=q.device)
    lse = torch.full((batch, queries, heads), float("-inf"), dtype=dtype, device=q.device)
    for b, length in enumerate(seq_lens.tolist()):
        position = torch.arange(length, device=q.device)
        keys = kv.read(block_table[b, position // kv.page_size].long() * kv.page_size + position % kv.page_size).to(dtype)
        for s in range(queries):
            seen = keys[: max(0, length - (queries - 1 - s))] if causal else keys
            if len(seen):
                score = q[b, s].to(dtype) @ seen.T * scale  # [H, n]
                lse[b, s] = torch.logsumexp(score, -1)
                out[b, s] = torch.softmax(score, -1) @ seen[:, :VALUE_DIM]
    return out, lse


def mla_decode(
    q: torch.Tensor,
    kv: PagedKV,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    causal: bool = True,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q bf16 [B, S, H, 576]; block_table int32 [B, P] of page numbers; seq_lens int32 [B], the S query rows included.

    kv has layout bf16 (dim 576) or v32_fp8 and pages of a multiple of 64 entries. With `causal`, query row s sees
    seq_lens - (S - 1 - s) entries. Returns out bf16 [B, S, H, 512] and lse fp32 [B, S, H] (natural log; -inf and
    out 0 where nothing is seen). With `batch_invariant` the split size is fixed, else it fills the device.
    """
    batch, queries, heads, dim = q.shape
    if dim != kv.dim or dim != 576:
        raise ValueError(f"q has {dim} columns and kv {kv.dim}: MLA decode needs 576 of both")
    config = tuning.mla_decode(kv.layout, queries * heads)
    block_n, block_m = config["BLOCK_N"], config["BLOCK_M"]
    if kv.page_size % block_n:
        raise ValueError(f"page size {kv.page_size} is not a multiple of the key tile of {block_n}")
    q = q.contiguous()
    row_blocks = cdiv(queries * heads, block_m)
    tiles = cdiv(block_table.shape[1] * kv.page_size, block_n)
    if batch_invariant:
        tiles_per_split = INVARIANT_SPLIT // block_n
    else:
        splits = max(1, min(config["WAVES"] * processor_count() // max(1, batch * row_blocks), cdiv(tiles, 4)))
        tiles_per_split = cdiv(tiles, splits)
    splits = cdiv(tiles, tiles_per_split)
    out = torch.empty(batch, queries, heads, VALUE_DIM, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(batch, queries, heads, dtype=torch.float32, device=q.device)
    partial, partial_lse = out, lse
    if splits > 1:
        partial = torch.empty(splits, batch * queries, heads, VALUE_DIM, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(splits, batch * queries, heads, dtype=torch.float32, device=q.device)
    shared = {"CAUSAL": causal, "SPLIT": splits > 1, "BLOCK_M": block_m, "BLOCK_N": block_n, "STAGES": config["STAGES"]}
    shared |= {"num_warps": config["num_warps"], "PAGE": kv.page_size}
    numbers = (batch, queries, heads, block_table.stride(0), tiles_per_split, scale * LOG2E, kv.page_stride, kv.offset)
    if config["PAGES"]:
        _mla_pages_kernel[(row_blocks, splits, batch)](
            q, *_descriptors(kv, block_n), _view(kv, torch.bfloat16), block_table, seq_lens, partial, partial_lse,
            *numbers, **shared,
        )  # fmt: skip
    else:
        _mla_decode_kernel[(row_blocks, splits, batch)](
            q, _view(kv, torch.bfloat16), _view(kv, torch.int32), block_table, seq_lens, partial, partial_lse,
            *numbers, LAYOUT=LAYOUT_IDS[kv.layout], SPREAD=config["SPREAD"], **shared,
        )  # fmt: skip
    if splits > 1:
        combine_splits(partial, partial_lse, out.view(-1, heads, VALUE_DIM), lse.view(-1, heads))
    return out, lse


def _descriptors(kv: PagedKV, block_n: int) -> list:
    """Of a bf16 group as [pages, page size, 576], in blocks of [1, block_n, 512] and [1, block_n, 64]."""
    flat = _view(kv, torch.bfloat16)[kv.offset // 2 :]
    pages = cdiv(flat.numel() * 2, kv.page_stride)
    shape, strides = [pages, kv.page_size, 576], [kv.page_stride // 2, 576, 1]
    return [TensorDescriptor(flat, shape, strides, [1, block_n, width]) for width in (VALUE_DIM, 64)]


@triton.jit
def _mla_decode_kernel(
    q_ptr, kv16, kv32, table_ptr, length_ptr, out_ptr, lse_ptr,
    batch, queries, heads, table_stride, tiles_per_split, scale, page_stride, offset,
    PAGE: tl.constexpr, LAYOUT: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # (query, head) pairs of this sequence
    split = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    rows = queries * heads
    live = row < rows
    length = tl.load(length_ptr + b)
    begin = split * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, tl.cdiv(length, BLOCK_N))
    at = b * rows + row
    if SPLIT:
        at += split.to(tl.int64) * batch * rows
    if begin >= end and SPLIT:
        tl.store(lse_ptr + at, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=live)
        return
    limit = length
    if CAUSAL:
        limit = length - (queries - 1 - row // heads)
    else:
        limit = length + row * 0

    q, q_tail = load_queries(q_ptr, b * rows + row, live, 576)
    top = tl.full([BLOCK_M], NO_SCORE_, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    table = table_ptr + b * table_stride
    acc = tl.zeros([BLOCK_M, 512], tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES):
        first = tile * BLOCK_N
        page = tl.load(table + first // PAGE)
        key = first + tl.arange(0, BLOCK_N)
        index = tl.where(key < length, page * PAGE + first % PAGE + tl.arange(0, BLOCK_N), -1)
        k, rope = load_keys(kv16, kv32, index, page_stride, offset, PAGE, LAYOUT, 1)
        visible = key[None, :] < limit[:, None]
        top, total, acc, _ = attend(q, q_tail, top, total, acc, top, k, rope, visible, scale, 1, SPREAD)
    lse = tl.where(total > 0, top + tl.log2(total), float("-inf"))
    if not SPLIT:
        lse = lse / LOG2E_
    tl.store(lse_ptr + at, lse, mask=live)
    factor = tl.where(total > 0, 1.0 / total, 0.0)
    store_values(out_ptr, at, live, factor, acc, acc, lse_ptr, lse_ptr, 1, False)


@triton.jit
def _mla_pages_kernel(
    q_ptr, wide, narrow, kv16, table_ptr, length_ptr, out_ptr, lse_ptr,
    batch, queries, heads, table_stride, tiles_per_split, scale, page_stride, offset,
    PAGE: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `_mla_decode_kernel` for bf16 keys, whole tiles of a page fetched through descriptors: wide [pages, PAGE, 576] in
    blocks of [1, BLOCK_N, 512], narrow the same in blocks of 64 columns. The tiles at the end, which not every row sees whole,
    are read by pointers, 16 keys at a time."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    rows = queries * heads
    live = row < rows
    length = tl.load(length_ptr + b)
    begin = split * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, tl.cdiv(length, BLOCK_N))
    at = b * rows + row
    if SPLIT:
        at += split.to(tl.int64) * batch * rows
    if begin >= end and SPLIT:
        tl.store(lse_ptr + at, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=live)
        return
    limit = length + row * 0
    seen = length  # by every row
    if CAUSAL:
        limit = length - (queries - 1 - row // heads)
        seen = length - (queries - 1)
    whole = tl.minimum(end, tl.maximum(seen, 0) // BLOCK_N)

    q, q_tail = load_queries(q_ptr, b * rows + row, live, 576)
    top = tl.full([BLOCK_M], NO_SCORE_, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    table = table_ptr + b * table_stride
    acc = tl.zeros([BLOCK_M, 512], tl.float32)
    for tile in tl.range(begin, whole, num_stages=STAGES):
        first = tile * BLOCK_N
        page = tl.load(table + first // PAGE)
        slot = first % PAGE
        k = tl.reshape(wide.load([page, slot, 0]), [BLOCK_N, 512])
        rope = tl.reshape(narrow.load([page, slot, 512]), [BLOCK_N, 64])
        top, total, acc = _add_tile(q, q_tail, top, total, acc, k, rope, begin, limit, scale, False)
    last = tl.minimum(end * BLOCK_N, length)
    for first in tl.range(tl.maximum(whole, begin) * BLOCK_N, last, 16, num_stages=1):
        page = tl.load(table + first // PAGE).to(tl.int64)
        inside = tl.arange(0, 16)
        mask = (first + inside < length)[:, None]
        key = kv16 + ((page * page_stride + offset) >> 1) + (first % PAGE + inside)[:, None] * 576
        k = tl.load(key + tl.arange(0, 512)[None, :], mask=mask, other=0.0)
        rope = tl.load(key + 512 + tl.arange(0, 64)[None, :], mask=mask, other=0.0)
        top, total, acc = _add_tile(q, q_tail, top, total, acc, k, rope, first, limit, scale, True)
    lse = tl.where(total > 0, top + tl.log2(total), float("-inf"))
    if not SPLIT:
        lse = lse / LOG2E_
    tl.store(lse_ptr + at, lse, mask=live)
    factor = tl.where(total > 0, 1.0 / total, 0.0)
    store_values(out_ptr, at, live, factor, acc, acc, lse_ptr, lse_ptr, 1, False)


@triton.jit
def _add_tile(q, q_tail, top, total, acc, k, rope, first, limit, scale, MASKED: tl.constexpr):
    """As `attention_core.attend` with SPREAD and FORM 1, for keys from position `first` on. MASKED: only keys below limit [M]
    count."""
    M: tl.constexpr = q.shape[0]
    N: tl.constexpr = k.shape[0]
    score = dot(q, tl.trans(k), tl.zeros([M, N], tl.float32))
    score = score * scale + dot(q_tail, tl.trans(rope), tl.zeros([M, N], tl.float32)) * scale
    if MASKED:
        score = tl.where((first + tl.arange(0, N))[None, :] < limit[:, None], score, float("-inf"))
    if scale > 0:
        new_top, total, decay, weight = weigh(score, top, total)
    else:
        new_top = top
        decay = tl.full([M], 1.0, tl.float32)
        weight = score.to(tl.bfloat16)
    return new_top, total, dot(weight, k, acc * decay[:, None])


LOG2E_ = tl.constexpr(LOG2E)
