"""Matrix products: dense, grouped contiguous, grouped masked."""

from collections.abc import Iterator

import torch

from headrace.kernels import gemm_fp8, gemm_upcast, peers, quantize, rope
from headrace.kernels.cases import Case, Problem, generator, randn, random_fp8
from headrace.kernels.mhc import whole_reference
from headrace.kernels.routing import permute, plan_choices
from headrace.kernels.swiglu import swiglu

# n, k of the benchmark tables: V4.1 projections, then the V3 family's
DENSE = [
    (1280, 5120), (32768, 1280), (512, 5120), (5120, 8192), (4608, 5120), (5120, 2304),
    (7168, 16384), (4096, 7168), (7168, 2048), (24576, 1536), (2112, 7168),
]  # fmt: skip
# groups, rows in all, n, k
CONTIGUOUS = [(48, 8064, 4608, 5120), (48, 9344, 5120, 2304), (8, 30848, 4608, 5120), (8, 34944, 5120, 2304)]
# groups, rows each on average, n, k
MASKED = [(48, 20, 4608, 5120), (48, 20, 5120, 2304), (48, 98, 4608, 5120), (32, 20, 4096, 7168), (32, 202, 4096, 7168)]
# bytes of an upcast weight's element, its share of a scale included
BYTES = {"bf16": 2.0, "fp8": 1 + 1 / 1024, "mxfp4": 0.5 + 1 / 32, "fp8_words": 1 + 1 / 1024, "mxfp4_words": 0.5 + 1 / 32}


def cases() -> Iterator[Case]:
    for m, n, k in [(1, 192, 640), (16, 64, 256), (17, 144, 384), (40, 208, 256), (0, 64, 256)]:
        yield dense_fp8(m, n, k, "small")
    yield dense_fp8(5, 64, 256, "small", batch_invariant=True)
    for m, n, k in [(1, 528, 1152), (33, 2112, 7168), (129, 4096, 512), (700, 1280, 5120), (257, 576, 16384)]:
        yield dense_fp8(m, n, k, "full")
    yield contiguous_fp8(3, 256, 64, 256, "small")
    yield contiguous_fp8(7, 2048, 1152, 640, "full")
    for rows in (6, 20):
        yield masked_fp8(3, rows, 64, 256, "small")
    for rows in (3, 30, 90, 200):
        yield masked_fp8(9, rows, 1152, 640, "full")
    for n, k in DENSE:
        for m in (1, 64, 4096):
            yield dense_fp8(m, n, k, "full", timed=True)
    for groups, m, n, k in CONTIGUOUS:
        yield contiguous_fp8(groups, m, n, k, "full", timed=True)
    for groups, rows, n, k in MASKED:
        yield masked_fp8(groups, rows, n, k, "full", timed=True)
    for name in ("bf16", "fp8", "mxfp4", "fp8_words", "mxfp4_words"):
        for m, fp8 in [(3, False), (20, name != "bf16")]:
            yield upcast(name, m, 80, 512, fp8, "small")
        yield upcast(name, 3, 32, 1536, False, "small")  # a sum of six parts under the interpreter
        yield upcast_in_parts(name, 3, 80, 1536, "small")
        yield upcast_in_parts(name, 64, 1120, 2304, "full")
        yield upcast(name, 5, 64, 256, False, "small", batch_invariant=True)
        yield upcast_grouped(name, 3, 64, 256, "small", masked=False)
        yield upcast_grouped(name, 3, 64, 256, "small", masked=True)
        yield upcast_side_by_side(name, 18, 2, 64, 256, "small")
        yield upcast_gated(name, 384, 256, 256, "small", grouped=True)
        yield upcast_gathered(name, 9, 5, 64, 256, name in ("fp8", "mxfp4", "fp8_words"), "small")
        yield upcast_gathered(name, 64, 40, 4608, 2560, False, "full")
        yield upcast_gathered(name, 300, 40, 640, 1280, name != "bf16", "full")
        yield upcast_gated(name, 70, 4608, 2560, "full", grouped=False)
        yield upcast_gated(name, 768, 4608, 2560, "full", grouped=True)
        for m in (1, 50, 300):
            yield upcast(name, m, 1120, 2304, name != "bf16", "full")
        for masked in (False, True):
            yield upcast_grouped(name, 6, 640, 1280, "full", masked)
        yield upcast_side_by_side(name, 70, 8, 192, 1280, "full")
        yield upcast_grouped(name, 6, 640, 1280, "full", masked=False, rows=200)  # more rows than the alignment
    yield upcast_gated("fp8_words", 5, 256, 512, "small", grouped=False)
    for name, m, heads, k, size in [("fp8_words", 5, 2, 512, "small"), ("bf16", 3, 1, 256, "small")]:
        yield upcast_turned(name, m, heads, k, size)
    for m in (1, 64, 300):
        yield upcast_turned("fp8_words", m, 64, 1280, "full")
    for n, k in [(1280, 5120), (32768, 1280), (5120, 8192), (4608, 5120)]:
        for m in (1, 64, 4096):
            for name in ("fp8", "fp8_words"):
                yield upcast(name, m, n, k, False, "full", timed=True)
    for m in (1, 64):
        yield upcast("bf16", m, 129280, 5120, False, "full", timed=True)
    for m in (1, 64, 4096):
        yield upcast_side_by_side("fp8_words", m, 8, 1024, 4096, "full", timed=True)
    for name in ("mxfp4", "mxfp4_words"):
        for m in (1, 64, 4096):
            yield upcast(name, m, 4608, 5120, False, "full", timed=True)
        yield upcast_grouped(name, 48, 4608, 5120, "full", masked=True, rows=20, timed=True)
        yield upcast_grouped(name, 48, 5120, 2304, "full", masked=True, rows=20, timed=True)
        yield upcast_grouped(name, 48, 4608, 5120, "full", masked=False, rows=168, timed=True)


def upcast(name: str, m: int, n: int, k: int, fp8: bool, size: str, timed: bool = False, batch_invariant: bool = False) -> Case:
    def build(device: torch.device, seed: int) -> Problem:
        weight, stored = _small_weight(name, (n, k), device, seed)
        x, x_scale = _rows_of(m, k, fp8, device, seed + 1)
        return Problem(
            run=lambda: gemm_upcast.gemm_upcast(x, *weight, x_scale, batch_invariant=batch_invariant),
            reference=lambda: gemm_upcast.gemm_upcast_reference(x, *stored, x_scale),
        )

    kind = "copy" if m <= 64 else "bf16"
    return Case(
        "gemm_upcast", f"{name} {m}x{n}x{k}" + " fp8 rows" * fp8 + " batch_invariant" * batch_invariant, build, 6e-3, size,
        timed,        flops=2.0 * m * n * k, bytes=n * k * BYTES[name] + m * k * 2 + m * n * 2, ceiling=kind,
    )  # fmt: skip


def upcast_in_parts(name: str, m: int, n: int, k: int, size: str) -> Case:
    """A split sum whose parts another adds, bit for bit as if it had been added here."""

    def build(device: torch.device, seed: int) -> Problem:
        weight, _ = _small_weight(name, (n, k), device, seed)
        x, _ = _rows_of(m, k, False, device, seed + 1)

        def added() -> torch.Tensor:
            parts = gemm_upcast.gemm_upcast(x, *weight, in_parts=True)
            if parts.dim() != 3 or len(parts) < 2:
                raise ValueError(f"the sum was not split: {tuple(parts.shape)}")
            return whole_reference(parts)

        def whole() -> torch.Tensor:  # not rounded in the kernel: the interpreter would cut the bits off
            return gemm_upcast.gemm_upcast(x, *weight, out_dtype=torch.float32).to(torch.bfloat16)

        return Problem(run=added, reference=whole)

    return Case("gemm_upcast in parts", f"{name} {m}x{n}x{k}", build, 0.0, size)


def upcast_grouped(
    name: str, groups: int, n: int, k: int, size: str, masked: bool, rows: int = 20, timed: bool = False
) -> Case:
    m = 2 * rows if masked else groups * -(-rows // 128) * 128

    def build(device: torch.device, seed: int) -> Problem:
        weight, stored = _small_weight(name, (groups, n, k), device, seed)
        g = generator(torch.device("cpu"), seed)
        x, _ = _rows_of(groups * m if masked else m, k, False, device, seed + 1)
        if masked:
            x = x.view(groups, m, k)
            counts = (rows * (torch.rand(groups, generator=g) * 0.6 + 0.7)).round().int().to(device)
            if not timed:
                counts[1] = 0
            written = torch.arange(m, device=device)[None, :] < counts[:, None]
            keys = {"counts": counts, "expected_rows": rows}
        else:
            group_of_row = _segments(groups, m, seed)[0].to(device)
            written = group_of_row >= 0
            keys = {"group_of_row": group_of_row}
        x[~written] = float("nan")
        others = {k: v for k, v in keys.items() if k != "expected_rows"}
        return Problem(
            run=lambda: gemm_upcast.gemm_upcast(x, *weight, **keys),
            reference=lambda: gemm_upcast.gemm_upcast_reference(x, *stored, **others),
            select=lambda out: out[written],
        )

    total = groups * rows if masked else m
    return Case(
        f"grouped gemm_upcast {'masked' if masked else 'contiguous'}", f"{name} {groups} groups, ~{rows} rows, {n}x{k}", build,
        6e-3, size, timed, flops=2.0 * total * n * k, bytes=groups * n * k * BYTES[name] + total * (2 * k + 2 * n),
        ceiling="copy" if masked else "bf16",
    )  # fmt: skip


def upcast_gated(name: str, m: int, n: int, k: int, size: str, grouped: bool) -> Case:
    """SwiGLU as a product's epilogue: bit for bit what its own kernel makes of the product."""

    def build(device: torch.device, seed: int) -> Problem:
        weight, _ = _small_weight(name, (3, n, k) if grouped else (n, k), device, seed)
        x = randn((m, k), device, seed + 1, torch.bfloat16)
        row_weight = randn((m,), device, seed + 2).abs() if grouped else None
        rows = _segments(3, m, seed)[0].to(device) if grouped else None
        plain = gemm_upcast.gemm_upcast
        return Problem(
            run=lambda: plain(x, *weight, group_of_row=rows, swiglu=(0.5, row_weight)),
            reference=lambda: swiglu(plain(x, *weight, group_of_row=rows), 0.5, row_weight, None, rows, interleaved=True),
            select=lambda out: out[rows >= 0] if grouped else out,
        )

    shape = f"{name} {m}x{n}x{k}" + ", 3 groups" * grouped
    return Case("gemm_upcast swiglu", shape, build, 0.0, size)


def upcast_gathered(name: str, tokens: int, experts: int, n: int, k: int, fp8: bool, size: str) -> Case:
    """Rows read where their tokens lie: bit for bit what rows copied to their places give. Nothing else is read: padding, and
    tokens that reach no expert, are NaN or lie outside."""

    def build(device: torch.device, seed: int) -> Problem:
        weight, _ = _small_weight(name, (experts, n, k), device, seed)
        x, x_scale = _rows_of(tokens, k, fp8, device, seed + 1)
        draw = torch.rand((tokens, experts), generator=generator(device, seed), device=device)
        chosen = torch.where(draw[:, :1] < 0.3, -1, draw.topk(3).indices).int()
        chosen[chosen == 1] = 0  # an expert without rows, and one that takes a token twice
        alignment = 16 if tokens <= 64 else 32
        row_of_choice, group_of_row, row_weight, source = plan_choices(chosen, draw[:, :3], experts, alignment)
        written, none = group_of_row >= 0, (chosen < 0).all(1)
        row_weight[~written], source[~written] = float("nan"), 1 << 30
        copied = [t if t is None else permute(t, row_of_choice, len(source)) for t in (x, x_scale)]
        scales = (copied[1], x_scale) if fp8 else (copied[0], x)
        for t, rows in zip(scales, (~written, none), strict=True):
            t[rows] = 255 if fp8 else float("nan")
        what = {"group_of_row": group_of_row, "expected_rows": alignment, "alignment": alignment, "swiglu": (0.5, row_weight)}
        plain = gemm_upcast.gemm_upcast
        return Problem(
            run=lambda: plain(x, *weight, x_scale, source_of_row=source, **what),
            reference=lambda: plain(copied[0], *weight, copied[1], **what),
            select=lambda out: out[written],
        )

    shape = f"{name} {tokens} tokens, {experts} groups, {n}x{k}" + " fp8 rows" * fp8
    return Case("gemm_upcast gathered", shape, build, 0.0, size)


def upcast_turned(name: str, m: int, heads: int, k: int, size: str) -> Case:
    """RoPE as a product's epilogue, bit for bit what its own kernel makes of the product."""

    def build(device: torch.device, seed: int) -> Problem:
        weight, _ = _small_weight(name, (512 * heads, k), device, seed)
        x = randn((m, k), device, seed + 1, torch.bfloat16)
        tables = rope.rope_tables(torch.arange(m, device=device) * 77, randn((32,), device, seed).abs())
        plain = gemm_upcast.gemm_upcast
        return Problem(
            run=lambda: plain(x, *weight, rope=(*tables, 512)).view(m, heads, 512),
            reference=lambda: rope.rope(plain(x, *weight).view(m, heads, 512), *tables),
        )

    return Case("gemm_upcast rope", f"{name} {m}x{heads}x512x{k}", build, 0.0, size)


def upcast_side_by_side(name: str, m: int, groups: int, n: int, k: int, size: str, timed: bool = False) -> Case:
    """V4.1's first output projection: each row has its own part for every group."""

    def build(device: torch.device, seed: int) -> Problem:
        weight, stored = _small_weight(name, (groups, n, k), device, seed)
        x = randn((m, groups, k), device, seed + 1, torch.bfloat16)
        return Problem(
            run=lambda: gemm_upcast.gemm_upcast(x, *weight, side_by_side=True),
            reference=lambda: gemm_upcast.gemm_upcast_reference(x, *stored),
        )

    return Case(
        "gemm_upcast side by side", f"{name} {m}x{groups}x{n}x{k}", build, 6e-3, size, timed,
        flops=2.0 * m * groups * n * k, bytes=groups * n * k * BYTES[name] + 2 * m * groups * (k + n),
        ceiling="copy" if m <= 64 else "bf16",
    )  # fmt: skip


def _small_weight(name: str, shape: tuple[int, ...], device: torch.device, seed: int):
    """((weight, scale, name) as the kernel takes them, the same as a checkpoint stores them)."""
    if name == "bf16":
        stored = randn(shape, device, seed, torch.bfloat16), None, name
        return stored, stored
    g = generator(device, seed)
    *lead, n, k = shape
    form = name.removesuffix("_words")
    if form == "fp8":
        scale = torch.randint(120, 130, (*lead, -(-n // 32), k // 32), generator=g, device=device)
        stored = random_fp8(shape, device, seed), scale.to(torch.uint8), form
    else:
        packed = torch.randint(0, 256, (*lead, n, k // 2), generator=g, device=device, dtype=torch.uint8)
        stored = packed, torch.randint(120, 130, (*lead, n, k // 32), generator=g, device=device).to(torch.uint8), form
    return (stored if form == name else gemm_upcast.pack_words(*stored)), stored


def _rows_of(m: int, k: int, fp8: bool, device: torch.device, seed: int):
    x = randn((m, k), device, seed)
    return quantize.quantize_fp8_ue8m0(x, 32) if fp8 else (x.to(torch.bfloat16), None)


def dense_fp8(m: int, n: int, k: int, size: str, timed: bool = False, batch_invariant: bool = False) -> Case:
    def build(device: torch.device, seed: int) -> Problem:
        a, a_scale, b, b_scale = _operands((m,), (), n, k, device, seed)
        scale_columns = a_scale.T.contiguous().T  # column-major, as both sides of the race want it
        return Problem(
            run=lambda: gemm_fp8.gemm_fp8(a, scale_columns, b, b_scale, batch_invariant),
            reference=lambda: gemm_fp8.gemm_fp8_reference(a, a_scale, b, b_scale),
            peers=peers.deep_gemm_dense(a, a_scale, b, b_scale) if timed else {},
        )

    target = 1.0 if m <= 64 else 0.85
    return Case(
        "gemm_fp8", f"{m}x{n}x{k}" + " batch_invariant" * batch_invariant, build, 6e-3, size, timed,
        flops=2.0 * m * n * k, bytes=m * k + n * k + 2 * m * n, ceiling="copy" if m <= 64 else "fp8", target=target,
    )  # fmt: skip


def contiguous_fp8(groups: int, m: int, n: int, k: int, size: str, timed: bool = False) -> Case:
    def build(device: torch.device, seed: int) -> Problem:
        a, a_scale, b, b_scale = _operands((m,), (groups,), n, k, device, seed)
        group_of_row, rows = _segments(groups, m, seed)
        group_of_row = group_of_row.to(device)
        written = group_of_row >= 0
        a_scale[~written] = float("nan")
        scale_columns = a_scale.T.contiguous().T
        return Problem(
            run=lambda: gemm_fp8.grouped_gemm_fp8(a, scale_columns, b, b_scale, group_of_row=group_of_row),
            reference=lambda: gemm_fp8.grouped_gemm_fp8_reference(a, a_scale, b, b_scale, group_of_row=group_of_row),
            select=lambda out: out[written],
            peers=peers.deep_gemm_contiguous(a, a_scale, b, b_scale, group_of_row) if timed else {},
        )

    return Case(
        "grouped_gemm_fp8 contiguous", f"{groups} groups, m {m}, {n}x{k}", build, 6e-3, size, timed,
        flops=2.0 * m * n * k, bytes=m * k + groups * n * k + 2 * m * n, ceiling="fp8", target=0.85,
    )  # fmt: skip


def masked_fp8(groups: int, rows: int, n: int, k: int, size: str, timed: bool = False) -> Case:
    max_rows = rows * 2 if not timed else 64 if rows <= 32 else 256 if rows <= 128 else 512

    def build(device: torch.device, seed: int) -> Problem:
        a, a_scale, b, b_scale = _operands((groups, max_rows), (groups,), n, k, device, seed)
        g = generator(torch.device("cpu"), seed)
        spread = torch.rand(groups, generator=g) * 0.6 + 0.7
        counts = (rows * spread).round().int().clamp(1, max_rows)
        if not timed:
            counts[1], counts[2] = 0, max_rows
        counts = counts.to(device)
        written = torch.arange(max_rows, device=device)[None, :] < counts[:, None]
        a_scale[~written] = float("nan")
        return Problem(
            run=lambda: gemm_fp8.grouped_gemm_fp8(a, a_scale, b, b_scale, counts=counts, expected_rows=rows),
            reference=lambda: gemm_fp8.grouped_gemm_fp8_reference(a, a_scale, b, b_scale, counts=counts),
            select=lambda out: out[written],
            peers=peers.deep_gemm_masked(a, a_scale, b, b_scale, counts, rows) if timed else {},
        )

    return Case(
        "grouped_gemm_fp8 masked", f"{groups} groups, ~{rows} rows, {n}x{k}", build, 6e-3, size, timed,
        flops=2.0 * groups * rows * n * k, bytes=groups * (n * k + rows * (k + 2 * n)), ceiling="copy", target=1.0,
    )  # fmt: skip


def _operands(rows, groups, n, k, device, seed):
    if all(rows) and max(rows) * k > 1 << 26:
        a, a_scale = random_fp8((*rows, k), device, seed), 0.5 + randn((*rows, k // 128), device, seed + 1).abs()
    else:
        a, a_scale = quantize.quantize_fp8(randn((*rows, k), device, seed))
    b = random_fp8((*groups, n, k), device, seed + 2)
    b_scale = 0.5 + randn((*groups, -(-n // 128), k // 128), device, seed + 3).abs()
    return a, a_scale, b, b_scale


def _segments(groups: int, m: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split m rows (a multiple of 128) into 128-aligned segments; some rows at a segment's end are padding (-1)."""
    g = generator(torch.device("cpu"), seed)
    blocks = torch.ones(groups, dtype=torch.int64)
    spare = m // 128 - groups
    if spare < 0:
        blocks[m // 128 :] = 0
    elif spare:
        blocks += torch.bincount(torch.randint(0, groups, (spare,), generator=g), minlength=groups)
    group_of_row = torch.repeat_interleave(torch.arange(groups), blocks * 128).int()
    end = 0
    for i, count in enumerate((blocks * 128).tolist()):
        end += count
        padding = min(int(torch.randint(0, 30, (1,), generator=g)), count - 1)
        if count and i % 3 == 0 and padding > 0:
            group_of_row[end - padding : end] = -1
    return group_of_row, blocks * 128
