"""Latent attention: sparse (V4.1, V4, V3.2 layouts), dense decode, prefill."""

from collections.abc import Iterator

import torch

from headrace.kernels import peers
from headrace.kernels.cases import Case, Problem, generator, randn
from headrace.kernels.kv_layouts import PagedKV
from headrace.kernels.mla_decode import mla_decode, mla_decode_reference
from headrace.kernels.mla_prefill import mla_prefill, mla_prefill_reference
from headrace.kernels.sparse_attention import sparse_attention, sparse_attention_reference


def cases() -> Iterator[Case]:
    for window, extra, rope in [("window_fp8", "main_fp4", True), ("v4_fp8", "v4_fp8", False), ("v32_fp8", None, False)]:
        for invariant in (False, True):
            yield sparse("small", window, extra, 3, 20, 40, 33 if extra else 0, rope, invariant)
            yield sparse("full", window, extra, 37, 64, 128, 500 if extra else 0, rope, invariant)
    yield sparse("small", "bf16", None, 2, 16, 17, 0, False, True)
    yield sparse("small", "window_fp8", "main_fp4", 0, 16, 8, 8, True, False)
    yield sparse("small", "bf16", None, 3, 20, 40, 0, False, False, dim=576)
    yield sparse("full", "bf16", None, 37, 64, 500, 0, False, False)
    yield sparse("full", "bf16", None, 37, 128, 500, 0, False, False, dim=576)
    yield sparse("full", "v32_fp8", None, 5, 128, 2048, 0, False, False)
    for b in (2, 64, 128):
        yield sparse("full", "v32_fp8", None, b * 2, 128, 2048, 0, False, False, timed=True, queries=2)
    for b in (2, 64, 128):
        yield sparse("full", "v4_fp8", "v4_fp8", b * 2, 64, 128, 512, False, False, timed=True, queries=2)
    for b in (2, 32, 64, 128):
        yield sparse("full", "window_fp8", "main_fp4", b * 2, 64, 128, 512, True, False, timed=True, queries=2)
    yield sparse("full", "bf16", None, 4096, 64, 512, 0, False, True, timed=True)
    yield sparse("full", "bf16", None, 4096, 128, 2048, 0, False, True, timed=True, dim=576)
    yield sparse("full", "window_fp8", "main_fp4", 4096, 64, 128, 512, True, True, timed=True)

    for layout in ("bf16", "v32_fp8"):
        for invariant in (False, True):
            yield dense("small", layout, [0, 5, 130, 1], 2, 20 if invariant else 12, 64, invariant)
            yield dense("full", layout, [0, 5, 700, 1, 4097, 64], 2, 12, 64, invariant)
    yield dense("full", "bf16", [1000, 3000], 1, 128, 128, False)
    shapes = [(128, 1, 4096), (128, 1, 16384), (128, 2, 4096), (128, 2, 16384), (16, 1, 8192), (64, 1, 8192)]
    for heads, queries, length in shapes:
        yield dense("full", "bf16", length, queries, heads, 64, False, timed=True)

    yield prefill("small", [(20, 33), (0, 3), (7, 7)], 2)
    yield prefill("full", [(300, 300), (1, 900), (129, 200)], 5)
    yield prefill("full", [(4096, 4096)], 128, timed=True)


def sparse(
    size: str, layout: str, extra: str | None, rows: int, heads: int, n: int, m: int, rope: bool, invariant: bool,
    timed: bool = False, queries: int = 0, dim: int = 512,
) -> Case:  # fmt: skip
    dim = 576 if layout == "v32_fp8" else dim
    entries = {"small": 48, "full": 4096}[size] if not timed else 32768 if queries == 0 else max(4096, rows * 1024)

    def source(name: str, device: torch.device, seed: int) -> PagedKV:
        page = 16 if size == "small" else 64
        kv = PagedKV.allocate(name, entries // page + 1, page, dim, device.type)
        for begin in range(0, entries, 8192):  # the entries of the last page stay poison
            some = torch.arange(begin, min(begin + 8192, entries), device=device)
            kv.write(some, randn((len(some), dim), device, seed + begin))
        return kv

    def indices(count: int, device: torch.device, seed: int) -> torch.Tensor:
        g = generator(device, seed)
        index = torch.randint(0, entries, (rows, count), generator=g, device=device, dtype=torch.int32)
        if not timed and rows:
            index[torch.rand(index.shape, generator=g, device=device) < 0.2] = -1
            index[-1] = -1  # a row that sees nothing
        return index

    def build(device: torch.device, seed: int) -> Problem:
        kv = source(layout, device, seed)
        extra_kv = source(extra, device, seed + 1) if extra else None
        index = indices(n, device, seed + 2)
        extra_index = indices(m, device, seed + 3) if extra else None
        q = randn((rows, heads, dim), device, seed + 4, torch.bfloat16)
        sink = randn((heads,), device, seed + 5)
        angle = randn((rows, 32), device, seed + 6)
        pair = (angle.cos(), angle.sin()) if rope else None
        arguments = (q, kv, index, dim**-0.5, extra_kv, extra_index, sink, pair)
        race = {}
        if timed and queries and layout != "window_fp8":
            race = peers.flash_mla_sparse_decode(q, kv, index, dim**-0.5, extra_kv, extra_index, sink, queries)
        elif timed and layout == "bf16":
            race = peers.flash_mla_sparse_prefill(q, kv, index, dim**-0.5, sink)
        return Problem(
            run=lambda: sparse_attention(*arguments, batch_invariant=invariant),
            reference=lambda: sparse_attention_reference(*arguments),
            select=_finite_lse,
            peers=race,
        )

    shape = f"{layout}{'+' + extra if extra else ''}, {rows} rows, {heads} heads, {n}+{m}" + " batch_invariant" * invariant
    record = {"v4_fp8": 584, "v32_fp8": 656, "window_fp8": 528, "bf16": 2 * dim, "main_fp4": 288}
    return Case(
        "sparse_attention", shape, build, (1e-2, 1e-2), size, timed,
        flops=2.0 * rows * heads * (n + m) * (dim + 512),
        bytes=rows * (n * record[layout] + m * record[extra or layout] + heads * (dim + 512) * 2),
        ceiling="bf16", target=0.8,
    )  # fmt: skip


def dense(
    size: str, layout: str, lengths, queries: int, heads: int, page: int, invariant: bool, timed: bool = False
) -> Case:
    def build(device: torch.device, seed: int) -> Problem:
        g = generator(torch.device("cpu"), seed)
        if timed:
            spread = torch.randn(128, generator=g) * lengths / 2
            lens = (lengths + spread).clamp(queries, 2 * lengths).int()
        else:
            lens = torch.tensor(lengths, dtype=torch.int32)
        batch, width = len(lens), -(-int(lens.max()) // page) + 1
        kv = PagedKV.allocate(layout, batch * width, page, 576, device.type)
        table = torch.randperm(batch * width, generator=g).view(batch, width).int().to(device)
        if timed:
            kv.pool.view(torch.bfloat16).copy_(randn((kv.pool.numel() // 2,), device, seed, torch.bfloat16))
        else:
            for b, length in enumerate(lens.tolist()):
                at = torch.arange(length, device=device)
                kv.write(table[b, at // page].long() * page + at % page, randn((length, 576), device, seed + b))
        q = randn((batch, queries, heads, 576), device, seed, torch.bfloat16)
        lens = lens.to(device)
        return Problem(
            run=lambda: mla_decode(q, kv, table, lens, 576**-0.5, batch_invariant=invariant),
            reference=None if timed else lambda: mla_decode_reference(q, kv, table, lens, 576**-0.5),
            select=_finite_lse,
            peers=peers.flash_mla_dense(q, kv, table, lens, 576**-0.5) if timed else {},
        )

    if not timed:
        return Case("mla_decode", f"{layout}, {len(lengths)} sequences" + " batch_invariant" * invariant, build,
                    (1e-2, 1e-2), size)  # fmt: skip
    g = generator(torch.device("cpu"), 0)
    total = float((lengths + torch.randn(128, generator=g) * lengths / 2).clamp(queries, 2 * lengths).int().sum())
    return Case(
        "mla_decode", f"bf16, b 128, {heads} heads, q {queries}, kv ~{lengths}", build, (1e-2, 1e-2), size, True,
        flops=2.0 * total * queries * heads * (576 + 512), bytes=total * 1152 + 128 * queries * heads * 1088 * 2,
        ceiling="bf16" if heads == 128 else "copy", target=0.7 if heads == 128 else 0.95,
    )  # fmt: skip


def prefill(size: str, sequences: list[tuple[int, int]], heads: int, timed: bool = False) -> Case:
    def build(device: torch.device, seed: int) -> Problem:
        nq, nk = (torch.tensor([0] + [s[i] for s in sequences]).cumsum(0).int().to(device) for i in (0, 1))
        rows, keys = sum(s[0] for s in sequences), sum(s[1] for s in sequences)
        q, k = (randn((t, heads, 192), device, seed + i, torch.bfloat16) for i, t in ((0, rows), (1, keys)))
        v = randn((keys, heads, 128), device, seed + 2, torch.bfloat16)
        arguments = (q, k, v, nq, nk, 192**-0.5)
        longest = max(s[0] for s in sequences)
        return Problem(
            run=lambda: mla_prefill(*arguments, longest),
            reference=None if timed else lambda: mla_prefill_reference(*arguments),
        )

    pairs = sum(a * b - a * (a - 1) / 2 for a, b in sequences)
    return Case("mla_prefill", f"{sequences}, {heads} heads", build, (1e-2, 1e-3), size, timed,
                flops=2.0 * pairs * heads * (192 + 128), ceiling="bf16")  # fmt: skip


def _finite_lse(outputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """-inf (nothing seen) becomes 0, so that errors can be normed; NaN stays."""
    out, lse = outputs
    return out, torch.where(lse == float("-inf"), 0.0, lse)
