"""SwiGLU with DeepSeek-V4.1's clamps between the two products of an expert, optionally quantised in the same pass.

h = silu(min(gate, limit)) * clamp(up, -limit, limit) * weight of the routed row, in fp32. V3 has no limit. Gate and up columns
may come in turns of TURN, as `interleave` lays the rows of a weight: then a tile of a product has both, and its epilogue can be
this operation (`gemm_upcast`).
"""

import torch

from headrace.kernels import tuning
from headrace.kernels._triton import cdiv, tl, triton
from headrace.kernels.quantize_kernels import FORMATS, encode_fp8, quantize_rows_reference

TURN = 32  # a row of FP8 scales


def interleave(gate: torch.Tensor, up: torch.Tensor, turn: int = TURN) -> torch.Tensor:
    """Rows of two weights [n, k] in turns: [2 n, k]."""
    return torch.stack([part.unflatten(0, (-1, turn)) for part in (gate, up)], 1).flatten(0, 2)


def swiglu_reference(
    x: torch.Tensor,
    limit: float | None = None,
    weight: torch.Tensor | None = None,
    name: str | None = None,
    interleaved: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x [R, 2 I] (gate columns, then up) -> fp32 [R, I], or its quantised form; weight fp32 [R]."""
    x = x.float()
    gate, up = (part.flatten(1) for part in x.unflatten(1, (-1, 2, TURN)).unbind(2)) if interleaved else x.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    h = gate * torch.sigmoid(gate) * up
    h = h if weight is None else h * weight.unsqueeze(-1)
    return h if name is None else quantize_rows_reference(h, name)


def swiglu(
    x: torch.Tensor,
    limit: float | None = None,
    weight: torch.Tensor | None = None,
    name: str | None = None,
    group_of_row: torch.Tensor | None = None,
    interleaved: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x bf16 [R, 2 I] -> bf16 [R, I], or with name fp8_ue8m0 or fp8_fp32 (values [R, I], scales [R, I / group]).

    fp8_fp32 scales come column-major, as `gemm_fp8` wants them. `group_of_row` int32 [R]: rows without a group are neither
    read nor written.
    """
    rows, inner = x.shape[0], x.shape[1] // 2
    if name not in (None, "fp8_ue8m0", "fp8_fp32"):
        raise ValueError(f"swiglu writes bf16, fp8_ue8m0 or fp8_fp32, not {name!r}")
    kind, group, kind_type, scale_type, _ = FORMATS[name or "fp8_fp32"]
    if inner % group:
        raise ValueError(f"{inner} columns are not a multiple of the group of {group}")
    out = torch.empty(rows, inner, dtype=kind_type if name else torch.bfloat16, device=x.device)
    scales = torch.empty(inner // group, rows, dtype=scale_type, device=x.device).T
    if name == "fp8_ue8m0":
        scales = torch.empty(rows, inner // group, dtype=scale_type, device=x.device)
    count = rows * (inner // group)
    if count:
        block = 2048 // group
        _swiglu_kernel[(cdiv(count, block),)](
            x.contiguous(), weight if weight is not None else x, group_of_row if group_of_row is not None else x, out, scales,
            count, inner // group, scales.stride(0), scales.stride(1), limit or 0.0,
            LIMIT=limit is not None, WEIGHT=weight is not None, GROUPED=group_of_row is not None, QUANTISE=name is not None,
            TURN=TURN if interleaved else inner, KIND=kind, GROUP=group, BLOCK=block,
            FORM=tuning.quantise(name or "fp8_fp32")["FORM"], num_warps=4,
        )  # fmt: skip
    return (out, scales) if name else out


@triton.jit
def _swiglu_kernel(
    x_ptr, weight_ptr, group_ptr, out_ptr, scale_ptr, count, groups, stride_r, stride_g, limit,
    LIMIT: tl.constexpr, WEIGHT: tl.constexpr, GROUPED: tl.constexpr, QUANTISE: tl.constexpr, TURN: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = index < count
    row = index // groups
    if GROUPED:
        live = live & (tl.load(group_ptr + row, mask=live, other=-1) >= 0)
    column = ((index % groups) * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    at = (row * (2 * groups * GROUP))[:, None] + column // TURN * (2 * TURN) + column % TURN
    gate = tl.load(x_ptr + at, mask=live[:, None], other=0.0).to(tl.float32)
    up = tl.load(x_ptr + at + TURN, mask=live[:, None], other=0.0).to(tl.float32)
    h = gated(gate, up, limit, LIMIT)
    if WEIGHT:
        h *= tl.load(weight_ptr + row, mask=live, other=0.0)[:, None]
    out_at = out_ptr + index[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if QUANTISE:
        value, scale = encode_fp8(h, KIND, FORM)
        tl.store(out_at, value, mask=live[:, None])
        tl.store(scale_ptr + row * stride_r + (index % groups) * stride_g, scale, mask=live)
    else:
        tl.store(out_at, h.to(tl.bfloat16), mask=live[:, None])


@triton.jit
def gated(gate, up, limit, LIMIT: tl.constexpr):
    """fp32 of any one shape."""
    if LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate / (1 + tl.exp(-gate)) * up
