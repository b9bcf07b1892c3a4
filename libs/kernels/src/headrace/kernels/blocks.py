"""Gather and scatter of KV blocks for the data plane: scattered fixed-size records <-> one contiguous slab.

A record is opaque bytes (a V4.1 block of 128 tokens is 113,920). Source and destination may be memory of a peer that is
mapped into this process. One kernel moves all records of a call: block by block copies cost more than the bytes.
"""

import torch

from headrace.kernels._triton import cdiv, tl, triton


def gather_blocks_reference(pool: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """pool uint8 [N, B], index int [n] -> [n, B]."""
    return pool[index.long()].clone()


def scatter_blocks_reference(slab: torch.Tensor, index: torch.Tensor, pool: torch.Tensor) -> None:
    """Write slab [n, B] to rows `index` of pool."""
    pool[index.long()] = slab


def gather_blocks(pool: torch.Tensor, index: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """pool uint8 [N, B], B a multiple of 16; index int32 or int64 [n] -> out uint8 [n, B]."""
    out = torch.empty(index.numel(), pool.shape[1], dtype=torch.uint8, device=pool.device) if out is None else out
    _copy(pool, out, index, gather=True)
    return out


def scatter_blocks(slab: torch.Tensor, index: torch.Tensor, pool: torch.Tensor) -> None:
    """Write slab uint8 [n, B] to rows index [n] (distinct) of pool uint8 [N, B]."""
    _copy(slab, pool, index, gather=False)


def _copy(source: torch.Tensor, target: torch.Tensor, index: torch.Tensor, gather: bool) -> None:
    size = source.shape[1]
    if size != target.shape[1] or size % 16 or source.stride(1) != 1 or target.stride(1) != 1:
        raise ValueError(f"records of {size} and {target.shape[1]} bytes: must be equal, contiguous, a multiple of 16")
    if source.stride(0) % 8 or target.stride(0) % 8:
        raise ValueError("record strides must be multiples of 8 bytes")
    if index.numel():
        block = 2048  # of 8 bytes
        words = (t.view(torch.int64) for t in (source, target))
        _copy_kernel[(index.numel(), cdiv(size // 8, block))](
            *words, index, size // 8, source.stride(0) // 8, target.stride(0) // 8, GATHER=gather, BLOCK=block, num_warps=8
        )


@triton.jit
def _copy_kernel(source, target, index_ptr, size, source_stride, target_stride, GATHER: tl.constexpr, BLOCK: tl.constexpr):
    record = tl.program_id(0).to(tl.int64)
    other = tl.load(index_ptr + record).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if GATHER:
        read, write = other, record
    else:
        read, write = record, other
    value = tl.load(source + read * source_stride + at, mask=at < size)
    tl.store(target + write * target_stride + at, value, mask=at < size)
