"""Quantisers as kernels: the formats of `quantize`, bit for bit, over rows of activations.

One program takes a run of groups: load, maximum, scale, round, store. Scales may be written in any strides, so that a
product that wants them column-major gets them so without a transpose.
"""

import torch

from headrace.kernels import quantize, tuning
from headrace.kernels._triton import _INTERPRETED, cdiv, round_e4m3, tl, to_e4m3, triton

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
        config = tuning.quantise(name)
        block = max(1, config["ELEMENTS"] // group)
        _quantize_kernel[(cdiv(count, block),)](
            x, values.view(torch.int32 if config["FORM"] else torch.uint8) if packing == 2 else values,
            scales.view(torch.uint8) if scale_type != torch.float32 else scales, count, dim // group,
            scales.stride(0), scales.stride(1), KIND=kind, GROUP=group, BLOCK=block, FLAT=not column_major_scales,
            FORM=config["FORM"], num_warps=config["num_warps"],
        )  # fmt: skip
    return values, scales


@triton.jit
def _quantize_kernel(
    x_ptr, value_ptr, scale_ptr, count, groups, stride_r, stride_g,
    KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    live = index < count - first
    at = index[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + first * GROUP + at, mask=live[:, None], other=0.0).to(tl.float32)
    if FLAT:
        scale_at = scale_ptr + first + index
    else:
        scale_at = scale_ptr + ((first + index) // groups) * stride_r + ((first + index) % groups) * stride_g
    value_ptr += first * GROUP // (1 if KIND < 2 else 8 if FORM == 1 else 2)
    if KIND < 2:
        value, scale = encode_fp8(x, KIND, FORM)
        tl.store(value_ptr + at, value, mask=live[:, None])
        tl.store(scale_at, scale, mask=live)
    else:
        value, scale = encode_fp4(x, KIND, FORM)
        if FORM == 1:  # words of four bytes
            value = _joined(_joined(value.to(tl.int32), 8), 16)
        packed_at = index[:, None] * value.shape[1] + tl.arange(0, value.shape[1])[None, :]
        tl.store(value_ptr + packed_at, value, mask=live[:, None])
        tl.store(scale_at, scale, mask=live)


@triton.jit
def encode_fp8(x, KIND: tl.constexpr, FORM: tl.constexpr = 0):
    """x fp32 [G, E] -> (e4m3 [G, E], scale [G]: UE8M0 byte (KIND 0) or fp32 (KIND 1))."""
    amax = tl.maximum(tl.max(tl.abs(x), 1), 1e-4)
    if KIND == 0:
        byte = ceil_ue8m0(amax * (1 / 448))
        scaled = x * inverse_ue8m0(byte)[:, None]
        scale = byte.to(tl.uint8)
    else:
        scale = amax * (1 / 448)
        if FORM == 1:
            scaled = quotient(x, scale[:, None], tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None])
        else:
            scaled = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    return to_e4m3(tl.minimum(tl.maximum(scaled, -448.0), 448.0)), scale


@triton.jit
def encode_fp4(x, KIND: tl.constexpr, FORM: tl.constexpr = 0):
    """x fp32 [G, E] -> (packed uint8 [G, E / 2], scale byte [G]: e4m3 (KIND 2) or UE8M0 (KIND 3))."""
    G: tl.constexpr = x.shape[0]
    E: tl.constexpr = x.shape[1]
    amax = tl.max(tl.abs(x), 1)
    if KIND == 2:
        amax = tl.maximum(amax, 6.0 * 0.001953125)
        six = tl.full(amax.shape, 6.0, tl.float32)
        wanted = quotient(amax, six, tl.full(amax.shape, 1 / 6, tl.float32)) if FORM == 1 else tl.div_rn(amax, six)
        divisor = round_e4m3(tl.minimum(wanted, 448.0))
        if FORM == 1:  # one step from a guess rounds the reciprocal of four bits right
            guess = 1 / divisor
            reciprocal = tl.fma(tl.fma(-guess, divisor, 1.0), guess, guess)
            scaled = quotient(x, divisor[:, None], reciprocal[:, None])
        else:
            scaled = tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))
        scale = to_e4m3(divisor).to(tl.uint8, bitcast=True)
    else:
        amax = tl.maximum(amax, 7.052966104933725e-38)  # 6 * 2^-126
        byte = ceil_ue8m0(amax * (1 / 6))
        scaled = x * inverse_ue8m0(byte)[:, None]
        scale = byte.to(tl.uint8)
    if FORM == 1 and KIND == 2:
        scaled = tl.minimum(tl.maximum(scaled, -6.0), 6.0)
    magnitude = tl.abs(scaled)
    if FORM == 0:
        magnitude = tl.minimum(magnitude, 6.0)
    # On each binade the levels are evenly spaced: codes are half-even roundings of the scaled magnitude.
    if FORM == 1:
        # 1.5 * 2^22 times the binade's power of two (at least 1) has its spacing as last bit, so that the sum's last bits
        # count steps; codes count two steps more for each binade, which the addend holds already.
        power = tl.maximum(scaled.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
        addend = power + (power >> 22) + (0x0B400000 - 254)
        code = (magnitude + addend.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) & 7
    else:
        code = tl.where(
            magnitude < 2,
            round_half_even(magnitude * 2),
            tl.where(magnitude < 4, round_half_even(magnitude) + 2, round_half_even(magnitude * 0.5) + 4),
        ).to(tl.int32)
    sign = (scaled.to(tl.int32, bitcast=True) >> 28) & 8
    low, high = tl.split(tl.reshape(code | sign, [G, E // 2, 2]))
    return (low | (high << 4)).to(tl.uint8), scale


@triton.jit
def _joined(x, BITS: tl.constexpr):
    """int32 [G, 2 N] -> [G, N]: neighbours of so many bits in one, the first lowest."""
    low, high = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return low | (high << BITS)


@triton.jit
def quotient(x, divisor, reciprocal):
    """x / divisor, rounded as a division rounds, from the rounded reciprocal: the remainder of the first guess settles the
    last bit (Markstein 1990). Away from overflow and subnormal results."""
    if _INTERPRETED:  # its fma rounds twice
        return tl.div_rn(x, tl.broadcast_to(divisor, x.shape))
    else:
        guess = x * reciprocal
        return tl.fma(tl.fma(-guess, tl.broadcast_to(divisor, x.shape), x), tl.broadcast_to(reciprocal, x.shape), guess)


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
