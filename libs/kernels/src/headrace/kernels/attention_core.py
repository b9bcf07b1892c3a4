"""The inner step shared by every latent-attention kernel: fetch entries of a layout, decode, one online-softmax update.

Latent attention (MLA after absorption, CSA2): one KV head whose entry is key and value at once. An entry is read as
512 columns and, in some forms (FORM), 64 more:
  0  512              one format for all columns (V4.1, bf16); all are also value
  1  512 | 64 rope    D = 576 (V3 family); the rope columns are key only
  2  448 | 64 rope    V4: FP8 and bf16 columns, all are also value; the first part is padded to 512 with zeros
Scores are kept in base 2 (scale * log2 e folded into one factor). The running maximum starts at -1e30, not at -inf, so
a row that sees no key stays finite and gives 0.
"""

from headrace.kernels._triton import _INTERPRETED, dot, tl, triton

LOG2E = 1.4426950408889634
NO_SCORE = -1.0e30
NO_SCORE_ = tl.constexpr(NO_SCORE)
PAIRS_SCALE = 2.0**48  # over what `decode_pairs` gives
PAIRS_SCALE_ = tl.constexpr(PAIRS_SCALE)


@triton.jit
def split_index(index, PAGE: tl.constexpr):
    """Entry index >= 0 -> (page int64, slot in the page); by shifts where the page size allows."""
    if PAGE & (PAGE - 1) == 0:
        LOG: tl.constexpr = PAGE.bit_length() - 1
        return (index >> LOG).to(tl.int64), index & (PAGE - 1)
    else:
        return (index // PAGE).to(tl.int64), index % PAGE


@triton.jit
def load_keys(
    base16, base32, index, page_stride, offset, PAGE: tl.constexpr, LAYOUT: tl.constexpr, FORM: tl.constexpr,
    PAIRS: tl.constexpr = False,
):  # fmt: skip
    """Entries at index [N] (negative: zeros) of any layout -> bf16 k [N, 512] and, in forms 1 and 2, rope [N, 64].

    PAIRS, for layouts 1 and 2: k / PAIRS_SCALE, its columns as `pairs_column` has them; of a negative index something finite.
    """
    if PAIRS:
        data, words = fetch_pairs(base32, index, page_stride, offset, PAGE, LAYOUT)
        k = decode_pairs(data, words, LAYOUT)
        return k, k
    elif LAYOUT == 0:
        return fetch_bf16(base16, index, page_stride, offset, PAGE, FORM)
    else:
        data, words, tail = fetch(base32, index, page_stride, offset, PAGE, LAYOUT)
        k = decode(data, words, LAYOUT)
        rope = k
        if FORM > 0:
            rope = unpack_bf16(tail)
        return k, rope


@triton.jit
def fetch_bf16(base16, index, page_stride, offset, PAGE: tl.constexpr, FORM: tl.constexpr):
    """Entries at index [N] (negative: zeros) of a bf16 pool -> k [N, 512] and, in form 1, rope [N, 64]."""
    mask = (index >= 0)[:, None]
    index = tl.maximum(index, 0)
    size: tl.constexpr = 1152 if FORM == 1 else 1024
    page, slot = split_index(index, PAGE)
    row = tl.multiple_of((page * page_stride + offset + slot * size) >> 1, 8)
    k = tl.load(base16 + row[:, None] + tl.arange(0, 512)[None, :], mask=mask, other=0.0)
    rope = k
    if FORM == 1:
        rope = tl.load(base16 + row[:, None] + 512 + tl.arange(0, 64)[None, :], mask=mask, other=0.0)
    return k, rope


@triton.jit
def fetch(base32, index, page_stride, offset, PAGE: tl.constexpr, LAYOUT: tl.constexpr):
    """Raw words of the entries at index [N] (negative: zeros): (columns, scales, rope columns), all int32, unused ones small.

    Words, not bytes: a loop prefetches them into shared memory in 16-byte pieces.
    """
    present = index >= 0
    mask = present[:, None]
    index = tl.maximum(index, 0)
    page, slot = split_index(index, PAGE)
    begin = page * page_stride + offset
    column = tl.arange(0, 128)
    if LAYOUT == 1:
        row = tl.multiple_of((begin + slot * 528) >> 2, 4)
        data = tl.load(base32 + row[:, None] + column[None, :], mask=mask, other=0)
        words = tl.load(base32 + row[:, None] + 128 + tl.arange(0, 4)[None, :], mask=mask, other=0)
        tail = index
    elif LAYOUT == 2:
        row = tl.multiple_of((begin + slot * 288) >> 2, 4)
        data = tl.load(base32 + row[:, None] + tl.arange(0, 64)[None, :], mask=mask, other=0)
        words = tl.load(base32 + row[:, None] + 64 + tl.arange(0, 8)[None, :], mask=mask, other=0)
        tail = index
    elif LAYOUT == 3:
        row = tl.multiple_of((begin + slot * 576) >> 2, 4)
        data = tl.load(base32 + row[:, None] + column[None, :], mask=mask, other=0)
        word = tl.multiple_of((begin + PAGE * 576 + slot * 8) >> 2, 2)
        # Each of the two words twice: a tile smaller than the threads would be loaded by every thread in full.
        words = tl.load(base32 + word[:, None] + (tl.arange(0, 4) // 2)[None, :], mask=mask, other=0)
        tail = tl.load(base32 + row[:, None] + 112 + tl.arange(0, 32)[None, :], mask=mask, other=0)
    else:
        row = tl.multiple_of((begin + slot * 656) >> 2, 4)
        data = tl.load(base32 + row[:, None] + column[None, :], mask=mask, other=0)
        words = tl.load(base32 + row[:, None] + 128 + tl.arange(0, 4)[None, :], mask=mask, other=0)
        tail = tl.load(base32 + row[:, None] + 132 + tl.arange(0, 32)[None, :], mask=mask, other=0)
    return data, words, tail


@triton.jit
def fetch_pairs(base32, index, page_stride, offset, PAGE: tl.constexpr, LAYOUT: tl.constexpr):
    """As `fetch`, of layouts 1 and 2: (columns, scales); a negative index reads the first entry."""
    ENTRY: tl.constexpr = 132 if LAYOUT == 1 else 72  # words
    COLUMNS: tl.constexpr = 128 if LAYOUT == 1 else 64
    page, slot = split_index(tl.maximum(index, 0), PAGE)
    row = tl.multiple_of(page * (page_stride >> 2) + (slot * ENTRY + (offset >> 2)), 4)[:, None]
    data = tl.load(base32 + row + tl.arange(0, COLUMNS)[None, :])
    return data, tl.load(base32 + row + COLUMNS + tl.arange(0, ENTRY - COLUMNS)[None, :])


@triton.jit
def decode(data, words, LAYOUT: tl.constexpr):
    """Raw columns and scale words of `fetch` -> bf16 [N, 512]; every product but V3.2's is exact."""
    N: tl.constexpr = data.shape[0]
    if LAYOUT == 1:
        return _scaled(_e4m3(_bytes(data)), _ue8m0(_bytes(words)))
    elif LAYOUT == 2:
        scale = _e4m3(_bytes(words)) * 16384.0
        even, odd = decode_e2m1(_bytes(data))
        even = tl.reshape(even, [N, 32, 8]) * scale[:, :, None]
        odd = tl.reshape(odd, [N, 32, 8]) * scale[:, :, None]
        return tl.reshape(tl.join(even, odd), [N, 512]).to(tl.bfloat16)
    elif LAYOUT == 3:
        words = words >> ((tl.arange(0, 4) % 2) * 16)[None, :]
        byte = tl.join(words & 0xFF, (words >> 8) & 0xFF)  # [N, 4, 2]: a scale per 64 columns
        byte = tl.where((tl.arange(0, 8) < 7)[None, :], tl.reshape(byte, [N, 8]), 127)  # the eighth is padding
        data = tl.where((tl.arange(0, 128) < 112)[None, :], data, 0)  # the last words are the first rope columns
        return _scaled(_e4m3(_bytes(data)), _ue8m0(byte))
    else:
        return _scaled(_e4m3(_bytes(data)), words.to(tl.float32, bitcast=True))


@triton.jit
def pairs_column(at):
    """Which of 512 columns lies at `at`: 256 i + 32 t + 8 r + e at 256 i + 64 r + 8 t + e.

    A thread decodes four words of eight FP4 values. So eight threads store 128 bytes side by side at a time, where in the
    columns' own order they would meet in the same banks.
    """
    return at // 256 * 256 + at // 8 % 8 * 32 + at // 64 % 4 * 8 + at % 8


@triton.jit
def decode_pairs(data, words, LAYOUT: tl.constexpr):
    """Raw columns and scale words of `fetch` -> bf16 [N, 512] / PAIRS_SCALE, columns as `pairs_column` has them.

    Two values at a time in the halves of int32, and no value leaves its thread. The bits of e2m1 (e4m3), at their places in a
    bf16, are 2^-126 (2^-120) of the value; PAIRS_SCALE is what keeps the factors that make up for it in range. Exact for e4m3
    scales that are not NaN, and for UE8M0 scales from 2^-69 to 2^55; finite for any bytes.
    """
    N: tl.constexpr = data.shape[0]
    if LAYOUT == 1:
        byte = (words[:, :, None] >> (tl.arange(0, 32) // 8 * 8)[None, None, :]) & 0xFF
        factor = tl.reshape(tl.minimum(byte + 72, 254) * 0x00800080, [N, 128])  # 2^(120 - 48) of the scale, as exponents
        FIELDS: tl.constexpr = 0x87F087F0 - (1 << 32)
        first, second = _wide_bytes(data, data, 0, 1) << 4, _wide_bytes(data, data, 2, 3) << 4
        pairs = tl.join(_times(first & FIELDS, factor), _times(second & FIELDS, factor))
    else:
        byte = (words[:, :, None] >> (tl.arange(0, 8) // 2 * 8)[None, None, :]) & 0x7F
        factor = tl.reshape(byte, [N, 64]) * 0x00100010  # 2^-120 of the scale
        factor = _times(_times(factor, tl.full([N, 64], 0x71807180, tl.int32)), tl.full([N, 64], 0x70807080, tl.int32))
        FIELDS: tl.constexpr = 0x81C081C0 - (1 << 32)
        even = data << 4
        p0, p1 = _wide_bytes(even, data, 0, 0) << 2, _wide_bytes(even, data, 1, 1) << 2
        p2, p3 = _wide_bytes(even, data, 2, 2) << 2, _wide_bytes(even, data, 3, 3) << 2
        first = tl.join(_times(p0 & FIELDS, factor), _times(p2 & FIELDS, factor))
        second = tl.join(_times(p1 & FIELDS, factor), _times(p3 & FIELDS, factor))
        pairs = tl.join(first, second)
    pairs = tl.permute(tl.reshape(pairs, [N, 2, 8, 4, 4]), (0, 1, 3, 2, 4))
    return unpack_bf16(tl.reshape(pairs, [N, 256]))


@triton.jit
def _wide_bytes(low, high, L: tl.constexpr, H: tl.constexpr):
    """Byte L of int32 `low` and byte H of `high` as signed numbers in the halves of int32."""
    if _INTERPRETED:
        return ((low << (24 - 8 * L)) >> 24 & 0xFFFF) | ((high << (24 - 8 * H)) >> 24 << 16)
    else:
        which = tl.full(low.shape, 0xC480 + 0x0011 * L + 0x1100 * H, tl.int32)
        text: tl.constexpr = "prmt.b32 $0, $1, $2, $3;"
        return tl.inline_asm_elementwise(text, "=r,r,r,r", [low, high, which], tl.int32, is_pure=True, pack=1)


@triton.jit
def _times(a, b):
    """Products of the bf16 in both halves of int32."""
    if _INTERPRETED:
        low = (a << 16).to(tl.float32, bitcast=True) * (b << 16).to(tl.float32, bitcast=True)
        high = (a & -65536).to(tl.float32, bitcast=True) * (b & -65536).to(tl.float32, bitcast=True)
        return ((low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | (high.to(tl.int32, bitcast=True) & -65536)
    else:
        return tl.inline_asm_elementwise("mul.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def unpack_bf16(words):
    """int32 [N, W] -> bf16 [N, 2 W]."""
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    low = words.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.join(low, high), [N, W * 2])


@triton.jit
def _e4m3(byte):
    return byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _bytes(words):
    """int32 [N, W] -> their bytes, lowest first, as int32 [N, 4 W]."""
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    even = tl.join(words & 0xFF, (words >> 16) & 0xFF)
    odd = tl.join((words >> 8) & 0xFF, (words >> 24) & 0xFF)
    return tl.reshape(tl.join(even, odd), [N, W * 4])


@triton.jit
def _ue8m0(byte):
    return (byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(value, scale):
    """fp32 [N, C] times scale [N, G] per C / G columns -> bf16 [N, C]."""
    N: tl.constexpr = value.shape[0]
    C: tl.constexpr = value.shape[1]
    G: tl.constexpr = scale.shape[1]
    return tl.reshape(tl.reshape(value, [N, G, C // G]) * scale[:, :, None], [N, C]).to(tl.bfloat16)


@triton.jit
def decode_e2m1(byte):
    """Packed bytes [..., B] -> fp32 (even columns, odd columns), each [..., B], both 2^-14 of their value.

    The three magnitude bits are the low exponent bits and the top mantissa bit of an fp16; its bias is 14 larger.
    """
    wide = byte.to(tl.int16)
    low = ((wide & 7) << 9) | ((wide & 8) << 12)
    high = ((wide & 0x70) << 5) | ((wide & 0x80) << 8)
    return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_queries(q_ptr, row, live, D: tl.constexpr, PAIRS: tl.constexpr = False):
    """Query rows [M] of D elements -> their first 512 [M, 512] and last 64 columns [M, 64]; dead rows are zeros.

    PAIRS: the 512 as `pairs_column` has them."""
    start = q_ptr + row[:, None] * D
    column = tl.arange(0, 512)
    if PAIRS:
        column = pairs_column(column)
    q = tl.load(start + column[None, :], mask=live[:, None], other=0.0)
    q_tail = tl.load(start + (D - 64) + tl.arange(0, 64)[None, :], mask=live[:, None], other=0.0)
    return q, q_tail


@triton.jit
def attend(
    q, q_tail, top, total, acc, acc_tail, k, rope, visible, scale, FORM: tl.constexpr, SPREAD: tl.constexpr
):  # fmt: skip
    """One tile of N keys: k bf16 [N, 512], rope [N, 64].

    q bf16 [M, 512], q_tail [M, 64]; top [M]; total see `weigh`; acc fp32 [M, 512], acc_tail [M, 64]. visible
    [1 or M, N]; scale > 0. In form 2 the columns of q beyond 448 meet zeros.
    """
    M: tl.constexpr = q.shape[0]
    N: tl.constexpr = k.shape[0]
    score = dot(q, tl.trans(k), tl.zeros([M, N], tl.float32))
    if SPREAD:
        score *= scale
        if FORM > 0:
            score += dot(q_tail, tl.trans(rope), tl.zeros([M, N], tl.float32)) * scale
    else:
        if FORM > 0:
            score = dot(q_tail, tl.trans(rope), score)
        score *= scale
    # With SPREAD the branch is always taken, and the sum above is not a chain of products: where the compiler sees one
    # product behind another it lays the first out by rows alone, and with 64 rows half of the warps repeat the others'
    # work. Without it the weights need no shared memory, which a long tile of wide keys may need more.
    if SPREAD:
        if scale > 0:
            new_top, total, decay, weight = weigh(tl.where(visible, score, float("-inf")), top, total)
        else:  # not constants: the weights of both branches would then be kept in shared memory
            new_top = top
            decay = tl.full([M], 1.0, tl.float32)
            weight = score.to(tl.bfloat16)
    else:
        new_top, total, decay, weight = weigh(tl.where(visible, score, float("-inf")), top, total)
    acc = dot(weight, k, acc * decay[:, None])
    if FORM == 2:
        acc_tail = dot(weight, rope, acc_tail * decay[:, None])
    return new_top, total, acc, acc_tail


@triton.jit
def weigh(score, top, total):
    """Online softmax of scores [M, N]: (new maximum [M], new denominator, decay of what was summed, weights bf16).

    total [M], or [M, 2, 4]: parts of it, each the sum of what one thread holds of a row, for the caller to add up at the end.
    """
    new_top = tl.maximum(top, tl.max(score, 1))
    decay = tl.exp2(top - new_top)
    weight = tl.exp2(score - new_top[:, None])
    if len(total.shape) == 3:
        M: tl.constexpr = score.shape[0]
        N: tl.constexpr = score.shape[1]
        parts = tl.sum(tl.sum(tl.reshape(weight, [M, 2, N // 16, 4, 2]), 4), 2)
        total = total * decay[:, None, None] + parts
    else:
        total = total * decay + tl.sum(weight, 1)
    return new_top, total, decay, weight.to(tl.bfloat16)


@triton.jit
def store_values(
    out_ptr, at, live, factor, acc, acc_tail, cos_ptr, sin_ptr, FORM: tl.constexpr, HAS_ROPE: tl.constexpr,
    PAIRS: tl.constexpr = False,
):  # fmt: skip
    """Write acc [M, 512] times factor [M] to rows `at` [M] of 512. PAIRS: acc is a sum of what `decode_pairs` gives.

    HAS_ROPE then rotates the last 64 columns by the conjugate, from the rounded values, as the model does.
    """
    start = out_ptr + at[:, None] * 512
    mask = live[:, None]
    kind = out_ptr.dtype.element_ty
    column = tl.arange(0, 512)
    if PAIRS:
        column = pairs_column(column)
        factor *= PAIRS_SCALE_
    value = (acc * factor[:, None]).to(kind)
    if FORM == 2:
        tl.store(start + column[None, :], value, mask=mask & (column < 448)[None, :])
        tail = (acc_tail * factor[:, None]).to(kind)
        tl.store(start + 448 + tl.arange(0, 64)[None, :], tail, mask=mask)
    else:
        tl.store(start + column[None, :], value, mask=mask)
    if HAS_ROPE:
        tl.debug_barrier()  # the row is read back by other threads than wrote it
        rotate_back(start + 448, live, cos_ptr, sin_ptr)


@triton.jit
def rotate_back(start, live, cos_ptr, sin_ptr):
    """Rotate 64 bf16 columns in memory at start [M, 1] by the conjugate of cos, sin [32] at the pointers."""
    pair = tl.arange(0, 32)
    cos = tl.load(cos_ptr + pair)[None, :]
    sin = tl.load(sin_ptr + pair)[None, :]
    at = start.to(tl.pointer_type(tl.int32), bitcast=True) + pair[None, :]
    both = tl.load(at, mask=live[:, None], other=0)
    even, odd = (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)
    # fma is said, not left to the compiler: see `rope.rotated`
    turned_even = tl.fma(even, cos, odd * sin).to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    turned_odd = tl.fma(odd, cos, even * -sin).to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    tl.store(at, (turned_even & 0xFFFF) | (turned_odd << 16), mask=live[:, None])
