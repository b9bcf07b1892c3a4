"""The lightning indexer: scores of cached entries for each query row, over paged FP4 index keys.

score[t, j] = sum_h w[t, h] * relu(q[t, h] . k[j]), j below the row's visible count, -inf beyond. With candidates (V4.1's
second level) only the listed blocks of 8 positions are scored, and the columns are candidate slots in ascending order, so
that `topk` over them keeps its tie rule. Selection itself is `topk`. Source: DeepSeek-V3.2 report (lightning indexer) and
the V4.1 release. Sums are fp32; the release rounds products to bf16 in between.
"""

import torch

from headrace.kernels import tuning
from headrace.kernels._triton import cdiv, dot, tl, to_e4m3, triton
from headrace.kernels.attention_core import split_index
from headrace.kernels.kv_layouts import PagedKV

CANDIDATE_BLOCK = 8


def index_scores_reference(
    q: torch.Tensor,
    weights: torch.Tensor,
    kv: PagedKV,
    block_table: torch.Tensor,
    row_sequence: torch.Tensor,
    visible: torch.Tensor,
    max_entries: int,
    candidates: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The specification, in `dtype`; shapes as in `index_scores`."""
    rows = q.shape[0]
    width = max_entries if candidates is None else candidates.shape[1] * CANDIDATE_BLOCK
    out = torch.full((rows, width), float("-inf"), dtype=dtype, device=q.device)
    for t in range(rows):
        column = torch.arange(width, device=q.device)
        position = column
        if candidates is not None:
            block = candidates[t, column // CANDIDATE_BLOCK].long()
            position = torch.where(block >= 0, block * CANDIDATE_BLOCK + column % CANDIDATE_BLOCK, 1 << 40)
        seen = position < int(visible[t])
        position = position[seen]
        page = block_table[row_sequence[t].long(), position // kv.page_size].long()
        keys = kv.read(page * kv.page_size + position % kv.page_size).to(dtype)
        product = torch.relu(q[t].to(dtype) @ keys.T)
        out[t, seen] = weights[t].to(dtype) @ product
    return out


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    kv: PagedKV,
    block_table: torch.Tensor,
    row_sequence: torch.Tensor,
    visible: torch.Tensor,
    max_entries: int,
    candidates: torch.Tensor | None = None,
) -> torch.Tensor:
    """q bf16 [T, H, 128] (already quantised to FP4 values), weights fp32 [T, H] (scales folded in), kv of index_fp4.

    block_table int32 [B, P]; row_sequence int32 [T] its row for each query; visible int32 [T] entries that a row sees;
    max_entries (host) bounds visible; candidates int32 [T, C] ascending blocks of 8 positions, -1 behind the last.
    Returns fp32 [T, max_entries], or [T, 8 C] with candidates; not visible: -inf.
    """
    rows, heads, dim = q.shape
    if kv.layout != "index_fp4" or dim != 128 or heads not in (16, 32, 64, 128):
        raise ValueError(f"the indexer needs index_fp4 keys of 128 and 16, 32, 64 or 128 heads: {kv.layout}, {dim}, {heads}")
    if kv.page_size % CANDIDATE_BLOCK:
        raise ValueError(f"a page of index keys holds whole blocks of {CANDIDATE_BLOCK}: got pages of {kv.page_size}")
    width = max_entries if candidates is None else candidates.shape[1] * CANDIDATE_BLOCK
    out = torch.empty(rows, width, dtype=torch.float32, device=q.device)
    config = tuning.indexer(rows, width, candidates is not None)
    words = kv.bytes[: kv.bytes.numel() // 4 * 4].view(torch.int32)
    if kv.page_stride % 4 or kv.offset % 4:
        raise ValueError(f"index keys are read as words: page stride {kv.page_stride}, offset {kv.offset} bytes")
    if rows and width:
        wide = heads > 32  # its sums would not fit into registers beside a tile of 128 keys
        tile = min(config["BLOCK_N"], 64) if wide else config["BLOCK_N"]
        _score_kernel[(cdiv(width, tile * config["TILES"]), rows)](
            q.contiguous(), weights.contiguous(), words, block_table, row_sequence, visible,
            candidates if candidates is not None else visible, out, width, block_table.stride(0),
            0 if candidates is None else candidates.stride(0), kv.page_stride // 4, kv.offset // 4,
            tile * config["TILES"],
            HEADS=heads, PAGE=kv.page_size, CANDIDATES=candidates is not None, BLOCK_N=tile,
            ALIGNED=1 if kv.offset % 16 else 4, num_warps=4, maxnreg=None if wide else config["REGISTERS"],
        )  # fmt: skip
    return out


@triton.jit
def _score_kernel(
    q_ptr, weight_ptr, pool, table_ptr, sequence_ptr, visible_ptr, candidate_ptr, out_ptr, width,
    table_stride, candidate_stride, page_stride, offset, span,
    HEADS: tl.constexpr, PAGE: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A run of keys of one row. FP4 codes become e4m3 by shifts of whole words; a product covers one scale group, in which
    all values of a key (and of a query head) share an exponent, so that it is exact; scales are applied to the products.

    Laid out for Hopper's matrix unit: keys come in whole lines into the registers of the warp that multiplies them, a tile
    ahead of their use, and reach its left operand without meeting another warp.

    The unit gives a warp the rows 16 w to 16 w + 15 of 64, a thread two of them eight apart, and four threads share a row. A
    load gives it the rows 8 w to 8 w + 7 of 32. So a tile is loaded in the order of `_loaded`, and `_own` puts it back by names
    of registers alone. Triton's own pipelining would wait for each tile's table entry and then for its keys.
    """
    STRAIGHT: tl.constexpr = not CANDIDATES and PAGE % 64 == 0  # 64 rows lie in one page
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * span
    last = tl.minimum(width, first + span)
    visible = tl.load(visible_ptr + row)
    stop = last
    if not CANDIDATES:
        stop = tl.maximum(tl.minimum(last, visible), first)
    final = tl.maximum(tl.minimum(last, visible), 1) - 1
    table_ptr += tl.load(sequence_ptr + row).to(tl.int64) * table_stride
    candidate_ptr += row * candidate_stride
    out_ptr += row * width
    head = row * HEADS + tl.arange(0, HEADS)
    q0, q1 = _query_group(q_ptr, head, 0), _query_group(q_ptr, head, 1)
    q2, q3 = _query_group(q_ptr, head, 2), _query_group(q_ptr, head, 3)
    most = tl.maximum(tl.maximum(tl.max(tl.abs(q0), 1), tl.max(tl.abs(q1), 1)), tl.max(tl.abs(q2), 1))
    most = tl.maximum(most, tl.max(tl.abs(q3), 1))
    exponent = tl.maximum(most.to(tl.int32, bitcast=True) >> 23, 10)
    up = ((261 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]  # the largest of a head lands in 128..255
    q0, q1, q2, q3 = to_e4m3(q0 * up), to_e4m3(q1 * up), to_e4m3(q2 * up), to_e4m3(q3 * up)
    weight = tl.load(weight_ptr + head) * ((exponent - 2) << 23).to(tl.float32, bitcast=True)  # half of it: see below
    block = _blocks(candidate_ptr, first, last, final, CANDIDATES, STRAIGHT, BLOCK_N)
    page, upper_page = _pages(table_ptr, block, visible, PAGE, CANDIDATES, STRAIGHT, BLOCK_N)
    words, scale = _load_keys(pool, page, upper_page, block, page_stride, offset, PAGE, STRAIGHT, ALIGNED, BLOCK_N)
    block = _blocks(candidate_ptr, first + BLOCK_N, last, final, CANDIDATES, STRAIGHT, BLOCK_N)
    page, upper_page = _pages(table_ptr, block, visible, PAGE, CANDIDATES, STRAIGHT, BLOCK_N)
    after = _blocks(candidate_ptr, first + 2 * BLOCK_N, last, final, CANDIDATES, STRAIGHT, BLOCK_N)
    for begin in tl.range(first, stop, BLOCK_N, num_stages=1):
        if BLOCK_N == 128:  # one half after the other: their sums are not in registers at once
            lower, upper = _halves(words)
            lower_scale, upper_scale = _halves(scale)
            a0, a1, a2, a3 = _groups(lower)
            b0, b1, b2, b3 = _groups(upper)
        else:
            lower_scale = scale
            a0, a1, a2, a3 = _groups(words)
        words, scale = _load_keys(pool, page, upper_page, block, page_stride, offset, PAGE, STRAIGHT, ALIGNED, BLOCK_N)
        tl.debug_barrier()  # or the assembler moves these loads behind the products, right before their use
        score = _scores(a0, a1, a2, a3, lower_scale, q0, q1, q2, q3, weight)
        if BLOCK_N == 128:
            more = _scores(b0, b1, b2, b3, upper_scale, q0, q1, q2, q3, weight)
            score = tl.reshape(tl.permute(tl.join(score, more), (1, 0)), [128])
        block = after
        page, upper_page = _pages(table_ptr, block, visible, PAGE, CANDIDATES, STRAIGHT, BLOCK_N)
        after = _blocks(candidate_ptr, begin + 3 * BLOCK_N, last, final, CANDIDATES, STRAIGHT, BLOCK_N)
        column = tl.arange(0, BLOCK_N)
        inside = column < stop - begin
        if CANDIDATES:
            chosen = tl.load(candidate_ptr + begin // 8 + (column >> 3), mask=inside, other=-1)
            score = tl.where((chosen >= 0) & (chosen * 8 + (column & 7) < visible), score, float("-inf"))
        tl.store(out_ptr + begin + column, score, mask=inside)
    for begin in range(stop, last, BLOCK_N):
        column = begin + tl.arange(0, BLOCK_N)
        tl.store(out_ptr + column, tl.full([BLOCK_N], float("-inf"), tl.float32), mask=column < last)


@triton.jit
def _halves(x):
    """[2 R, C] -> its first R rows and the others"""
    R: tl.constexpr = x.shape[0] // 2
    return tl.split(tl.permute(tl.reshape(x, [2, R, x.shape[1]]), (1, 2, 0)))


@triton.jit
def _groups(words):
    """Words int32 [N, 16] as loaded -> those of each scale group, int32 [N, 4], in order."""
    even, odd = tl.split(tl.permute(tl.reshape(words, [words.shape[0], 2, 2, 4]), (0, 3, 2, 1)))  # groups 0 and 1, 2 and 3
    w0, w1 = tl.split(even)
    w2, w3 = tl.split(odd)
    return _own(w0), _own(w1), _own(w2), _own(w3)


@triton.jit
def _scores(w0, w1, w2, w3, scale, q0, q1, q2, q3, weight):
    """Words of four groups in order, scale int32 [N, 4] as loaded -> fp32 scores [N]."""
    scale = _own(scale)
    total = _group_product(w0, q0, scale << 23)
    total += _group_product(w1, q1, scale << 15)
    total += _group_product(w2, q2, scale << 7)
    total += _group_product(w3, q3, scale >> 1)
    return tl.sum((total + tl.abs(total)) * weight[None, :], 1)  # twice relu: an addition runs at twice a maximum's rate


@triton.jit
def _blocks(candidate_ptr, begin, last, final, CANDIDATES: tl.constexpr, STRAIGHT: tl.constexpr, N: tl.constexpr):
    """Blocks of 8 positions of the tile at column `begin`: [N / 8], the first alone with STRAIGHT; -1: none. Behind the last
    position `final` that of the last tile, which is read once more for nothing."""
    if STRAIGHT:
        return (tl.minimum(begin, final & -N) >> 3) + tl.zeros([], tl.int32)
    elif CANDIDATES:
        block = (begin >> 3) + tl.arange(0, N // 8)
        return tl.load(candidate_ptr + block, mask=block * 8 < last, other=-1)
    else:
        return tl.minimum((begin >> 3) + tl.arange(0, N // 8), final >> 3)


@triton.jit
def _pages(
    table_ptr, block, visible, PAGE: tl.constexpr, CANDIDATES: tl.constexpr, STRAIGHT: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Pool pages of blocks, and that of rows 64 and up of a tile with STRAIGHT; page 0 for what nobody sees, where the table
    may end."""
    page = _page(table_ptr, block, visible, PAGE, CANDIDATES)
    if STRAIGHT and PAGE % N > 0:
        return page, _page(table_ptr, block + 8, visible, PAGE, CANDIDATES)
    else:
        return page, page


@triton.jit
def _page(table_ptr, block, visible, PAGE: tl.constexpr, CANDIDATES: tl.constexpr):
    seen = block * 8 < visible
    if CANDIDATES:
        seen = seen & (block >= 0)
        block = tl.maximum(block, 0)
    page, _ = split_index(block * 8, PAGE)
    return tl.load(table_ptr + page, mask=seen, other=0)


@triton.jit
def _load_keys(
    pool, page, upper_page, block, page_stride, offset, PAGE: tl.constexpr, STRAIGHT: tl.constexpr, ALIGNED: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """A tile's raw keys in the order of `_loaded`: words int32 [N, 16], the scale word int32 [N, 4], four times the same."""
    at = page.to(tl.int64) * page_stride + offset
    _, slot = split_index(tl.maximum(block, 0) * 8, PAGE)
    if STRAIGHT:  # a base for all rows: what they add is then small and partly constant
        row = tl.arange(0, 32) // 8 * 16 + tl.arange(0, 32) % 8
        inside = (row * 16)[:, None] + tl.arange(0, 16)[None, :]
        key = pool + tl.multiple_of(at + slot * 16, ALIGNED) + inside
        scale = at + PAGE * 16 + slot
        entry = _loaded(tl.arange(0, N // 8) * 8) + (tl.arange(0, N) & 7)
        words = _rows(tl.load(key), tl.load(key + 128))
        if N == 128 and PAGE % N == 0:
            words = _rows(words, _rows(tl.load(key + 1024), tl.load(key + 1152)))
        elif N == 128:
            upper = upper_page.to(tl.int64) * page_stride + offset
            _, upper_slot = split_index((block + 8) * 8, PAGE)
            key = pool + tl.multiple_of(upper + upper_slot * 16, ALIGNED) + inside
            words = _rows(words, _rows(tl.load(key), tl.load(key + 128)))
            scale = tl.where(tl.arange(0, N) < 64, scale, upper + PAGE * 16 + upper_slot - 64)
            return words, tl.trans(tl.load(pool + (scale + entry)[None, :] + tl.zeros([4, 1], tl.int32)))
        return words, tl.trans(tl.load(pool + scale + (entry[None, :] + tl.zeros([4, 1], tl.int32))))
    else:
        at, slot = _loaded(at), _loaded(slot) + (tl.arange(0, N) & 7)
        key = (pool + tl.multiple_of(at + slot * 16, ALIGNED))[:, None] + tl.arange(0, 16)[None, :]
        scale = pool + at + PAGE * 16 + slot
        # Not [N, 4]: of equal addresses the first dimension goes to neighbouring threads, and a row's four are neighbours.
        return tl.load(key), tl.trans(tl.load(scale[None, :] + tl.zeros([4, 1], tl.int32)))


@triton.jit
def _rows(a, b):
    """[R, C], [R, C] -> [2 R, C], one behind the other"""
    return tl.reshape(tl.permute(tl.join(a, b), (2, 0, 1)), [2 * a.shape[0], a.shape[1]])


@triton.jit
def _loaded(block):
    """A value for each block of 8 rows [N / 8], in order -> for each row as loaded [N]."""
    N: tl.constexpr = block.shape[0] * 8
    block = tl.permute(tl.reshape(block, [N // 64, 4, 2]), (0, 2, 1))
    return tl.reshape(tl.broadcast_to(block[:, :, :, None], [N // 64, 2, 4, 8]), [N])


@triton.jit
def _own(x):
    """Rows as loaded [N, C] -> in order: undoes `_loaded`."""
    N: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, [N // 64, 2, 4, 8, C]), (0, 2, 1, 3, 4)), [N, C])


@triton.jit
def _query_group(q_ptr, row, GROUP: tl.constexpr):
    """Columns of one scale group of query rows [H], fp32 [H, 32], in the order in which `_group_product` decodes keys: the even
    columns of every word, then the odd ones."""
    H: tl.constexpr = row.shape[0]
    q = tl.load(q_ptr + row[:, None] * 128 + (GROUP * 32 + tl.arange(0, 32))[None, :]).to(tl.float32)
    return tl.reshape(tl.permute(tl.reshape(q, [H, 4, 4, 2]), (0, 3, 1, 2)), [H, 32])


@triton.jit
def _group_product(words, q, scale):
    """Packed FP4 words int32 [N, 4] of one group, q e4m3 [H, 32], scale int32 [N, 4], its byte at the bits of a fp32 exponent
    -> fp32 [N, H] / 64. Four threads that share a row hold a word each, and each its scale."""
    N: tl.constexpr = words.shape[0]
    H: tl.constexpr = q.shape[0]
    low = ((words << 4) & -2139062144) | ((words << 2) & 0x1C1C1C1C)  # sign to bit 7, code to bits 2..4 of each byte
    high = (words & -2139062144) | ((words >> 2) & 0x1C1C1C1C)
    word = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [N, 8])
    byte = tl.join(tl.join(word, word >> 16), tl.join(word >> 8, word >> 24))  # [N, 8, 2, 2]
    key = tl.reshape(byte, [N, 32]).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    product = dot(key, tl.trans(q), tl.zeros([N, H], tl.float32))
    factor = (scale & 0x7F800000).to(tl.float32, bitcast=True)
    return product * tl.reshape(tl.broadcast_to(factor[:, None, :, None], [N, H // 8, 4, 2]), [N, H])


def block_max_reference(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """scores fp32 [T, N], visible int32 [T] -> [T, ceil(N / 8)]: the best of each block of 8; a partial last block is padded

    with -inf, and the block with the newest visible position is +inf, so that a top-k over blocks always holds it.
    """
    rows, n = scores.shape
    padded = torch.nn.functional.pad(scores, (0, -n % CANDIDATE_BLOCK), value=float("-inf"))
    best = padded.unflatten(-1, (-1, CANDIDATE_BLOCK)).amax(-1)
    newest = (visible.long() - 1).clamp_min(0) // CANDIDATE_BLOCK
    forced = (torch.arange(best.shape[1], device=scores.device) == newest.unsqueeze(1)) & (visible > 0).unsqueeze(1)
    return best.masked_fill(forced, float("inf"))


def block_max(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """As `block_max_reference`."""
    rows, n = scores.shape
    blocks = cdiv(n, CANDIDATE_BLOCK)
    out = torch.empty(rows, blocks, dtype=torch.float32, device=scores.device)
    if rows and blocks:
        _block_max_kernel[(rows, cdiv(blocks, 256))](scores, visible, out, n, scores.stride(0), blocks, BLOCK=256)
    return out


@triton.jit
def _block_max_kernel(score_ptr, visible_ptr, out_ptr, n, stride, blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    best = tl.max(tl.load(score_ptr + row * stride + at, mask=at < n, other=float("-inf")), 1)
    visible = tl.load(visible_ptr + row)
    newest = tl.where(visible > 0, (visible - 1) // 8, -1)
    best = tl.where(block == newest, float("inf"), best)
    tl.store(out_ptr + row * blocks + block, best, mask=block < blocks)
