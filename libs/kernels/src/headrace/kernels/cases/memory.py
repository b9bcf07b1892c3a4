"""Operations that mostly move bytes: quantise, store, norms, mHC, Engram, embedding, RoPE, routing, permutation, blocks."""

import itertools
from collections.abc import Iterator

import torch

from headrace.kernels import blocks, embedding, engram, mhc, quantize_kernels, rmsnorm, rope, routing, swiglu
from headrace.kernels.cases import Case, Problem, generator, randn, random_fp8
from headrace.kernels.kv_layouts import PagedKV, entry_bytes
from headrace.kernels.kv_store import kv_store, kv_store_reference

BLOCK_BYTES = 113_920  # a V4.1 block of 128 tokens
TARGET = 0.8  # of the copy ceiling


def cases() -> Iterator[Case]:
    for name in quantize_kernels.FORMATS:
        yield quantise(name, 5, 256, "small")
        yield quantise(name, 333, 5120, "full")
        yield quantise(name, 16384, 5120, "full", timed=True)
    for layout in ("window_fp8", "main_fp4", "index_fp4", "v4_fp8", "v32_fp8", "bf16"):
        yield store(layout, 5, "small")
        yield store(layout, 1000, "full")
    yield store("main_fp4", 6, "small", gate=True)
    yield store("main_fp4", 500, "full", gate=True)
    yield store("window_fp8", 65536, "full", timed=True)
    yield store("main_fp4", 65536, "full", timed=True)
    yield store("main_fp4", 65536, "full", gate=True, timed=True)
    for rows, dim, size in [(3, 96, "small"), (257, 5120, "full"), (16384, 5120, "full")]:
        yield norm(rows, dim, size, timed=rows > 1000)
    for rows, heads, size in [(3, 5, "small"), (100, 64, "full"), (4096, 64, "full")]:
        yield rotate(rows, heads, size, timed=rows > 1000)
    for rows, heads, size in [(5, 32, "small"), (64, 32, "full")]:
        yield index_queries(rows, heads, size, timed=size == "full")
    for rows, size in [(7, "small"), (1000, "full"), (16384, "full")]:
        for form in (None, "fp8_ue8m0", "fp8_fp32"):
            yield activation(rows, 256 if size == "small" else 2304, form, size, timed=rows > 1000)
    yield activation(7, 256, None, "small", timed=False, interleaved=True)
    for tokens, dim, size in [(3, 128, "small"), (129, 5120, "full"), (4096, 5120, "full"), (64, 5120, "full")]:
        yield streams(tokens, dim, size, timed=tokens in (4096, 64))
    for tokens, dim, size in [(5, 64, "small"), (64, 5120, "full")]:
        yield routed_streams(tokens, dim, size)
        yield streams_of_parts(tokens, dim, 5, size)
    for tokens, dim, size in [(5, 64, "small"), (600, 128, "full")]:
        for parts in itertools.product((False, True), repeat=3):
            yield some_streams(tokens, dim, *parts, size)
    for tokens, rows, size in [(3, 50, "small"), (300, 10000, "full"), (8192, 4_000_000, "full")]:
        yield memory_gather(tokens, rows, size, timed=tokens > 1000)
        yield memory_gate(tokens, 96 if size == "small" else 5120, size, timed=tokens > 1000)
    for tokens, size in [(4, "small"), (500, "full"), (16384, "full")]:
        yield embed(tokens, 64 if size == "small" else 5120, size, timed=tokens > 1000)
    yield embed(5, 96, "small", timed=False, copies=4)
    for tokens, experts, k, size in [(9, 20, 6, "small"), (200, 384, 6, "full"), (16384, 384, 6, "full")]:
        yield route(tokens, experts, k, "sqrtsoftplus", 1, size, timed=tokens > 1000)
    yield route(9, 32, 4, "sigmoid", 8, "small")
    yield route(200, 256, 8, "sigmoid", 8, "full")
    for tokens, experts, dim, size in [(9, 5, 32, "small"), (700, 384, 512, "full"), (4096, 384, 5120, "full")]:
        yield rows_in_and_out(tokens, experts, dim, size, timed=tokens > 1000)
    yield rows_in_and_out(19, 5, 128, "small", timed=False, alignment=16)
    for tokens, count, k, of in [(1, 3, 2, "any"), (0, 4, 2, "any"), (13, 12, 6, "any"), (9, 33, 6, "one"), (7, 9, 3, "none")]:
        yield planned(tokens, count, k, of, 16, "small")
    yield planned(33, 5, 3, "some", 128, "small")
    for tokens, what in itertools.product((1, 64, 682), ("any", "one", "some")):
        yield planned(tokens, 384, 6, what, 16, "full")
    moves = [(3, 7, "small", 256), (20, 50, "full", BLOCK_BYTES), (1024, 4096, "full", BLOCK_BYTES)]
    for records, total, size, bytes_ in moves:
        for direction in ("gather", "scatter"):
            yield move_blocks(records, total, bytes_, direction, size, timed=records > 1000)


def _case(op, name, build, bound, size, timed, bytes_) -> Case:
    return Case(op, name, build, bound, size, timed, bytes=float(bytes_), target=TARGET)


def quantise(name: str, rows: int, dim: int, size: str, timed: bool = False) -> Case:
    group = quantize_kernels.FORMATS[name][1]

    def build(device: torch.device, seed: int) -> Problem:
        x = randn((rows, dim), device, seed)
        x = x if timed else x * torch.exp2(torch.randint(-20, 10, (rows, 1), device=device).float())
        x[0, :group] = 0
        x = x.to(torch.bfloat16)
        return Problem(
            run=lambda: quantize_kernels.quantize_rows(x, name),
            reference=lambda: quantize_kernels.quantize_rows_reference(x, name),
        )

    packing = quantize_kernels.FORMATS[name][4]
    scale = quantize_kernels.FORMATS[name][3].itemsize
    return _case("quantise", f"{name} {rows}x{dim}", build, 0.0, size, timed, rows * dim * (2 + 1 / packing + scale / group))


def store(layout: str, rows: int, size: str, gate: bool = False, timed: bool = False) -> Case:
    dim = {"index_fp4": 128, "v32_fp8": 576}.get(layout, 512)
    page = 16 if size == "small" else 128

    def build(device: torch.device, seed: int) -> Problem:
        wide = gate or layout in ("main_fp4", "v4_fp8")
        x = randn((rows * (2 if gate else 1), dim), device, seed, torch.float32 if wide else torch.bfloat16)
        if layout == "window_fp8" and not timed:  # the last columns of wider rows, as a joined product gives them
            x = torch.cat([x, x], 1)[:, dim:]
        scores = randn(tuple(x.shape), device, seed + 1) if gate else None
        weight = randn((dim,), device, seed + 2, torch.bfloat16)
        angle = randn((rows, 32), device, seed + 3)
        pages = rows // page + 2
        slots = torch.randperm(pages * page, generator=generator(device, seed), device=device)[:rows].int()
        slots[1::7] = -1
        pools = [PagedKV.allocate(layout, pages, page, dim, device.type) for _ in range(2)]
        for kv in pools:
            kv.pool.zero_()

        def run(call, kv):
            latent = call(x, kv, slots, weight, 1e-20, (angle.cos(), angle.sin()), scores)
            return latent, kv.read(torch.arange(pages * page, device=device))

        if timed:
            turn = (angle.cos(), angle.sin())
            return Problem(run=lambda: kv_store(x, pools[0], slots, weight, 1e-20, turn, scores))
        return Problem(run=lambda: run(kv_store, pools[0]), reference=lambda: run(kv_store_reference, pools[1]))

    read = dim * (2 * (4 + 4) if gate else 4 if layout in ("main_fp4", "v4_fp8") else 2)
    # A last-bit difference of the norm may round a value to the next code, so stored values are compared by norm.
    return _case("kv_store", f"{layout} {rows} rows" + " ratio 2" * gate, build, (3e-3, 3e-2), size, timed,
                 rows * (read + 2 * dim + 256 + entry_bytes(layout, dim)))  # fmt: skip


def norm(rows: int, dim: int, size: str, timed: bool) -> Case:
    def build(device: torch.device, seed: int) -> Problem:
        x, weight = randn((rows, dim), device, seed, torch.bfloat16), randn((dim,), device, seed + 1, torch.bfloat16)
        return Problem(
            run=lambda: rmsnorm.rmsnorm(x, weight, 1e-20), reference=lambda: rmsnorm.rmsnorm_reference(x, weight, 1e-20)
        )

    return _case("rmsnorm", f"{rows}x{dim}", build, 6e-3, size, timed, 4 * rows * dim)


def rotate(rows: int, heads: int, size: str, timed: bool) -> Case:
    def build(device: torch.device, seed: int) -> Problem:
        x = randn((rows, heads, 512), device, seed, torch.bfloat16)
        tables = rope.rope_tables(torch.arange(rows, device=device), randn((32,), device, seed).abs())
        return Problem(
            run=lambda: rope.rope(x if timed else x.clone(), *tables), reference=lambda: rope.rope_reference(x, *tables)
        )

    return _case("rope", f"{rows} rows, {heads} heads of 512", build, 6e-3, size, timed, rows * (heads * 256 + 256))


def index_queries(rows: int, heads: int, size: str, timed: bool = False) -> Case:
    """Rotated as above and rounded to FP4."""

    def build(device: torch.device, seed: int) -> Problem:
        x = randn((rows, heads, 128), device, seed, torch.bfloat16)
        x[0, 0] = 0
        tables = rope.rope_tables(torch.arange(rows, device=device), randn((32,), device, seed).abs())
        return Problem(
            run=lambda: rope.rope_fp4(x if timed else x.clone(), *tables), reference=lambda: rope.rope_fp4_reference(x, *tables)
        )

    # A sum that rounds the other way (one fused multiplication and addition) is a whole step of FP4 off.
    return _case("rope_fp4", f"{rows} rows, {heads} heads of 128", build, 3e-2, size, timed, rows * (heads * 512 + 256))


def activation(rows: int, inner: int, form: str | None, size: str, timed: bool, interleaved: bool = False) -> Case:
    def build(device: torch.device, seed: int) -> Problem:
        x = randn((rows, 2 * inner), device, seed, torch.bfloat16) * 6
        weight = randn((rows,), device, seed + 1).abs()
        groups = torch.arange(rows, device=device, dtype=torch.int32) % 5 - (0 if timed else 1)  # -1: a row without a group

        def dequantised(outputs):
            if form is None:
                return outputs[groups >= 0]
            values, scales = outputs
            name = "dequantize_fp8_ue8m0" if form == "fp8_ue8m0" else "dequantize_fp8"
            return getattr(quantize_kernels.quantize, name)(values, scales)

        return Problem(
            run=lambda: swiglu.swiglu(x, 10.0, weight, form, groups if form is None else None, interleaved),
            reference=lambda: swiglu.swiglu_reference(x, 10.0, weight, form, interleaved),
            select=dequantised,
        )

    out = {None: 2, "fp8_ue8m0": 1 + 1 / 32, "fp8_fp32": 1 + 4 / 128}[form]
    name = f"{rows}x{inner} {form or 'bf16'}" + " in turns" * interleaved
    return _case("swiglu", name, build, 1e-2, size, timed, rows * inner * (4 + out))


def streams(tokens: int, dim: int, size: str, timed: bool) -> Case:
    def build(device: torch.device, seed: int) -> Problem:
        x = randn((tokens, 4, dim), device, seed, torch.bfloat16)
        o = randn((tokens, dim), device, seed + 1, torch.bfloat16)
        fn = randn((24, 4 * dim), device, seed + 2) * (4 * dim) ** -0.5
        base, scale = randn((24,), device, seed + 3), randn((3,), device, seed + 4).abs()
        coefficients = mhc.mhc_coefficients_reference(x, fn, base, scale, 1e-20, 1e-6)
        pre, post, comb = coefficients
        split = mhc.split_projection(fn)

        def run():
            y, u, parts = mhc.mhc_pass(x, (o, post, comb), pre, split)
            return y, u, *mhc.mhc_coefficients(parts, base, scale, dim, 1e-20, 1e-6)

        def reference():
            y = mhc.expand_reference(o, x, post, comb)
            return y, mhc.collapse_reference(y, pre), *mhc.mhc_coefficients_reference(y, fn, base, scale, 1e-20, 1e-6)

        return Problem(run=run, reference=reference)

    bound = (3e-3, 6e-3, 2e-4, 2e-4, 2e-4)
    return _case("mhc", f"{tokens}x4x{dim}", build, bound, size, timed, tokens * dim * 2 * (4 + 1 + 4 + 1) + 96 * 4 * dim)


def routed_streams(tokens: int, dim: int, size: str) -> Case:
    """Experts' rows that are combined on the way, bit for bit as if they had been before."""

    def build(device: torch.device, seed: int) -> Problem:
        x = randn((tokens, 4, dim), device, seed, torch.bfloat16)
        shared = randn((tokens, dim), device, seed + 1, torch.bfloat16)
        rows = torch.randperm(4 * tokens, generator=generator(device, seed), device=device).int()
        rows = rows[: 3 * tokens].view(tokens, 3)
        rows[0, 1] = -1
        routed = mhc.Routed(randn((4 * tokens, dim), device, seed + 2, torch.bfloat16), rows, shared)
        post, comb = randn((tokens, 4), device, seed + 3), randn((tokens, 4, 4), device, seed + 4)
        return Problem(
            run=lambda: mhc.mhc_pass(x, (routed, post, comb), post)[:2],
            reference=lambda: mhc.mhc_pass(x, (mhc.combined_reference(routed), post, comb), post)[:2],
        )

    return Case("mhc of routed rows", f"{tokens}x4x{dim}", build, 0.0, size)


def streams_of_parts(tokens: int, dim: int, parts: int, size: str) -> Case:
    """A sublayer's result that comes in parts, bit for bit as if they had been added before."""

    def build(device: torch.device, seed: int) -> Problem:
        x, o = randn((tokens, 4, dim), device, seed, torch.bfloat16), randn((parts, tokens, dim), device, seed + 1)
        post, comb = randn((tokens, 4), device, seed + 3), randn((tokens, 4, 4), device, seed + 4)
        return Problem(
            run=lambda: mhc.mhc_pass(x, (o, post, comb), post)[:2],
            reference=lambda: mhc.mhc_pass(x, (mhc.whole_reference(o), post, comb), post)[:2],
        )

    return Case("mhc of parts", f"{tokens}x4x{dim} {parts} parts", build, 0.0, size)


def some_streams(tokens: int, dim: int, expand: bool, collapse: bool, mix: bool, size: str) -> Case:
    """A pass may leave out any of its three parts."""

    def build(device: torch.device, seed: int) -> Problem:
        x, o = randn((tokens, 4, dim), device, seed, torch.bfloat16), randn((tokens, dim), device, seed + 1, torch.bfloat16)
        fn, base = randn((24, 4 * dim), device, seed + 2) * (4 * dim) ** -0.5, randn((24,), device, seed + 3)
        scale = randn((3,), device, seed + 4).abs()
        pre, post, comb = mhc.mhc_coefficients_reference(x, fn, base, scale, 1e-20, 1e-6)

        def run():
            y, u, parts = mhc.mhc_pass(x, (o, post, comb) if expand else None, pre if collapse else None, fn if mix else None)
            assert (u is not None, parts is not None) == (collapse, mix)
            found = [y, u] if collapse else [y]
            return (*found, *mhc.mhc_coefficients(parts, base, scale, dim, 1e-20, 1e-6)) if mix else tuple(found)

        def reference():
            y = mhc.expand_reference(o, x, post, comb) if expand else x
            found = [y, mhc.collapse_reference(y, pre)] if collapse else [y]
            return (*found, *mhc.mhc_coefficients_reference(y, fn, base, scale, 1e-20, 1e-6)) if mix else tuple(found)

        return Problem(run=run, reference=reference)

    bound = (3e-3, *[6e-3] * collapse, *[2e-4] * 3 * mix)
    parts = [name for name, there in (("expand", expand), ("collapse", collapse), ("mix", mix)) if there]
    return _case("mhc", f"{tokens}x4x{dim} {'+'.join(parts) or 'nothing'}", build, bound, size, False, 0)


def memory_gather(tokens: int, rows: int, size: str, timed: bool) -> Case:
    def build(device: torch.device, seed: int) -> Problem:
        table = random_fp8((rows, 256), device, seed)
        scale = torch.randint(120, 130, (rows, 8), generator=generator(device, seed), device=device).to(torch.uint8)
        index = torch.randint(0, rows, (tokens, 24), generator=generator(device, seed + 1), device=device)
        return Problem(
            run=lambda: engram.engram_gather(table, scale, index),
            reference=lambda: engram.engram_gather_reference(table, scale, index),
        )

    return _case("engram_gather", f"{tokens} tokens of {rows} rows", build, 0.0, size, timed, tokens * 24 * (264 + 512 + 8))


def memory_gate(tokens: int, dim: int, size: str, timed: bool) -> Case:
    def build(device: torch.device, seed: int) -> Problem:
        x, kv = (randn((tokens, n, dim), device, seed + n, torch.bfloat16) for n in (4, 5))
        kv = kv.view(tokens, -1)
        weights = [randn((4, dim), device, seed + n, torch.bfloat16) for n in (6, 7)]
        live = torch.arange(tokens, device=device) % 5 != 2
        return Problem(
            run=lambda: engram.engram_gate(x, kv, *weights, 1e-20, live),
            reference=lambda: engram.engram_gate_reference(x, kv, *weights, 1e-20, live),
        )

    return _case("engram_gate", f"{tokens}x4x{dim}", build, 6e-3, size, timed, tokens * dim * 2 * (4 + 5 + 4))


def embed(tokens: int, dim: int, size: str, timed: bool, copies: int = 1) -> Case:
    rows = 100 if size == "small" else 129280

    def build(device: torch.device, seed: int) -> Problem:
        table = randn((rows, dim), device, seed, torch.bfloat16)
        ids = torch.randint(-1, rows, (tokens,), generator=generator(device, seed), device=device).int()
        return Problem(
            run=lambda: embedding.embedding(table, ids, copies),
            reference=lambda: embedding.embedding_reference(table, ids, copies),
        )

    times = f" {copies} times" if copies > 1 else ""
    return _case("embedding", f"{tokens} of {rows}x{dim}{times}", build, 0.0, size, timed, tokens * dim * 4)


def route(tokens: int, experts: int, k: int, score: str, groups: int, size: str, timed: bool = False) -> Case:
    def build(device: torch.device, seed: int) -> Problem:
        logits, bias = randn((tokens, experts), device, seed), randn((experts,), device, seed + 1) * 0.1
        logits[0, :4] = logits[0, 4]  # ties
        arguments = (logits, bias, k, score, 1.5, groups, max(1, groups // 2))
        live = torch.stack([torch.arange(tokens, device=device) % 7 != 3, torch.ones(tokens, device=device) == 0], 1)[:, 0]

        def reference():
            chosen, weights = routing.route_reference(*arguments)
            return chosen.masked_fill(~live.unsqueeze(1), -1), weights

        return Problem(run=lambda: routing.route(*arguments, live=live), reference=reference)

    moved = tokens * (experts * 4 + k * 8)
    return _case("route", f"{tokens}x{experts} top {k} {score}", build, (0.0, 1e-5), size, timed, moved)


def rows_in_and_out(tokens: int, experts: int, dim: int, size: str, timed: bool, alignment: int = 128) -> Case:
    """plan, permute and combine together; bytes are those of the two row passes."""

    def build(device: torch.device, seed: int) -> Problem:
        g = generator(device, seed)
        chosen = torch.rand((tokens, experts), generator=g, device=device).topk(min(6, experts - 1)).indices.int()
        chosen[::5, 1] = -1
        x, shared = (randn((tokens, dim), device, seed + i, torch.bfloat16) for i in (1, 2))
        weights = randn(tuple(chosen.shape), device, seed + 3).abs()
        rows = routing.row_capacity(*chosen.shape, experts, alignment)

        def chain(plan, permute, combine):
            row_of_choice, *of_rows = plan()
            y = permute(x, row_of_choice, rows)
            return row_of_choice, *of_rows, combine(y, row_of_choice, weights, shared)

        def kernel_plan():
            return _known(*routing.plan_choices(chosen, weights, experts, alignment))

        def reference_plan():
            plan = routing.plan_rows_reference(chosen, experts, alignment)
            spread, token, there = torch.zeros(rows, device=device), torch.zeros_like(plan[1]), plan[0] >= 0
            spread[plan[0][there].long()] = weights[there]
            token[plan[0][there].long()] = there.nonzero()[:, 0].int()
            return *plan[:2], spread, token

        return Problem(
            run=lambda: chain(kernel_plan, routing.permute, routing.combine),
            reference=lambda: chain(reference_plan, routing.permute_reference, routing.combine_reference),
        )

    name = f"{tokens}x{dim}, {experts} experts" + f", rows by {alignment}" * (alignment != 128)
    return _case("permute+combine", name, build, (0.0, 0.0, 0.0, 0.0, 1e-3), size, timed,
                 tokens * dim * 2 * (1 + 6 + 6 + 1 + 1))  # fmt: skip


def _known(row_of_choice, group_of_row, weight_of_row, token_of_row):
    """A plan, with 0 for what it does not write."""
    there = group_of_row >= 0
    return row_of_choice, group_of_row, torch.where(there, weight_of_row, 0.0), torch.where(there, token_of_row, 0)


def planned(tokens: int, experts: int, top_k: int, what: str, alignment: int, size: str) -> Case:
    """The plan in one launch, equal to that in two. Choices are any, all of one expert, none, or of every third expert."""

    def build(device: torch.device, seed: int) -> Problem:
        g = generator(device, seed)
        chosen = torch.randint(-1, experts, (tokens, top_k), generator=g, device=device, dtype=torch.int32)
        if what == "some":
            chosen[chosen % 3 != 0] = -1
        elif what != "any":
            chosen.fill_(experts - 2 if what == "one" else -1)
        weights = randn((tokens, top_k), device, seed + 1)
        plan = routing.plan_choices
        return Problem(
            run=lambda: _known(*plan(chosen, weights, experts, alignment)),
            reference=lambda: _known(*plan(chosen, weights, experts, alignment, apart=True)),
        )

    return _case("plan_choices", f"{tokens}x{top_k} {what} of {experts} experts by {alignment}", build, 0.0, size, False, 0)


def move_blocks(records: int, total: int, size_bytes: int, direction: str, size: str, timed: bool) -> Case:
    def build(device: torch.device, seed: int) -> Problem:
        g = generator(device, seed)
        pool = torch.randint(0, 256, (total, size_bytes), generator=g, device=device, dtype=torch.uint8)
        slab = torch.randint(0, 256, (records, size_bytes), generator=g, device=device, dtype=torch.uint8)
        index = torch.randperm(total, generator=g, device=device)[:records].int()
        if direction == "gather":
            return Problem(
                run=lambda: blocks.gather_blocks(pool, index), reference=lambda: blocks.gather_blocks_reference(pool, index)
            )

        def run(call):
            target = pool if timed else pool.clone()
            call(slab, index, target)
            return target

        return Problem(run=lambda: run(blocks.scatter_blocks), reference=lambda: run(blocks.scatter_blocks_reference))

    return _case(f"{direction}_blocks", f"{records} of {size_bytes} bytes", build, 0.0, size, timed, 2 * records * size_bytes)
