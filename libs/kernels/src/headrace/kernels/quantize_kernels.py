"""Quantisers as kernels: the formats of `quantize`, bit for bit, over rows of activations.

One program takes a run of groups: load, maximum, scale, round, store. Scales may be written in any strides, so that a
product that wants them column-major gets them so without a transpose.
"""

import torch

from headrace.kernels import quantize
from headrace.kernels._triton import cdiv, tl, to_e4m3, triton

# name: (id, elements per scale, dtype of values, dtype of scales, values per byte)
FORMATS = {
    "fp8_ue8m0": (0, 32, torch.float8_e4m3fn, torch.uint8, 1),
    "fp8_fp32": (1, 128, torch.float8_e4m3fn, torch.float32, 1),
    "fp4_e4m3": (2, 16, torch.uint8, torch.float8_e4m3fn, 2),
    "fp4_ue8m0": (3, 32, torch.uint8, torch.uint8, 2),
}
_REFERENCES = {
    "fp8_ue8m0": quantize.quantize_fp8_ue8m0,
    "fp8_fp32": quantize.quantize_fp8,
    "fp4_e4m3": quantize.quantize_fp4_e4m3,
    "fp4_ue8m0": quantize.quantize_fp4_ue8m0,
}


def quantize_rows_reference(x: torch.Tensor, name: str, group: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, D] -> (values, scales [R, D / group]) of the named format."""
    return _REFERENCES[name](x, group or FORMATS[name][1])


def quantize_rows(
    x: torch.Tensor, name: str, group: int | None = None, column_major_scales: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x bf16 or fp32 [R, D], contiguous -> (values [R, D] or packed [R, D / 2], scales [R, D / group])."""
    kind, default, value_type, scale_type, packing = FORMATS[name]
    group = group or default
    rows, dim = x.shape
    if dim % group or not x.is_contiguous():
        raise ValueError(f"x [{rows}, {dim}] must be contiguous with columns a multiple of the group of {group}")
    values = torch.empty(rows, dim // packing, dtype=value_type, device=x.device)
    shape = (dim // group, rows) if column_major_scales else (rows, dim // group)
    scales = torch.empty(shape, dtype=scale_type, device=x.device)
    scales = scales.T if column_major_scales else scales
    count = rows * (dim // group)
    if count:
        block = max(1, 4096 // group)
        _quantize_kernel[(cdiv(count, block),)](
            x, values.view(torch.uint8) if packing == 2 else values,
            scales.view(torch.uint8) if scale_type != torch.float32 else scales, count, dim // group,
            scales.stride(0), scales.stride(1), KIND=kind, GROUP=group, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return values, scales


@triton.jit
def _quantize_kernel(
    x_ptr, value_ptr, scale_ptr, count, groups, stride_r, stride_g,
    KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = index < count
    at = index[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + at, mask=live[:, None], other=0.0).to(tl.float32)
    scale_at = scale_ptr + (index // groups) * stride_r + (index % groups) * stride_g
    if KIND < 2:
        value, scale = encode_fp8(x, KIND)
        tl.store(value_ptr + at, value, mask=live[:, None])
        tl.store(scale_at, scale, mask=live)
    else:
        value, scale = encode_fp4(x, KIND)
        packed_at = index[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        tl.store(value_ptr + packed_at, value, mask=live[:, None])
        tl.store(scale_at, scale, mask=live)


@triton.jit
def encode_fp8(x, KIND: tl.constexpr):
    """x fp32 [G, E] -> (e4m3 [G, E], scale [G]: UE8M0 byte (KIND 0) or fp32 (KIND 1))."""
    amax = tl.maximum(tl.max(tl.abs(x), 1), 1e-4)
    if KIND == 0:
        byte = ceil_ue8m0(amax * (1 / 448))
        scaled = x * inverse_ue8m0(byte)[:, None]
        scale = byte.to(tl.uint8)
    else:
        scale = amax * (1 / 448)
        scaled = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    return to_e4m3(tl.minimum(tl.maximum(scaled, -448.0), 448.0)), scale


@triton.jit
def encode_fp4(x, KIND: tl.constexpr):
    """x fp32 [G, E] -> (packed uint8 [G, E / 2], scale byte [G]: e4m3 (KIND 2) or UE8M0 (KIND 3))."""
    G: tl.constexpr = x.shape[0]
    E: tl.constexpr = x.shape[1]
    amax = tl.max(tl.abs(x), 1)
    if KIND == 2:
        amax = tl.maximum(amax, 6.0 * 0.001953125)
        wanted = tl.minimum(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)), 448.0)
        rounded = to_e4m3(wanted)
        scaled = tl.div_rn(x, tl.broadcast_to(rounded.to(tl.float32)[:, None], x.shape))
        scale = rounded.to(tl.uint8, bitcast=True)
    else:
        amax = tl.maximum(amax, 7.052966104933725e-38)  # 6 * 2^-126
        byte = ceil_ue8m0(amax * (1 / 6))
        scaled = x * inverse_ue8m0(byte)[:, None]
        scale = byte.to(tl.uint8)
    magnitude = tl.minimum(tl.abs(scaled), 6.0)
    # On each binade the levels are evenly spaced: codes are half-even roundings of the scaled magnitude.
    code = tl.where(
        magnitude < 2,
        round_half_even(magnitude * 2),
        tl.where(magnitude < 4, round_half_even(magnitude) + 2, round_half_even(magnitude * 0.5) + 4),
    )
    sign = (scaled.to(tl.int32, bitcast=True) >> 28) & 8
    low, high = tl.split(tl.reshape(code.to(tl.int32) | sign, [G, E // 2, 2]))
    return (low | (high << 4)).to(tl.uint8), scale


@triton.jit
def round_half_even(x):
    """x fp32 in [0, 2^22) to the nearest integer, ties to even: adding 1.5 * 2^23 leaves no fraction bits."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def ceil_ue8m0(value):
    """Positive normal fp32 -> int32 byte of the smallest power of two not below it."""
    return (value.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23


@triton.jit
def inverse_ue8m0(byte):
    """int32 byte b in 1..253 -> fp32 2^(127 - b)."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)
