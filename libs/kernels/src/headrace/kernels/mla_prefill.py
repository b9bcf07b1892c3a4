"""Multi-head latent attention at prefill, unabsorbed: causal attention over packed sequences, 192 key and 128 value columns.

Queries of a sequence are its last rows: with cached context, its keys outnumber its queries and query i of n sees
keys up to i + (keys - n). Source: DeepSeek-V2 report, section 2.1; the online softmax is FlashAttention's.
"""

import torch

from headrace.kernels import tuning
from headrace.kernels._triton import cdiv, dot, tl, triton
from headrace.kernels.attention_core import LOG2E, NO_SCORE


def mla_prefill_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification, in `dtype`. Shapes as in `mla_prefill`."""
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    for i in range(len(cu_q) - 1):
        rows, keys = slice(*cu_q[i : i + 2].tolist()), slice(*cu_k[i : i + 2].tolist())
        score = torch.einsum("qhd,khd->qhk", q[rows].to(dtype), k[keys].to(dtype)) * scale
        n, m = score.shape[0], score.shape[2]
        hidden = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(m - n + 1)
        score.masked_fill_(hidden.unsqueeze(1), float("-inf"))
        lse[rows] = torch.logsumexp(score, -1)
        out[rows] = torch.einsum("qhk,khd->qhd", torch.softmax(score, -1).nan_to_num(0.0), v[keys].to(dtype))
    return out, lse


def mla_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, scale: float, max_q: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q bf16 [Tq, H, 192], k bf16 [Tk, H, 192], v bf16 [Tk, H, 128]; cu_q, cu_k int32 [n + 1] row offsets.

    max_q is the longest query run (host integer). Returns out bf16 [Tq, H, 128] and lse fp32 [Tq, H] (natural log).
    No split over keys: every row's result is independent of the batch.
    """
    rows, heads, dim = q.shape
    if dim != 192 or v.shape[-1] != 128:
        raise ValueError(f"MLA prefill needs 192 key and 128 value columns, got {dim} and {v.shape[-1]}")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty(rows, heads, 128, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    config = tuning.mla_prefill()
    _mla_prefill_kernel[(cdiv(max_q, config["BLOCK_M"]), heads, len(cu_q) - 1)](
        q, k, v, cu_q, cu_k, out, lse, heads, scale * LOG2E,
        BLOCK_M=config["BLOCK_M"], BLOCK_N=config["BLOCK_N"], STAGES=config["STAGES"], num_warps=config["num_warps"],
    )  # fmt: skip
    return out, lse


@triton.jit
def _mla_prefill_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, out_ptr, lse_ptr, heads, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_q = tl.load(cu_q_ptr + sequence)
    n = tl.load(cu_q_ptr + sequence + 1) - first_q
    first_k = tl.load(cu_k_ptr + sequence)
    m = tl.load(cu_k_ptr + sequence + 1) - first_k
    block = tl.cdiv(n, BLOCK_M) - 1 - tl.program_id(0)  # the longest rows first
    if block < 0:
        return
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < n
    at = (first_q + row).to(tl.int64) * heads + head
    q0 = tl.load(q_ptr + at[:, None] * 192 + tl.arange(0, 128)[None, :], mask=live[:, None], other=0.0)
    q1 = tl.load(q_ptr + at[:, None] * 192 + 128 + tl.arange(0, 64)[None, :], mask=live[:, None], other=0.0)
    limit = row + (m - n)  # the last key a row sees
    top = tl.full([BLOCK_M], NO_SCORE_, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 128], tl.float32)
    end = tl.minimum(m, (block + 1) * BLOCK_M + (m - n))
    for begin in tl.range(0, end, BLOCK_N, num_stages=STAGES):
        key = begin + tl.arange(0, BLOCK_N)
        present = (key < m)[:, None]
        key_at = (first_k + key).to(tl.int64)[:, None] * heads + head
        k0 = tl.load(k_ptr + key_at * 192 + tl.arange(0, 128)[None, :], mask=present, other=0.0)
        k1 = tl.load(k_ptr + key_at * 192 + 128 + tl.arange(0, 64)[None, :], mask=present, other=0.0)
        value = tl.load(v_ptr + key_at * 128 + tl.arange(0, 128)[None, :], mask=present, other=0.0)
        score = dot(q0, tl.trans(k0), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        score = dot(q1, tl.trans(k1), score)
        score = tl.where(key[None, :] <= limit[:, None], score * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        decay = tl.exp2(top - new_top)
        weight = tl.exp2(score - new_top[:, None])
        total = total * decay + tl.sum(weight, 1)
        acc = dot(weight.to(tl.bfloat16), value, acc * decay[:, None])
        top = new_top
    inverse = tl.where(total > 0, 1.0 / total, 0.0)
    tl.store(lse_ptr + at, tl.where(total > 0, (top + tl.log2(total)) / LOG2E_, float("-inf")), mask=live)
    out = (acc * inverse[:, None]).to(tl.bfloat16)
    tl.store(out_ptr + at[:, None] * 128 + tl.arange(0, 128)[None, :], out, mask=live[:, None])


NO_SCORE_ = tl.constexpr(NO_SCORE)
LOG2E_ = tl.constexpr(LOG2E)
