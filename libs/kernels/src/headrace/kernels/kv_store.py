"""Write KV entries straight into paged pools: [weighted pair of tokens] -> [RMSNorm] -> [RoPE] -> quantise -> record.

One fused kernel serves the window KV (norm, RoPE, FP8), the compressed KV of ratio 1 and 2 (norm, RoPE, FP4), index keys
(norm, RoPE, FP4) and the V4 and V3.2 layouts. The ratio-2 compressor weighs two adjacent tokens per channel by a softmax
over their gate scores. Absent entries (slot < 0) are skipped: a replayed row must not rewrite what is cached. Source:
DeepSeek-V4.1 release, quantisation after RoPE; index keys are projected from the latent before RoPE, which is returned.
"""

import torch

from headrace.kernels._triton import tl, to_bf16, triton
from headrace.kernels.kv_layouts import LAYOUT_IDS, PagedKV
from headrace.kernels.quantize_kernels import encode_fp4, encode_fp8
from headrace.kernels.rmsnorm import rmsnorm_reference
from headrace.kernels.rope import rope_reference, rotated


def kv_store_reference(
    x: torch.Tensor,
    kv: PagedKV,
    slots: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-20,
    rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """The specification; shapes as in `kv_store`. bf16 is rounded to where the kernel rounds: after the norm and RoPE."""
    if gate is not None:
        pair = x.float().view(-1, 2, x.shape[-1])
        x = (pair * torch.softmax(gate.float().view_as(pair), 1)).sum(1).to(torch.bfloat16)
    latent = x.to(torch.bfloat16) if weight is None else rmsnorm_reference(x, weight, eps).to(torch.bfloat16)
    rotated = latent if rope is None else rope_reference(latent.unsqueeze(1), *rope).squeeze(1)
    kv.write(slots, rotated)
    return latent


def kv_store(
    x: torch.Tensor,
    kv: PagedKV,
    slots: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-20,
    rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """x bf16 or fp32 [T, D] ([2 T, D] with gate, adjacent tokens); slots int32 or int64 [T] entry indices, -1 to skip.

    weight bf16 [D] of an RMSNorm; rope (cos, sin) fp32 [T, 32] for the last 64 columns; gate fp32 [2 T, D], the
    ratio-2 compressor's scores. Returns the latent bf16 [T, D] before RoPE. D is kv.dim.
    """
    rows = slots.numel()
    dim = kv.dim
    if x.shape != (rows * (2 if gate is not None else 1), dim):
        raise ValueError(f"x is {tuple(x.shape)}: {rows} slots need {dim} columns, and two rows a slot with a gate")
    # Rows of gates are found by the width alone: a strided view would be read as other rows.
    x = x if gate is None and x.stride(1) == 1 else x.contiguous()
    gate, slots = None if gate is None else gate.contiguous(), slots.contiguous()
    rope = None if rope is None else tuple(table.contiguous() for table in rope)
    latent = torch.empty(rows, dim, dtype=torch.bfloat16, device=x.device)
    if rows:
        cos, sin = rope if rope is not None else (latent, latent)
        _kv_store_kernel[(rows,)](
            x, gate if gate is not None else x, weight if weight is not None else x, cos, sin, slots, latent, kv.bytes,
            x.stride(0), kv.page_stride, kv.offset, kv.page_size, eps,
            LAYOUT=LAYOUT_IDS[kv.layout], D=dim, BLOCK=max(128, 1 << (dim - 1).bit_length()), HAS_GATE=gate is not None,
            HAS_NORM=weight is not None, HAS_ROPE=rope is not None, num_warps=1,
        )  # fmt: skip
    return latent


@triton.jit
def _kv_store_kernel(
    x_ptr, gate_ptr, weight_ptr, cos_ptr, sin_ptr, slot_ptr, latent_ptr, pool_ptr, x_stride, page_stride, offset, page_size,
    eps, LAYOUT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, HAS_GATE: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < D
    if HAS_GATE:
        a = tl.load(x_ptr + 2 * row * D + column, mask=live, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + (2 * row + 1) * D + column, mask=live, other=0.0).to(tl.float32)
        ga = tl.load(gate_ptr + 2 * row * D + column, mask=live, other=0.0).to(tl.float32)
        gb = tl.load(gate_ptr + (2 * row + 1) * D + column, mask=live, other=0.0).to(tl.float32)
        highest = tl.maximum(ga, gb)
        wa, wb = tl.exp(ga - highest), tl.exp(gb - highest)
        x = to_bf16((a * wa + b * wb) / (wa + wb)).to(tl.float32)
    else:
        x = tl.load(x_ptr + row * x_stride + column, mask=live, other=0.0).to(tl.float32)
    if HAS_NORM:
        weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
        x = weight * (x * tl.rsqrt(tl.sum(x * x, 0) / D + eps))
    x = to_bf16(x)
    tl.store(latent_ptr + row * D + column, x, mask=live)
    x = x.to(tl.float32)
    if HAS_ROPE:
        pair = tl.arange(0, BLOCK // 2) - (D - 64) // 2
        turned = (pair >= 0) & (pair < 32)
        cos = tl.load(cos_ptr + row * 32 + pair, mask=turned, other=1.0)
        sin = tl.load(sin_ptr + row * 32 + pair, mask=turned, other=0.0)
        even, odd = tl.split(tl.reshape(x, [BLOCK // 2, 2]))
        even, odd = rotated(even, odd, cos, sin)
        x = tl.reshape(tl.join(even, odd), [BLOCK])
        x = to_bf16(x).to(tl.float32)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    if slot < 0:
        return
    begin = pool_ptr + (slot // page_size) * page_stride + offset
    slot = slot % page_size
    if LAYOUT == 0:
        at = (begin + slot * (2 * D)).to(tl.pointer_type(tl.bfloat16))
        tl.store(at + column, x.to(tl.bfloat16), mask=live)
    elif LAYOUT == 1:
        value, scale = encode_fp8(tl.reshape(x, [BLOCK // 32, 32]), 0)
        at = begin + slot * 528
        tl.store(at + column, tl.reshape(value, [BLOCK]).to(tl.uint8, bitcast=True))
        tl.store(at + 512 + tl.arange(0, BLOCK // 32), scale)
    elif LAYOUT == 2:
        value, scale = encode_fp4(tl.reshape(x, [BLOCK // 16, 16]), 2)
        at = begin + slot * 288
        tl.store(at + tl.arange(0, BLOCK // 2), tl.reshape(value, [BLOCK // 2]))
        tl.store(at + 256 + tl.arange(0, BLOCK // 16), scale)
    elif LAYOUT == 3:
        value, scale = encode_fp8(tl.reshape(x, [BLOCK // 64, 64]), 0)
        at = begin + slot * 576
        tl.store(at + column, tl.reshape(value, [BLOCK]).to(tl.uint8, bitcast=True), mask=column < 448)
        at16 = at.to(tl.pointer_type(tl.bfloat16)) + 224 - 448
        tl.store(at16 + column, x.to(tl.bfloat16), mask=(column >= 448) & live)
        group = tl.arange(0, BLOCK // 64)
        tl.store(begin + page_size * 576 + slot * 8 + group, tl.where(group < 7, scale, 0).to(tl.uint8))
    elif LAYOUT == 4:
        value, scale = encode_fp8(tl.reshape(x, [BLOCK // 128, 128]), 1)
        at = begin + slot * 656
        tl.store(at + column, tl.reshape(value, [BLOCK]).to(tl.uint8, bitcast=True), mask=column < 512)
        group = tl.arange(0, BLOCK // 128)
        tl.store((at + 512).to(tl.pointer_type(tl.float32)) + group, scale, mask=group < 4)
        at16 = at.to(tl.pointer_type(tl.bfloat16)) + 264 - 512
        tl.store(at16 + column, x.to(tl.bfloat16), mask=(column >= 512) & live)
    else:
        value, scale = encode_fp4(tl.reshape(x, [BLOCK // 32, 32]), 3)
        tl.store(begin + slot * 64 + tl.arange(0, BLOCK // 2), tl.reshape(value, [BLOCK // 2]))
        tl.store(begin + page_size * 64 + slot * 4 + tl.arange(0, BLOCK // 32), scale)
