"""Batch invariance: with `batch_invariant`, a row's bits do not depend on what else is in the batch.

The kernel on the whole batch must be bit-equal with the kernel on each part of it alone.
"""

from collections.abc import Iterator

import torch

from headrace.kernels.cases import Case, Problem, generator, randn, random_fp8
from headrace.kernels.gemm_fp8 import gemm_fp8
from headrace.kernels.gemm_upcast import gemm_upcast
from headrace.kernels.kv_layouts import PagedKV
from headrace.kernels.mhc import mhc_coefficients, mhc_pass
from headrace.kernels.mla_decode import mla_decode
from headrace.kernels.quantize import quantize_fp8
from headrace.kernels.sparse_attention import sparse_attention


def cases() -> Iterator[Case]:
    for size, parts in [("small", (1, 2, 17)), ("full", (1, 3, 16, 64, 65, 300))]:
        n, k = (64, 256) if size == "small" else (1280, 5120)
        yield _case("gemm_fp8", size, lambda device, seed, p=parts, n=n, k=k: _fp8(device, seed, p, n, k))
        for name in ("fp8", "mxfp4"):
            yield _case(f"gemm_upcast {name}", size,
                        lambda device, seed, p=parts, n=n, k=k, f=name: _upcast(device, seed, p, n, k, f))  # fmt: skip
        yield _case("mhc", size, lambda device, seed, p=parts, d=k: _mhc(device, seed, p, d))
        yield _case("sparse_attention", size, lambda device, seed, s=size: _sparse(device, seed, s))
        yield _case("mla_decode", size, lambda device, seed, s=size: _mla(device, seed, s))


def _case(op: str, size: str, build) -> Case:
    return Case("batch_invariance", f"{op} {size}", build, 0.0, size)


def _problem(call, parts: tuple[int, ...]) -> Problem:
    """call(slice of rows) -> rows of output."""
    total = sum(parts)

    def alone():
        begin, outputs = 0, []
        for count in parts:
            outputs.append(call(slice(begin, begin + count)))
            begin += count
        return torch.cat(outputs)

    return Problem(run=lambda: call(slice(0, total)), reference=alone)


def _fp8(device, seed, parts, n, k) -> Problem:
    a, a_scale = quantize_fp8(randn((sum(parts), k), device, seed))
    b = random_fp8((n, k), device, seed + 1)
    b_scale = 0.5 + randn((-(-n // 128), k // 128), device, seed + 2).abs()
    return _problem(lambda rows: gemm_fp8(a[rows].contiguous(), a_scale[rows], b, b_scale, batch_invariant=True), parts)


def _upcast(device, seed, parts, n, k, name) -> Problem:
    x = randn((sum(parts), k), device, seed, torch.bfloat16)
    g = generator(device, seed)
    weight = random_fp8((n, k), device, seed) if name == "fp8" else torch.randint(
        0, 256, (n, k // 2), generator=g, device=device, dtype=torch.uint8)  # fmt: skip
    scale = torch.randint(120, 130, (n // 32 if name == "fp8" else n, k // 32), generator=g, device=device).to(torch.uint8)
    return _problem(lambda rows: gemm_upcast(x[rows].contiguous(), weight, scale, name, batch_invariant=True), parts)


def _mhc(device, seed, parts, dim) -> Problem:
    total = sum(parts)
    x, o = randn((total, 4, dim), device, seed, torch.bfloat16), randn((total, dim), device, seed + 1, torch.bfloat16)
    pre, post = (randn((total, 4), device, seed + i).abs() for i in (2, 3))
    comb, fn = randn((total, 4, 4), device, seed + 4).abs(), randn((24, 4 * dim), device, seed + 5) * dim**-0.5
    base, scale = randn((24,), device, seed + 6), randn((3,), device, seed + 7)

    def call(rows: slice) -> torch.Tensor:
        y, u, part = mhc_pass(x[rows], (o[rows], post[rows], comb[rows]), pre[rows], fn, batch_invariant=True)
        mixed = mhc_coefficients(part, base, scale, dim, 1e-20, 1e-6)
        return torch.cat([t.flatten(1).float() for t in (y, u, *mixed)], 1)

    return _problem(call, parts)


def _sparse(device, seed, size) -> Problem:
    entries, count, heads = (48, 20, 16) if size == "small" else (4096, 500, 64)
    parts = (1, 2) if size == "small" else (1, 5, 200)
    kv = PagedKV.allocate("window_fp8", entries // 16, 16, device=device.type)
    kv.write(torch.arange(entries, device=device), randn((entries, 512), device, seed))
    index = torch.randint(-1, entries, (sum(parts), count), generator=generator(device, seed), device=device).int()
    q = randn((sum(parts), heads, 512), device, seed + 1, torch.bfloat16)
    return _problem(lambda rows: sparse_attention(q[rows], kv, index[rows], 512**-0.5, batch_invariant=True)[0], parts)


def _mla(device, seed, size) -> Problem:
    lengths, heads = ([70, 3], 16) if size == "small" else ([3000, 5, 1500, 2049, 64], 128)
    parts = (1, 1) if size == "small" else (1, 3, 1)
    width = -(-max(lengths) // 64)
    kv = PagedKV.allocate("bf16", len(lengths) * width, 64, 576, device.type)
    kv.pool.view(torch.bfloat16).copy_(randn((kv.pool.numel() // 2,), device, seed, torch.bfloat16))
    table = torch.arange(len(lengths) * width, device=device).view(len(lengths), width).int()
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    q = randn((len(lengths), 1, heads, 576), device, seed + 1, torch.bfloat16)
    return _problem(lambda b: mla_decode(q[b], kv, table[b], lens[b], 576**-0.5, batch_invariant=True)[0], parts)
