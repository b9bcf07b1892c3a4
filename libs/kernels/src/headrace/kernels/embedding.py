"""Token embedding: rows of a table by id. Logits are a product: `gemm_upcast` with format bf16 and fp32 output."""

import torch

from headrace.kernels._triton import cdiv, tl, triton


def embedding_reference(table: torch.Tensor, ids: torch.Tensor, copies: int = 1) -> torch.Tensor:
    """table [V, D], ids int [T] -> [T, copies * D]; an id outside 0..V-1 gives zeros (a position that is overwritten later)."""
    inside = (ids >= 0) & (ids < table.shape[0])
    rows = torch.where(inside.unsqueeze(-1), table[ids.long().clamp(0, table.shape[0] - 1)], 0)
    return rows.repeat(1, copies)


def embedding(table: torch.Tensor, ids: torch.Tensor, copies: int = 1) -> torch.Tensor:
    """As `embedding_reference`."""
    vocabulary, dim = table.shape
    out = torch.empty(ids.numel(), copies * dim, dtype=table.dtype, device=table.device)
    if ids.numel():
        block = min(2048, 1 << (dim - 1).bit_length())
        _embedding_kernel[(ids.numel(), cdiv(dim, block))](
            table, ids, out, vocabulary, dim, COPIES=copies, BLOCK=block, num_warps=4
        )
    return out


@triton.jit
def _embedding_kernel(table_ptr, id_ptr, out_ptr, vocabulary, dim, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(id_ptr + token).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tl.where(row >= 0, tl.where(row < vocabulary, dim, 0), 0)
    value = tl.load(table_ptr + row * dim + column, mask=column < inside, other=0.0)
    for copy in tl.static_range(COPIES):
        tl.store(out_ptr + (token * COPIES + copy) * dim + column, value, mask=column < dim)
