"""Engram n-gram memory: gather of quantised rows, and the gate that adds the memory's value to each residual stream.

Row numbers (hashes) and the product between the two steps are the caller's. gate_i = sigmoid(sign(d) sqrt(max(|d|, 1e-6))),
d = sum(X_i q_i k_i key_i) rsqrt(mean X_i^2 + eps) rsqrt(mean key_i^2 + eps) / sqrt(D); X_i += gate_i * value. Rows of image
tokens have gate 0. Source: DeepSeek-V4.1 release.
"""

import torch

from headrace.kernels import quantize, tuning
from headrace.kernels._triton import tl, triton


def engram_gather_reference(table: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """table e4m3 [R, W], scale UE8M0 [R, W / 32], rows int64 [T, n] -> bf16 [T, n * W]."""
    index = rows.reshape(-1)
    values = quantize.dequantize_fp8_ue8m0(
        table.view(torch.uint8)[index].view(torch.float8_e4m3fn), scale.view(torch.uint8)[index], 32
    )
    return values.to(torch.bfloat16).view(rows.shape[0], -1)


def engram_gather(table: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """As `engram_gather_reference`; W a power of two of at least 32. The table may be mapped host memory."""
    tokens, count = rows.shape
    width = table.shape[1]
    out = torch.empty(tokens, count * width, dtype=torch.bfloat16, device=rows.device)
    if tokens:
        config = tuning.engram_gather()
        block = config["BLOCK"]
        _gather_kernel[(-(-tokens * count // block),)](
            table.view(torch.uint8), scale.view(torch.uint8), rows, out, tokens * count, WIDTH=width, BLOCK=block,
            num_warps=config["num_warps"],
        )
    return out


@triton.jit
def _gather_kernel(table_ptr, scale_ptr, row_ptr, out_ptr, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = item < count
    row = tl.load(row_ptr + item, mask=live, other=0)
    column = tl.arange(0, WIDTH)
    group = tl.arange(0, WIDTH // 32)
    raw = tl.load(table_ptr + row[:, None] * WIDTH + column[None, :], mask=live[:, None], other=0)
    byte = tl.load(scale_ptr + row[:, None] * (WIDTH // 32) + group[None, :], mask=live[:, None], other=0)
    scale = (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    value = tl.reshape(raw.to(tl.float8e4nv, bitcast=True).to(tl.float32), [BLOCK, WIDTH // 32, 32]) * scale[:, :, None]
    out = tl.reshape(value, [BLOCK, WIDTH]).to(tl.bfloat16)
    tl.store(out_ptr + item[:, None] * WIDTH + column[None, :], out, mask=live[:, None])


def engram_gate_reference(
    x: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    live: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, S, D], kv [T, (S + 1) D] (S keys, then the value), weights [S, D] -> [T, S, D] bf16.

    live bool [T]: a False row has gate 0.
    """
    tokens, streams, dim = x.shape
    wide = x.float()
    key, value = kv[:, : streams * dim].float().view(tokens, streams, dim), kv[:, streams * dim :].float()
    dot = (wide * (q_weight.float() * k_weight.float()) * key).sum(-1)
    dot = dot * torch.rsqrt(wide.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps) * dim**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    if live is not None:
        gate = gate * live.unsqueeze(-1)
    return (wide + gate.unsqueeze(-1) * value.unsqueeze(1)).to(torch.bfloat16)


def engram_gate(
    x: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    live: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `engram_gate_reference`, bf16 inputs."""
    tokens, streams, dim = x.shape
    x, kv = x.contiguous(), kv.contiguous()
    out = torch.empty_like(x)
    if tokens:
        _gate_kernel[(tokens, streams)](
            x, kv, q_weight, k_weight, live if live is not None else x, out, dim, eps,
            STREAMS=streams, HAS_LIVE=live is not None, BLOCK=1 << (dim - 1).bit_length(),
            num_warps=tuning.engram_gate(dim)["num_warps"],
        )  # fmt: skip
    return out


@triton.jit
def _gate_kernel(
    x_ptr, kv_ptr, qw_ptr, kw_ptr, live_ptr, out_ptr, dim, eps,
    STREAMS: tl.constexpr, HAS_LIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    mask = column < dim
    at = (token * STREAMS + stream) * dim + column
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    memory = kv_ptr + token * (STREAMS + 1) * dim + column
    key = tl.load(memory + stream * dim, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(memory + STREAMS * dim, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(qw_ptr + stream * dim + column, mask=mask, other=0.0).to(tl.float32)
    weight *= tl.load(kw_ptr + stream * dim + column, mask=mask, other=0.0).to(tl.float32)
    d = tl.sum(x * weight * key, 0) * tl.rsqrt(tl.sum(x * x, 0) / dim + eps) * tl.rsqrt(tl.sum(key * key, 0) / dim + eps)
    d = d / tl.sqrt(dim.to(tl.float32))
    root = tl.sqrt(tl.maximum(tl.abs(d), 1e-6))
    gate = 1 / (1 + tl.exp(-tl.where(d < 0, -root, root)))
    if HAS_LIVE:
        gate = tl.where(tl.load(live_ptr + token) != 0, gate, 0.0)
    tl.store(out_ptr + at, (x + gate * value).to(tl.bfloat16), mask=mask)
