"""Rotary position embedding on the last columns of vectors, adjacent pairs (2i, 2i + 1), in place.

DeepSeek's layout is [nope | rope]; in V4 and V4.1 K and V are one vector, so outputs are rotated back by the conjugate
(`inverse`). cos and sin are computed by the caller (theta, YaRN and positions are the model's business).
"""

import torch

from headrace.kernels import quantize, tuning
from headrace.kernels._triton import cdiv, tl, to_bf16, triton
from headrace.kernels.quantize_kernels import ceil_ue8m0, inverse_ue8m0, round_half_even


def rope_tables(positions: torch.Tensor, inverse_frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """positions int [T], inverse_frequencies fp32 [R / 2] -> (cos, sin) fp32 [T, R / 2]; angles are fp32 products."""
    angle = positions.float().unsqueeze(-1) * inverse_frequencies
    return angle.cos(), angle.sin()


def rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """x [T, H, D] of any dtype, cos, sin [T, R / 2] -> rotated copy: the last R columns of every head."""
    size = 2 * cos.shape[-1]
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    even, odd = x[..., -size:].to(kind).unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos.to(kind).unsqueeze(1), sin.to(kind).unsqueeze(1) * (-1 if inverse else 1)
    tail = torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2).to(x.dtype)
    return torch.cat([x[..., :-size], tail], -1)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotate x bf16 [T, H, D] in place (any strides of T and H); cos, sin fp32 [T, R / 2], R a power of two. Returns x."""
    rows, heads, dim = x.shape
    size = 2 * cos.shape[-1]
    if x.stride(-1) != 1 or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("rope needs contiguous columns of x and contiguous tables")
    if rows:
        config = tuning.rope(heads)
        block = config["BLOCK_H"]
        _rope_kernel[(rows, cdiv(heads, block))](
            x, cos, sin, heads, x.stride(0), x.stride(1), dim - size, HALF=size // 2, INVERSE=inverse, BLOCK_H=block,
            num_warps=config["num_warps"],
        )
    return x


@triton.jit
def rotated(even, odd, cos, sin):
    """The pair, turned. What is fused is said: of two products in a sum a compiler rounds one, and not the same everywhere."""
    return tl.fma(even, cos, odd * -sin), tl.fma(even, sin, odd * cos)


@triton.jit
def _rope_kernel(
    x_ptr, cos_ptr, sin_ptr, heads, stride_t, stride_h, begin,
    HALF: tl.constexpr, INVERSE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    pair = tl.arange(0, HALF)
    cos = tl.load(cos_ptr + row * HALF + pair)[None, :]
    sin = tl.load(sin_ptr + row * HALF + pair)[None, :]
    if INVERSE:
        sin = -sin
    at = x_ptr + row * stride_t + head[:, None] * stride_h + begin + tl.arange(0, 2 * HALF)[None, :]
    live = (head < heads)[:, None]
    even, odd = tl.split(tl.reshape(tl.load(at, mask=live, other=0.0).to(tl.float32), [BLOCK_H, HALF, 2]))
    even, odd = rotated(even, odd, cos, sin)
    turned = tl.reshape(tl.join(even, odd), [BLOCK_H, 2 * HALF])
    tl.store(at, turned.to(tl.bfloat16), mask=live)


def rope_fp4_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x bf16 [T, H, D] -> bf16: rotated, then rounded to what `quantize_fp4_ue8m0` keeps of each 32 columns."""
    return quantize.round_fp4_ue8m0(rope_reference(x, cos, sin)).to(x.dtype)


def rope_fp4(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As `rope_fp4_reference` in one launch, in place: index queries. x contiguous, D a power of two of at least 64."""
    rows, heads, dim = x.shape
    if dim & (dim - 1) or dim < 64 or not (x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(f"rope_fp4 needs contiguous vectors of a power of two of columns and contiguous tables, got {dim}")
    if rows:
        block = min(16, heads & -heads)
        _rope_fp4_kernel[(rows, heads // block)](
            x, cos, sin, heads, D=dim, HALF=cos.shape[-1], BLOCK_H=block, num_warps=1 if block * dim < 2048 else 4
        )
    return x


@triton.jit
def _rope_fp4_kernel(x_ptr, cos_ptr, sin_ptr, heads, D: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    at = x_ptr + (row * heads + head)[:, None] * D + tl.arange(0, D)[None, :]
    x = tl.load(at).to(tl.float32)
    pair = tl.arange(0, D // 2) - (D // 2 - HALF)
    turned = pair >= 0
    cos = tl.load(cos_ptr + row * HALF + pair, mask=turned, other=1.0)[None, :]
    sin = tl.load(sin_ptr + row * HALF + pair, mask=turned, other=0.0)[None, :]
    even, odd = tl.split(tl.reshape(x, [BLOCK_H, D // 2, 2]))
    even, odd = rotated(even, odd, cos, sin)
    x = tl.reshape(tl.join(even, odd), [BLOCK_H * D // 32, 32])
    x = to_bf16(x).to(tl.float32)
    byte = ceil_ue8m0(tl.maximum(tl.max(tl.abs(x), 1), 7.052966104933725e-38) * (1 / 6))[:, None]  # at least 6 * 2^-126
    scaled = x * inverse_ue8m0(byte)
    size = tl.minimum(tl.abs(scaled), 6.0)
    even_steps = tl.where(size < 4, round_half_even(size), round_half_even(size * 0.5) * 2)
    size = tl.where(size < 2, round_half_even(size * 2) * 0.5, even_steps)
    value = tl.where(scaled < 0, -size, size) * (byte << 23).to(tl.float32, bitcast=True)
    tl.store(at, tl.reshape(value, [BLOCK_H, D]).to(tl.bfloat16))
