"""Manifold-constrained hyper-connections, single pass: mix, collapse, expand over four residual streams, fused.

X [T, 4, D] are the streams. A sublayer's coefficients come from its input: m = (fn x) / rms(x), x = flatten(X), then
    pre = sigmoid(z[0:4]) + eps     post = 2 sigmoid(z[4:8])     z = base + m * scale (one scale per part)
    comb = softmax rows of z[8:24] as 4x4, + eps, then column and row normalised in turn (Sinkhorn)
collapse: u = sum_i pre_i X_i.  expand: X'_k = post_k o + sum_j comb[j, k] X_j. All in fp32, rounded to bf16 once.
`mhc_pass` does expand, collapse and the projection for the next mix in one reading of X. Source: DeepSeek-V4.1 release.
"""

from typing import NamedTuple

import torch

from headrace.kernels import tuning
from headrace.kernels._triton import cdiv, dot, next_power_of_2, processor_count, tl, to_bf16, triton
from headrace.kernels.routing import combine_reference

STREAMS = 4
COEFFICIENTS = 24


def mhc_coefficients_reference(
    x: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, rms_eps: float, eps: float, iterations: int = 20
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, 4, D], fn fp32 [24, 4 D], base fp32 [24], scale fp32 [3] -> pre, post fp32 [T, 4], comb fp32 [T, 4, 4]."""
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    flat = x.flatten(1).to(kind)
    m = (flat @ fn.to(kind).T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    z = base.to(kind) + m * scale.to(kind).repeat_interleave(torch.tensor([4, 4, 16], device=x.device))
    comb = torch.softmax(z[:, 8:].unflatten(-1, (4, 4)), -1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return torch.sigmoid(z[:, :4]) + eps, 2 * torch.sigmoid(z[:, 4:8]), comb


def collapse_reference(x: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """x [T, 4, D], pre fp32 [T, 4] -> [T, D] bf16."""
    return (pre.unsqueeze(-1) * x.float()).sum(1).to(torch.bfloat16)


def expand_reference(o: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """o [T, D], x [T, 4, D], post fp32 [T, 4], comb fp32 [T, 4, 4] -> [T, 4, D] bf16."""
    mixed = torch.einsum("tjk,tjd->tkd", comb, x.float())
    return (post.unsqueeze(-1) * o.float().unsqueeze(1) + mixed).to(torch.bfloat16)


class Routed(NamedTuple):
    """What `routing.combine` takes: y bf16 [rows, D], row_of_choice int32 [T, k], shared bf16 [T, D]."""

    y: torch.Tensor
    row_of_choice: torch.Tensor
    shared: torch.Tensor


def combined_reference(o: Routed) -> torch.Tensor:
    """bf16 [T, D]."""
    return combine_reference(o.y, o.row_of_choice, None, o.shared)


def whole_reference(o: torch.Tensor) -> torch.Tensor:
    """bf16 [T, D], or parts of it fp32 [parts, T, D] -> bf16 [T, D]."""
    return sum(o).to(torch.bfloat16) if o.dim() == 3 else o


def split_projection(fn: torch.Tensor) -> torch.Tensor:
    """fn fp32 [24, 4 D] -> bf16 [48, 4 D]: fn rounded, then what is left of it, rounded; together 16 bits of each weight."""
    high = fn.to(torch.bfloat16)
    return torch.cat([high, (fn - high.float()).to(torch.bfloat16)])


def mhc_pass(
    x: torch.Tensor,
    expand: tuple[torch.Tensor | Routed, torch.Tensor, torch.Tensor] | None = None,
    pre: torch.Tensor | None = None,
    fn: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """One reading of x bf16 [T, 4, D]. expand = (o bf16 [T, D], post, comb): x becomes the expanded streams first;
    a `Routed` o is combined on the way, bit for bit as `routing.combine` does it. o may come in parts, fp32 [parts, T, D]
    (`gemm_upcast`), whose sum in this order is rounded to bf16.

    fn bf16 [48, 4 D] from `split_projection`, made once at load; an fp32 [24, 4 D] is split in every call. Returns (streams:
    x itself without expand, u = collapse with pre or None, parts fp32 [splits, T, 64] for `mhc_coefficients` with fn or None).
    D is a multiple of 64.
    `batch_invariant`: the projection is cut into as many parts for any T, so that a row's sum has one order.
    """
    tokens, streams, dim = x.shape
    if streams != STREAMS or dim % 64:
        raise ValueError(f"mHC needs {STREAMS} streams of a multiple of 64 columns, got {streams} of {dim}")
    x = x.contiguous()
    out = torch.empty_like(x) if expand is not None else x
    u = torch.empty(tokens, dim, dtype=torch.bfloat16, device=x.device) if pre is not None else None
    fn = split_projection(fn) if fn is not None and fn.dtype == torch.float32 else fn
    config = tuning.mhc(tokens, batch_invariant)
    block = config["BLOCK_D"]
    rows, chunks = cdiv(tokens, config["BLOCK_T"]), dim // block
    splits = config["SPLITS"] or max(1, config["WAVES"] * processor_count() // max(rows, 1))
    per_split = cdiv(chunks, min(splits, chunks))
    splits = cdiv(chunks, per_split)
    parts = torch.empty(splits, tokens, 64, dtype=torch.float32, device=x.device) if fn is not None else None
    o, post, comb = expand if expand is not None else (x[:, 0], x, x)
    o, choices, shared = (part.contiguous() for part in o) if isinstance(o, Routed) else (o, None, None)
    if tokens:
        _pass_kernel[(rows, splits)](
            x, o, x if choices is None else choices, x if shared is None else shared, post, comb,
            x if pre is None else pre, x if fn is None else fn, out, x if u is None else u, x if parts is None else parts,
            tokens, dim, chunks, per_split, TOP_K=0 if choices is None else choices.shape[1],
            PARTS=o.shape[0] if o.dim() == 3 else 0, EXPAND=expand is not None, COLLAPSE=pre is not None, MIX=fn is not None,
            BLOCK_T=config["BLOCK_T"], BLOCK_D=block, STAGES=config["STAGES"], num_warps=config["num_warps"],
        )  # fmt: skip
    return out, u, parts


def mhc_coefficients(
    parts: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, dim: int, rms_eps: float, eps: float, iterations: int = 20
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """parts of `mhc_pass` for streams of dim columns -> pre, post fp32 [T, 4], comb fp32 [T, 4, 4]."""
    splits, tokens = parts.shape[:2]
    pre, post = (torch.empty(tokens, 4, dtype=torch.float32, device=parts.device) for _ in range(2))
    comb = torch.empty(tokens, 4, 4, dtype=torch.float32, device=parts.device)
    at_once = min(128, next_power_of_2(splits))
    block = max(1, min(8, 128 // at_once))  # by splits alone: with other layouts sums have other orders
    if tokens:
        _sinkhorn_kernel[(cdiv(tokens, block),)](
            parts, base, scale, pre, post, comb, tokens, splits, STREAMS * dim, rms_eps, eps, iterations,
            SPLITS=at_once, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return pre, post, comb


@triton.jit
def _pass_kernel(
    x_ptr, o_ptr, choice_ptr, shared_ptr, post_ptr, comb_ptr, pre_ptr, fn_ptr, out_ptr, u_ptr, part_ptr, tokens, dim, chunks,
    per_split, TOP_K: tl.constexpr, PARTS: tl.constexpr, EXPAND: tl.constexpr,
    COLLAPSE: tl.constexpr, MIX: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < tokens
    token = token.to(tl.int64)
    split = tl.program_id(1)
    coefficient = tl.arange(0, 64)
    acc = tl.zeros([64, BLOCK_T], tl.float32)  # transposed: 64 rows of coefficients fill the matrix unit's height
    squares = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    mask = live[:, None]
    if EXPAND:
        b0, a00, a10, a20, a30 = _column(post_ptr, comb_ptr, token, live, 0)
        b1, a01, a11, a21, a31 = _column(post_ptr, comb_ptr, token, live, 1)
        b2, a02, a12, a22, a32 = _column(post_ptr, comb_ptr, token, live, 2)
        b3, a03, a13, a23, a33 = _column(post_ptr, comb_ptr, token, live, 3)
    if COLLAPSE:
        p0 = tl.load(pre_ptr + token * 4, mask=live, other=0.0)[:, None]
        p1 = tl.load(pre_ptr + token * 4 + 1, mask=live, other=0.0)[:, None]
        p2 = tl.load(pre_ptr + token * 4 + 2, mask=live, other=0.0)[:, None]
        p3 = tl.load(pre_ptr + token * 4 + 3, mask=live, other=0.0)[:, None]
    for chunk in tl.range(split * per_split, tl.minimum((split + 1) * per_split, chunks), num_stages=STAGES):
        column = chunk * BLOCK_D + tl.arange(0, BLOCK_D)
        at = (token * 4 * dim)[:, None] + column[None, :]
        y0 = tl.load(x_ptr + at, mask=mask, other=0.0)
        y1 = tl.load(x_ptr + at + dim, mask=mask, other=0.0)
        y2 = tl.load(x_ptr + at + 2 * dim, mask=mask, other=0.0)
        y3 = tl.load(x_ptr + at + 3 * dim, mask=mask, other=0.0)
        if MIX:
            f = fn_ptr + coefficient[:, None] * (4 * dim) + column[None, :]
            real = (coefficient < 48)[:, None]
            f0 = tl.load(f, mask=real, other=0.0)
            f1 = tl.load(f + dim, mask=real, other=0.0)
            f2 = tl.load(f + 2 * dim, mask=real, other=0.0)
            f3 = tl.load(f + 3 * dim, mask=real, other=0.0)
        if EXPAND:
            if TOP_K:
                o = _combined(o_ptr, choice_ptr, shared_ptr, token, live, column, dim, TOP_K)
            else:
                o = _whole(o_ptr, token, live, column, tokens, dim, PARTS)
            x0, x1, x2, x3 = y0.to(tl.float32), y1.to(tl.float32), y2.to(tl.float32), y3.to(tl.float32)
            y0 = to_bf16(tl.fma(b0, o, _weighed(a00, x0, a10, x1, a20, x2, a30, x3)))
            y1 = to_bf16(tl.fma(b1, o, _weighed(a01, x0, a11, x1, a21, x2, a31, x3)))
            y2 = to_bf16(tl.fma(b2, o, _weighed(a02, x0, a12, x1, a22, x2, a32, x3)))
            y3 = to_bf16(tl.fma(b3, o, _weighed(a03, x0, a13, x1, a23, x2, a33, x3)))
            tl.store(out_ptr + at, y0, mask=mask)
            tl.store(out_ptr + at + dim, y1, mask=mask)
            tl.store(out_ptr + at + 2 * dim, y2, mask=mask)
            tl.store(out_ptr + at + 3 * dim, y3, mask=mask)
        x0, x1, x2, x3 = y0.to(tl.float32), y1.to(tl.float32), y2.to(tl.float32), y3.to(tl.float32)
        if COLLAPSE:
            u = _weighed(p0, x0, p1, x1, p2, x2, p3, x3)
            tl.store(u_ptr + (token * dim)[:, None] + column[None, :], to_bf16(u), mask=mask)
        if MIX:
            acc = dot(f0, tl.trans(y0), acc)
            acc = dot(f1, tl.trans(y1), acc)
            acc = dot(f2, tl.trans(y2), acc)
            acc = dot(f3, tl.trans(y3), acc)
            squares += _weighed(x0, x0, x1, x1, x2, x2, x3, x3)
    if MIX:
        row = part_ptr + (split.to(tl.int64) * tokens + token)[None, :] * 64 + coefficient[:, None]
        total = tl.sum(squares, 1)
        tl.store(row, tl.where((coefficient == 48)[:, None], total[None, :], acc), mask=live[None, :])


@triton.jit
def _weighed(a0, x0, a1, x1, a2, x2, a3, x3):
    """a0 x0 + .. + a3 x3, from behind. What is fused is said, so that every form of the pass rounds alike."""
    return tl.fma(a0, x0, tl.fma(a1, x1, tl.fma(a2, x2, a3 * x3)))


@triton.jit
def _combined(y_ptr, choice_ptr, shared_ptr, token, live, column, dim, TOP_K: tl.constexpr):
    """As `routing.combine`, in its order and with its roundings, as fp32."""
    total = tl.zeros([token.shape[0], column.shape[0]], tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(choice_ptr + token * TOP_K + k, mask=live, other=-1).to(tl.int64)
        at = y_ptr + (row * dim)[:, None] + column[None, :]
        total += tl.load(at, mask=(row >= 0)[:, None], other=0.0).to(tl.float32)
    shared = tl.load(shared_ptr + (token * dim)[:, None] + column[None, :], mask=live[:, None], other=0.0)
    return to_bf16(to_bf16(total).to(tl.float32) + shared.to(tl.float32)).to(tl.float32)


@triton.jit
def _whole(ptr, token, live, column, tokens, dim, PARTS: tl.constexpr):
    """bf16 [tokens, dim], or PARTS fp32 parts whose sum is rounded to it, at rows `token` and `column`, as fp32."""
    at = ptr + (token * dim)[:, None] + column[None, :]
    if PARTS:
        total = tl.zeros([token.shape[0], column.shape[0]], tl.float32)
        stride = tl.cast(tokens, tl.int64) * dim
        for part in tl.range(0, PARTS, 2, loop_unroll_factor=1):  # two at once; with more, fewer programs fit a processor
            total += tl.load(at, mask=live[:, None], other=0.0)
            total += tl.load(at + stride, mask=(part + 1 < PARTS) & live[:, None], other=0.0)
            at += 2 * stride
        value = to_bf16(total).to(tl.float32)
    else:
        value = tl.load(at, mask=live[:, None], other=0.0).to(tl.float32)
    return value


@triton.jit
def _column(post_ptr, comb_ptr, token, live, K: tl.constexpr):
    """What goes into stream K: post_K and comb[0..3, K], each fp32 [T, 1]."""
    c = comb_ptr + token * 16 + K
    return (
        tl.load(post_ptr + token * 4 + K, mask=live, other=0.0)[:, None],
        tl.load(c, mask=live, other=0.0)[:, None],
        tl.load(c + 4, mask=live, other=0.0)[:, None],
        tl.load(c + 8, mask=live, other=0.0)[:, None],
        tl.load(c + 12, mask=live, other=0.0)[:, None],
    )


@triton.jit
def _sinkhorn_kernel(
    part_ptr, base_ptr, scale_ptr, pre_ptr, post_ptr, comb_ptr, tokens, splits, width, rms_eps, eps, iterations,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Few tokens a program: all is latency. So the parts of a sum are read at once, by all threads, and then every thread has
    whole matrices, of which 40 dependent sums and quotients need no other thread."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = token < tokens
    token = token.to(tl.int64)
    eight = tl.arange(0, 8)
    sixteen = tl.arange(0, 16)
    squares = tl.zeros([BLOCK], tl.float32)
    gates = tl.zeros([BLOCK, 8], tl.float32)
    comb = tl.zeros([BLOCK, 16], tl.float32)
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        here = (split < splits)[:, None] & live[None, :]
        row = part_ptr + (split[:, None] * tokens + token[None, :]) * 64
        square = tl.load(row + 48, mask=here, other=0.0)  # all loads before the first sum: threads wait for each other there
        row, here = row[:, :, None], here[:, :, None]
        gate, gate_low = _both(row + eight[None, None, :], here)
        cell, cell_low = _both(row + 8 + sixteen[None, None, :], here)
        squares += tl.sum(square, 0)
        gates += tl.sum(gate + gate_low, 0)
        comb += tl.sum(cell + cell_low, 0)
    norm = tl.rsqrt(squares / width + rms_eps)[:, None]
    is_pre = (eight < 4)[None, :]
    gates = tl.load(base_ptr + eight)[None, :] + gates * norm * tl.load(scale_ptr + eight // 4)[None, :]
    comb = tl.load(base_ptr + 8 + sixteen)[None, :] + comb * norm * tl.load(scale_ptr + 2)
    gates = tl.where(is_pre, 1.0, 2.0) / (1 + tl.exp(-gates)) + tl.where(is_pre, eps, 0.0)
    at = token[:, None] * 4 + eight[None, :]
    tl.store(pre_ptr + at, gates, mask=live[:, None] & is_pre)
    tl.store(post_ptr + at - 4, gates, mask=live[:, None] & (eight >= 4)[None, :])
    a, b, c, d = _quarters(comb)  # rows of the matrix
    a0, a1, a2, a3 = _softmax(a, eps)
    b0, b1, b2, b3 = _softmax(b, eps)
    c0, c1, c2, c3 = _softmax(c, eps)
    d0, d1, d2, d3 = _softmax(d, eps)
    for turn in range(iterations):
        if turn > 0:
            a0, a1, a2, a3 = _normalised(a0, a1, a2, a3, eps)
            b0, b1, b2, b3 = _normalised(b0, b1, b2, b3, eps)
            c0, c1, c2, c3 = _normalised(c0, c1, c2, c3, eps)
            d0, d1, d2, d3 = _normalised(d0, d1, d2, d3, eps)
        a0, b0, c0, d0 = _normalised(a0, b0, c0, d0, eps)
        a1, b1, c1, d1 = _normalised(a1, b1, c1, d1, eps)
        a2, b2, c2, d2 = _normalised(a2, b2, c2, d2, eps)
        a3, b3, c3, d3 = _normalised(a3, b3, c3, d3, eps)
    _store_row(comb_ptr + token * 16, live, a0, a1, a2, a3)
    _store_row(comb_ptr + token * 16 + 4, live, b0, b1, b2, b3)
    _store_row(comb_ptr + token * 16 + 8, live, c0, c1, c2, c3)
    _store_row(comb_ptr + token * 16 + 12, live, d0, d1, d2, d3)


@triton.jit
def _both(at, mask):
    """The products with the two parts of the weight."""
    return tl.load(at, mask=mask, other=0.0), tl.load(at + 24, mask=mask, other=0.0)


@triton.jit
def _quarters(x):
    """[T, 4 N] -> four [T, N], in order."""
    T: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1] // 4
    even, odd = tl.split(tl.permute(tl.reshape(x, [T, 2, 2, N]), (0, 1, 3, 2)))  # [T, 2, N]
    first, third = tl.split(tl.permute(even, (0, 2, 1)))
    second, fourth = tl.split(tl.permute(odd, (0, 2, 1)))
    return first, second, third, fourth


@triton.jit
def _softmax(row, eps):
    """[T, 4] -> its softmax, plus eps, as four [T]."""
    w, x, y, z = _quarters(row)
    w, x, y, z = tl.ravel(w), tl.ravel(x), tl.ravel(y), tl.ravel(z)
    top = tl.maximum(tl.maximum(w, x), tl.maximum(y, z))
    w, x, y, z = tl.exp(w - top), tl.exp(x - top), tl.exp(y - top), tl.exp(z - top)
    total = (w + x) + (y + z)
    return w / total + eps, x / total + eps, y / total + eps, z / total + eps


@triton.jit
def _normalised(w, x, y, z, eps):
    factor = 1 / ((w + x) + (y + z) + eps)
    return w * factor, x * factor, y * factor, z * factor


@triton.jit
def _store_row(at, live, w, x, y, z):
    tl.store(at, w, mask=live)
    tl.store(at + 1, x, mask=live)
    tl.store(at + 2, y, mask=live)
    tl.store(at + 3, z, mask=live)
