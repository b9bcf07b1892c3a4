"""RMSNorm: out = weight * x / sqrt(mean(x^2) + eps), in fp32, rounded once. One row a program, so batch-invariant."""

import torch

from headrace.kernels._triton import next_power_of_2, tl, triton


def rmsnorm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D], weight [D] -> fp32 [..., D] before the rounding."""
    x = x.float()
    return weight.float() * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x bf16 [R, D] (any row stride), weight bf16 [D] -> bf16 [R, D]."""
    rows, dim = x.shape
    if x.stride(1) != 1:
        raise ValueError("rmsnorm needs contiguous columns")
    out = torch.empty(rows, dim, dtype=torch.bfloat16, device=x.device)
    if rows:
        block = next_power_of_2(dim)
        _rmsnorm_kernel[(rows,)](x, weight, out, dim, x.stride(0), eps, BLOCK=block, num_warps=8 if block > 4096 else 4)
    return out


@triton.jit
def _rmsnorm_kernel(x_ptr, weight_ptr, out_ptr, dim, stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < dim
    x = tl.load(x_ptr + row * stride + column, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / dim + eps)
    tl.store(out_ptr + row * dim + column, (weight * y).to(tl.bfloat16), mask=live)
