"""Number formats of weights, activations and the KV cache, as torch references.

Knows the bytes: FP8 E4M3 with power-of-two (UE8M0) or fp32 scales, FP4 E2M1 with E4M3 or UE8M0 scales, and the KV
records built from them. Does not know pools, pages or devices, and needs no Triton: these functions are the
specification of the kernels in `quantize_kernels` and `kv_store`, and they are what a CPU engine runs.

Formats (DeepSeek-V4.1 release, checked bit for bit against an independent implementation):
  UE8M0   one byte b, value 2^(b - 127). Encoders round the wanted scale UP to a power of two, on the fp32 bits.
  E2M1    sign << 3 | code, magnitudes 0 .5 1 1.5 2 3 4 6; round to nearest, ties to the even code, saturate at 6.
          Two per byte, the EVEN column in the LOW nibble.
Shapes: D is the quantised (last) dimension; a scale covers `group` consecutive elements of it.
"""

import torch

from headrace.kernels import cpu

FP8_MAX = 448.0
FP4_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MIN_SUBNORMAL = 2.0**-9

_UE8M0_VALUES = torch.exp2(torch.arange(256, dtype=torch.float64) - 127).float()
_UE8M0_VALUES[255] = float("nan")
_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


# ---------------------------------------------------------------------------------------------------------- FP8


def quantize_fp8_ue8m0(x: torch.Tensor, group: int = 32, amax_floor: float = 1e-4) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> (q float8_e4m3fn [..., D], scale uint8 [..., D / group]); scale = 2^ceil(log2(amax / 448))."""
    grouped = _grouped(x, group)
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min(amax_floor)
    scale = _ceil_ue8m0(amax * (1 / FP8_MAX))
    q = (grouped / decode_ue8m0(scale)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return q.flatten(-2), scale.squeeze(-1)


def dequantize_fp8_ue8m0(
    q: torch.Tensor, scale: torch.Tensor, group: int = 32, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """(q [..., D], scale uint8 [..., D / group]) -> [..., D]. Every product is exact in bf16 and fp32."""
    return (_grouped_view(q, group).float() * decode_ue8m0(scale).unsqueeze(-1)).flatten(-2).to(dtype)


def quantize_fp8(x: torch.Tensor, group: int = 128, amax_floor: float = 1e-4) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> (q float8_e4m3fn [..., D], scale fp32 [..., D / group]); scale = amax / 448 (V3 family)."""
    grouped = _grouped(x, group)
    scale = grouped.abs().amax(-1, keepdim=True).clamp_min(amax_floor) * (1 / FP8_MAX)
    q = (grouped / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return q.flatten(-2), scale.squeeze(-1)


def dequantize_fp8(
    q: torch.Tensor, scale: torch.Tensor, group: int = 128, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """(q [..., D], scale fp32 [..., D / group]) -> [..., D]."""
    return (_grouped_view(q, group).float() * scale.float().unsqueeze(-1)).flatten(-2).to(dtype)


# ---------------------------------------------------------------------------------------------------------- FP4


def quantize_fp4_e4m3(x: torch.Tensor, group: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> (packed uint8 [..., D / 2], scale float8_e4m3fn [..., D / group]); scale = e4m3(amax / 6)."""
    grouped = _grouped(x, group)
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min(FP4_MAX * E4M3_MIN_SUBNORMAL)
    scale = (amax / FP4_MAX).clamp_max(FP8_MAX).to(torch.float8_e4m3fn)  # the cast alone would give NaN above 464
    return _encode_e2m1(grouped / scale.float()), scale.squeeze(-1)


def dequantize_fp4_e4m3(
    packed: torch.Tensor, scale: torch.Tensor, group: int = 16, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """(packed uint8 [..., D / 2], scale e4m3 or its bytes [..., D / group]) -> [..., D]."""
    return _scale_e2m1(packed, _E4M3_VALUES, scale.view(torch.uint8), group, dtype)


def quantize_fp4_ue8m0(x: torch.Tensor, group: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> (packed uint8 [..., D / 2], scale uint8 [..., D / group]); scale = 2^ceil(log2(amax / 6))."""
    grouped = _grouped(x, group)
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min(FP4_MAX * 2.0**-126)
    scale = _ceil_ue8m0(amax * (1 / FP4_MAX))
    return _encode_e2m1(grouped / decode_ue8m0(scale)), scale.squeeze(-1)


def dequantize_fp4_ue8m0(
    packed: torch.Tensor, scale: torch.Tensor, group: int = 32, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """(packed uint8 [..., D / 2], scale uint8 [..., D / group]) -> [..., D]."""
    return _scale_e2m1(packed, _UE8M0_VALUES, scale.view(torch.uint8), group, dtype)


# ----------------------------------------------------------------------------------------------- rounding only


def round_fp8_ue8m0(x: torch.Tensor, group: int = 32, amax_floor: float = 1e-4) -> torch.Tensor:
    """What x becomes by quantize_fp8_ue8m0 and back, bit for bit, without building bytes."""
    if _has_loop(x, group):
        return _rounded(x, group, 3, 2.0**-6, FP8_MAX, amax_floor)
    grouped = _grouped(x, group)
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min_(amax_floor)
    scale = _ceil_power_of_two(amax.mul_(1 / FP8_MAX))
    return _round_minifloat(grouped / scale, 3, 2.0**-6, FP8_MAX).mul_(scale).flatten(-2).to(x.dtype)


def round_fp4_ue8m0(x: torch.Tensor, group: int = 32) -> torch.Tensor:
    """What x becomes by quantize_fp4_ue8m0 and back, bit for bit, without building bytes."""
    if _has_loop(x, group):
        return _rounded(x, group, 1, 1.0, FP4_MAX, FP4_MAX * 2.0**-126)
    grouped = _grouped(x, group)
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min_(FP4_MAX * 2.0**-126)
    scale = _ceil_power_of_two(amax.mul_(1 / FP4_MAX))
    return _round_minifloat(grouped / scale, 1, 1.0, FP4_MAX).mul_(scale).flatten(-2).to(x.dtype)


# ------------------------------------------------------------------------------------------------------ weights


def dequantize_block_fp8(
    weight: torch.Tensor, scale: torch.Tensor, block: int = 32, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """(weight float8_e4m3fn [out, in], scale [ceil(out / block), ceil(in / block)]) -> [out, in].

    `scale` is UE8M0 (float8_e8m0fnu or its bytes) or fp32: block 32 in V4.1, 128 in V4 (UE8M0) and V3 (fp32).
    """
    out_features, in_features = weight.shape
    expected = (-(-out_features // block), -(-in_features // block))
    if tuple(scale.shape) != expected:
        raise ValueError(f"scale is {tuple(scale.shape)}; weight {tuple(weight.shape)} in {block}-blocks needs {expected}")
    values = scale.float() if scale.dtype == torch.float32 else decode_ue8m0(scale.view(torch.uint8))
    # Rows of the scale are expanded once per block of rows, so no [out, in] scale matrix is ever built.
    values = values.repeat_interleave(block, dim=1)[:, :in_features]
    result = torch.empty(out_features, in_features, dtype=dtype, device=weight.device)
    whole = out_features // block * block
    blocked = weight[:whole].float().view(-1, block, in_features) * values[: whole // block].unsqueeze(1)
    result[:whole] = blocked.view(whole, in_features)
    if whole < out_features:
        result[whole:] = weight[whole:].float() * values[-1]
    return result


def dequantize_mxfp4(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Expert weight (int8 or uint8 packed [..., out, in / 2], scale UE8M0 [..., out, in / 32]) -> [..., out, in]."""
    return dequantize_fp4_ue8m0(weight.view(torch.uint8), scale.view(torch.uint8), 32, dtype)


# --------------------------------------------------------------------------------------------------- KV records


def pack_window_record(x: torch.Tensor) -> torch.Tensor:
    """Window KV [..., D] -> uint8 [..., D + D/32]: D e4m3 bytes, then D/32 UE8M0 scales (528 bytes at D = 512)."""
    q, scale = quantize_fp8_ue8m0(x, 32)
    return torch.cat([q.view(torch.uint8), scale], dim=-1)


def unpack_window_record(record: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 [..., D + D/32] -> [..., D]."""
    dim = _record_dim(record, 32, 33)
    return dequantize_fp8_ue8m0(record[..., :dim].view(torch.float8_e4m3fn), record[..., dim:], 32, dtype)


def pack_main_record(x: torch.Tensor) -> torch.Tensor:
    """Compressed KV [..., D] -> uint8 [..., D/2 + D/16]: packed E2M1, then E4M3 scales (288 bytes at D = 512)."""
    packed, scale = quantize_fp4_e4m3(x, 16)
    return torch.cat([packed, scale.view(torch.uint8)], dim=-1)


def unpack_main_record(record: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 [..., D/2 + D/16] -> [..., D]."""
    dim = _record_dim(record, 16, 9)
    return dequantize_fp4_e4m3(record[..., : dim // 2], record[..., dim // 2 :], 16, dtype)


def pack_index_record(x: torch.Tensor) -> torch.Tensor:
    """Index key [..., D] -> uint8 [..., D/2 + D/32]: packed E2M1, then UE8M0 scales (68 bytes at D = 128)."""
    packed, scale = quantize_fp4_ue8m0(x, 32)
    return torch.cat([packed, scale], dim=-1)


def unpack_index_record(record: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 [..., D/2 + D/32] -> [..., D]."""
    dim = _record_dim(record, 32, 17)
    return dequantize_fp4_ue8m0(record[..., : dim // 2], record[..., dim // 2 :], 32, dtype)


# ------------------------------------------------------------------------------------------------------ helpers


def decode_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes (uint8 or float8_e8m0fnu) of any shape -> fp32 powers of two; byte 255 is NaN."""
    return _look_up(_UE8M0_VALUES, scale.view(torch.uint8))


def _ceil_ue8m0(value: torch.Tensor) -> torch.Tensor:
    """Positive normal fp32 -> the byte of the smallest power of two not below it, exact on the bits."""
    bits = value.contiguous().view(torch.int32)
    return ((bits + 0x7FFFFF) >> 23).to(torch.uint8)


def _has_loop(x: torch.Tensor, group: int) -> bool:
    """Whether the compiled loop can round x."""
    plain = x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous() and not x.requires_grad
    return plain and x.shape[-1] % group == 0 and cpu.available()


def _rounded(x: torch.Tensor, group: int, mantissa_bits: int, smallest: float, largest: float, floor: float) -> torch.Tensor:
    from headrace.kernels.cpu.quantize import round_groups

    out = torch.empty_like(x)
    round_groups(x.view(-1).numpy(), group, mantissa_bits, smallest, largest, floor, out.view(-1).numpy())
    return out


def _ceil_power_of_two(value: torch.Tensor) -> torch.Tensor:
    """Positive normal fp32 -> the smallest power of two not below it, in place."""
    return value.view(torch.int32).add_(0x7FFFFF).bitwise_and_(0x7F800000).view(torch.float32)


def _round_minifloat(values: torch.Tensor, mantissa_bits: int, smallest_normal: float, largest: float) -> torch.Tensor:
    """Nearest value of a small float format, ties to even, saturating. On a binade [2^e, 2^(e+1)) its values lie 2^(e - bits)
    apart, and below the smallest normal as far apart as just above it."""
    magnitude = values.abs().clamp_max_(largest)
    exponent = magnitude.clamp_min(smallest_normal).view(torch.int32).bitwise_and_(0x7F800000)
    step = exponent.sub_(mantissa_bits << 23).view(torch.float32)
    return magnitude.div_(step).round_().mul_(step).copysign_(values)


def _encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """fp32 [..., groups, group] already divided by its scale -> packed uint8 [..., groups * group / 2].

    On each binade the levels are evenly spaced, so round-half-even of the scaled magnitude is round-half-even of
    the code: steps of 0.5 below 2 (codes 0-4), of 1 below 4 (codes 4-6), of 2 above (codes 6-7).
    """
    magnitude = values.abs().clamp_max_(FP4_MAX)
    code = torch.where(
        magnitude < 2,
        (magnitude * 2).round_(),
        torch.where(magnitude < 4, magnitude.round() + 2, (magnitude * 0.5).round_() + 4),
    )
    nibble = (code.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)).flatten(-2)
    return nibble[..., 0::2] | (nibble[..., 1::2] << 4)


def _scale_e2m1(
    packed: torch.Tensor, table: torch.Tensor, scale: torch.Tensor, group: int, dtype: torch.dtype
) -> torch.Tensor:
    if packed.shape[-1] * 2 != scale.shape[-1] * group:
        raise ValueError(f"{packed.shape[-1]} packed bytes need {packed.shape[-1] * 2 // group} scales, got {scale.shape[-1]}")
    values = _decode_e2m1(packed.contiguous()).float().view(*scale.shape, group)
    return values.mul_((_look_up(table, scale) * 2.0**14).unsqueeze(-1)).flatten(-2).to(dtype)


def _decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., D / 2] -> float16 [..., D] holding 2^-14 times the values.

    A code's two exponent bits and its mantissa bit, put where half precision keeps the low exponent bits and the high mantissa
    bit, are its value times 2^-14, subnormals included. Both nibbles of a byte are moved at once, as halves of an int32.
    """
    pair = packed.int()
    pair = pair.bitwise_or(pair << 12).bitwise_and_(0x000F000F)
    sign = pair.bitwise_and(0x00080008).bitwise_left_shift_(12)
    return pair.bitwise_and_(0x00070007).bitwise_left_shift_(9).bitwise_or_(sign).view(torch.float16)


def _look_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return _on(table, index.device).index_select(0, index.reshape(-1).int()).view(index.shape)


def _on(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    return table if device.type == "cpu" else table.to(device)


def _grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    return _grouped_view(x, group).float()


def _grouped_view(x: torch.Tensor, group: int) -> torch.Tensor:
    if x.shape[-1] % group:
        raise ValueError(f"last dimension {x.shape[-1]} is not a multiple of the group of {group} that shares a scale")
    return x.unflatten(-1, (-1, group))


def _record_dim(record: torch.Tensor, numerator: int, denominator: int) -> int:
    size = record.shape[-1]
    if record.dtype != torch.uint8 or size % denominator:
        raise ValueError(f"a record of {size} bytes ({record.dtype}) is not a uint8 multiple of {denominator} bytes")
    return size // denominator * numerator
