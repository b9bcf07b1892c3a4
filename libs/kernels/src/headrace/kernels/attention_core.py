"""The inner step shared by every latent-attention kernel: read entries of a layout, then one online-softmax update.

Latent attention (MLA after absorption, CSA2): one KV head whose entry is key and value at once. An entry of D elements
is split by columns into chunks whose widths are powers of two, so that no tile is padded:
  D = 512 (V4, V4.1)   256 | 128 | 64 | 64 rope, all of them also value
  D = 576 (V3 family)  256 | 256 | 64 rope, the rope columns are key only
Scores are kept in base 2 (scale * log2 e folded into one factor). The running maximum starts at -1e30, not at -inf, so
a row that sees no key stays finite and gives 0.
"""

from headrace.kernels._triton import dot, tl, triton

LOG2E = 1.4426950408889634
NO_SCORE = -1.0e30


@triton.jit
def entry_rows(index, page_stride, offset, PAGE: tl.constexpr, LAYOUT: tl.constexpr, D: tl.constexpr):
    """Entry indices [N] -> byte offsets [N] of data and of scales, from the pool's begin."""
    page = (index // PAGE).to(tl.int64)
    slot = index % PAGE
    begin = page * page_stride + offset
    if LAYOUT == 0:
        return begin + slot * (2 * D), begin
    elif LAYOUT == 1:
        return begin + slot * 528, begin + slot * 528 + 512
    elif LAYOUT == 2:
        return begin + slot * 288, begin + slot * 288 + 256
    elif LAYOUT == 3:
        return begin + slot * 576, begin + PAGE * 576 + slot * 8
    else:
        return begin + slot * 656, begin + slot * 656 + 512


@triton.jit
def load_bf16(base16, row, valid, COL: tl.constexpr, W: tl.constexpr):
    """W bf16 columns from byte offset row + COL: [N, W]; absent rows are zeros."""
    column = tl.arange(0, W) + COL // 2
    start = tl.multiple_of(row // 2, 8)
    return tl.load(base16 + start[:, None] + column[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def load_fp8(base8, row, scale_row, valid, COL: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr):
    """W e4m3 columns with a UE8M0 scale per GROUP columns -> bf16 [N, W] (exact)."""
    N: tl.constexpr = row.shape[0]
    column = tl.arange(0, W)
    group = tl.arange(0, W // GROUP)
    start = tl.multiple_of(row, 16)
    q = tl.load(base8 + start[:, None] + (column + COL)[None, :], mask=valid[:, None], other=0)
    byte = tl.load(base8 + scale_row[:, None] + (group + COL // GROUP)[None, :], mask=valid[:, None], other=0)
    scale = (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    value = q.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    scaled = tl.reshape(value, [N, W // GROUP, GROUP]) * scale[:, :, None]
    return tl.reshape(scaled, [N, W]).to(tl.bfloat16)


@triton.jit
def load_fp8_fp32(base8, base32, row, valid, COL: tl.constexpr, W: tl.constexpr):
    """W e4m3 columns with an fp32 scale per 128 columns (V3.2, scales at byte 512 of the entry) -> bf16 [N, W]."""
    N: tl.constexpr = row.shape[0]
    column = tl.arange(0, W)
    group = tl.arange(0, W // 128)
    start = tl.multiple_of(row, 16)
    q = tl.load(base8 + start[:, None] + (column + COL)[None, :], mask=valid[:, None], other=0)
    scale_at = tl.multiple_of(row // 4, 4) + 128 + COL // 128
    scale = tl.load(base32 + scale_at[:, None] + group[None, :], mask=valid[:, None], other=0.0)
    value = q.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    scaled = tl.reshape(value, [N, W // 128, 128]) * scale[:, :, None]
    return tl.reshape(scaled, [N, W]).to(tl.bfloat16)


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
def load_fp4(base8, row, scale_row, valid, COL: tl.constexpr, W: tl.constexpr):
    """W e2m1 columns with an e4m3 scale per 16 columns -> bf16 [N, W] (exact)."""
    N: tl.constexpr = row.shape[0]
    column = tl.arange(0, W // 2)
    group = tl.arange(0, W // 16)
    start = tl.multiple_of(row, 16)
    packed = tl.load(base8 + start[:, None] + (column + COL // 2)[None, :], mask=valid[:, None], other=0)
    byte = tl.load(base8 + scale_row[:, None] + (group + COL // 16)[None, :], mask=valid[:, None], other=0)
    scale = (byte.to(tl.float8e4nv, bitcast=True).to(tl.float32) * 16384.0)[:, :, None]
    even, odd = decode_e2m1(packed)
    even = (tl.reshape(even, [N, W // 16, 8]) * scale).to(tl.bfloat16)
    odd = (tl.reshape(odd, [N, W // 16, 8]) * scale).to(tl.bfloat16)
    return tl.reshape(tl.join(even, odd), [N, W])


@triton.jit
def load_latent(
    base8, base16, base32, row, scale_row, valid, COL: tl.constexpr, W: tl.constexpr, LAYOUT: tl.constexpr, ROPE: tl.constexpr
):
    """Columns COL .. COL + W of the entries at row [N] -> bf16 [N, W]. ROPE marks the last 64 columns."""
    # One chain to the end: Triton compiles what follows a constexpr `return`.
    if LAYOUT == 0:
        return load_bf16(base16, row, valid, COL * 2, W)
    elif LAYOUT == 1:
        return load_fp8(base8, row, scale_row, valid, COL, W, 32)
    elif LAYOUT == 2:
        return load_fp4(base8, row, scale_row, valid, COL, W)
    elif LAYOUT == 3 and not ROPE:
        return load_fp8(base8, row, scale_row, valid, COL, W, 64)
    elif LAYOUT == 3:
        return load_bf16(base16, row, valid, 448, W)
    elif ROPE:
        return load_bf16(base16, row, valid, 528, W)
    else:
        return load_fp8_fp32(base8, base32, row, valid, COL, W)


@triton.jit
def attend(
    q0, q1, q2, q3, top, total, acc0, acc1, acc2, acc3,
    base8, base16, base32, row, scale_row, visible, present, scale,
    LAYOUT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of N keys. q_i [M, W_i] bf16; top, total [M]; acc_i [M, W_i] fp32; visible [M or 1, N], present [N].

    WIDE: D = 576, chunks 256 | 256 | rope (q2, acc2, acc3 unused); else D = 512, chunks 256 | 128 | 64 | rope.
    """
    M: tl.constexpr = q0.shape[0]
    N: tl.constexpr = row.shape[0]
    k0 = load_latent(base8, base16, base32, row, scale_row, present, 0, 256, LAYOUT, False)
    if WIDE:
        k1 = load_latent(base8, base16, base32, row, scale_row, present, 256, 256, LAYOUT, False)
        k3 = load_latent(base8, base16, base32, row, scale_row, present, 512, 64, LAYOUT, True)
    else:
        k1 = load_latent(base8, base16, base32, row, scale_row, present, 256, 128, LAYOUT, False)
        k2 = load_latent(base8, base16, base32, row, scale_row, present, 384, 64, LAYOUT, False)
        k3 = load_latent(base8, base16, base32, row, scale_row, present, 448, 64, LAYOUT, True)
    score = dot(q0, tl.trans(k0), tl.zeros([M, N], tl.float32))
    score = dot(q1, tl.trans(k1), score)
    if not WIDE:
        score = dot(q2, tl.trans(k2), score)
    score = dot(q3, tl.trans(k3), score)
    score = tl.where(visible, score * scale, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    decay = tl.exp2(top - new_top)
    weight = tl.exp2(score - new_top[:, None])
    total = total * decay + tl.sum(weight, 1)
    weight = weight.to(tl.bfloat16)
    acc0 = dot(weight, k0, acc0 * decay[:, None])
    acc1 = dot(weight, k1, acc1 * decay[:, None])
    if not WIDE:
        acc2 = dot(weight, k2, acc2 * decay[:, None])
        acc3 = dot(weight, k3, acc3 * decay[:, None])
    return new_top, total, acc0, acc1, acc2, acc3


@triton.jit
def rotate(x, cos, sin, INVERSE: tl.constexpr):
    """Interleaved RoPE of x [M, 64] fp32 by cos, sin [32] or [M, 32]; INVERSE rotates by the conjugate."""
    M: tl.constexpr = x.shape[0]
    R: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(x, [M, R // 2, 2]))
    if INVERSE:
        sin = -sin
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [M, R])
