"""Mixture-of-experts routing: scores, top-k experts, stable permutation into grouped rows, fixed-order combine.

Ties go to the lower expert. Rows of an expert keep token order (stable), and its segment begins at a multiple of 128, as
`gemm_fp8` and `gemm_upcast` want their contiguous rows (or of less, where `gemm_upcast` is told). The combine adds experts in
top-k order, so it is deterministic and batch-invariant. Sources: DeepSeek-V3 (sigmoid, group-limited) and V4.1 (square root of
softplus) released code.
"""

import torch
from torch.nn import functional as F

from headrace.kernels import tuning
from headrace.kernels._triton import cdiv, next_power_of_2, tl, to_bf16, triton

ALIGNMENT = 128
FEW = 4096  # choices that one launch plans: each of its programs reads them all twice
_TAKEN = tl.constexpr(-(2**31))  # below the integer of any score


def route_reference(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    score: str = "sqrtsoftplus",
    scale: float = 1.5,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits fp32 [T, E], bias fp32 [E] or [T, E] -> (experts int32 [T, k], weights fp32 [T, k]), best first.

    The bias chooses, the plain score weighs: weights = score / (sum + 1e-20) * scale. With groups > 1 only experts of
    the top_groups groups compete, a group's rank being the sum of its two best biased scores.
    """
    scores = torch.sigmoid(logits.float()) if score == "sigmoid" else torch.sqrt(F.softplus(logits.float(), threshold=1e9))
    choice = scores if bias is None else scores + bias
    if groups > 1:
        per_group = choice.unflatten(-1, (groups, -1))
        rank = per_group.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, _stable_top(rank, top_groups), True)
        choice = per_group.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = _stable_top(choice, top_k)
    weights = scores.gather(-1, experts)
    return experts.int(), weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale


def _stable_top(x: torch.Tensor, k: int) -> torch.Tensor:
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    score: str = "sqrtsoftplus",
    scale: float = 1.5,
    groups: int = 1,
    top_groups: int = 1,
    live: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `route_reference`, one launch. Rows that are not `live` (bool [T], any stride) take expert -1."""
    tokens, experts = logits.shape
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    if tokens:
        size = next_power_of_2(experts)
        if groups > 1 and size != experts:
            raise ValueError(f"group limits need a power of two of experts, got {experts}")
        tail = 0
        if groups == 1 and size != experts and experts > 16:  # two tensors of fewer lanes than one
            size //= 2
            tail = next_power_of_2(experts - size)
        _route_kernel[(tokens,)](
            logits.contiguous(), bias if bias is not None else logits,
            logits if live is None else live.contiguous().view(torch.uint8), chosen, weights, experts, scale,
            0 if bias is None or bias.dim() == 1 else bias.stride(0),
            TOP_K=top_k, SIGMOID=score == "sigmoid", HAS_BIAS=bias is not None, HAS_LIVE=live is not None,
            GROUPS=groups, TOP_GROUPS=top_groups,
            BLOCK=size, TAIL=tail, BLOCK_K=next_power_of_2(top_k), **tuning.route(),
        )  # fmt: skip
    return chosen, weights


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, live_ptr, chosen_ptr, weight_ptr, experts, scale, bias_stride,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LIVE: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    choice = _choice(logits_ptr, bias_ptr, token, expert, experts, bias_stride, SIGMOID, HAS_BIAS)
    if GROUPS > 1:
        grouped = tl.reshape(choice, [GROUPS, BLOCK // GROUPS])
        best = tl.max(grouped, 1)
        first = tl.argmax(grouped, 1)
        second = tl.max(tl.where(tl.arange(0, BLOCK // GROUPS)[None, :] == first[:, None], float("-inf"), grouped), 1)
        rank = best + second
        group = tl.arange(0, GROUPS)
        kept = tl.zeros([GROUPS], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            winner = tl.argmax(rank, 0)
            kept = tl.where(group == winner, 1, kept)
            rank = tl.where(group == winner, float("-inf"), rank)
        choice = tl.reshape(tl.where(kept[:, None] == 1, grouped, float("-inf")), [BLOCK])
    slot = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    # As integers of the same order: a warp has an instruction for their maximum, floating point takes five exchanges.
    key = tl.where(expert < experts, _ordered(choice), _TAKEN)
    if TAIL:
        other = BLOCK + tl.arange(0, TAIL)
        rest = _choice(logits_ptr, bias_ptr, token, other, experts, bias_stride, SIGMOID, HAS_BIAS)
        rest_key = tl.where(other < experts, _ordered(rest), _TAKEN)
    for k in tl.static_range(TOP_K):
        best = tl.max(key, 0)
        if TAIL:
            best = tl.maximum(best, tl.max(rest_key, 0))
        winner = tl.min(tl.where(key == best, expert, experts - 1), 0)  # the lowest of equals
        if TAIL:
            winner = tl.minimum(winner, tl.min(tl.where(rest_key == best, other, experts - 1), 0))
            rest_key = tl.where(other == winner, _TAKEN, rest_key)
        chosen = tl.where(slot == k, winner, chosen)
        key = tl.where(expert == winner, _TAKEN, key)
    there = slot < TOP_K
    x = tl.load(logits_ptr + token * experts + chosen, mask=there, other=0.0)
    weight = tl.where(there, _expert_score(x, SIGMOID, False), 0.0)
    weight = weight / (tl.sum(weight, 0) + 1e-20) * scale
    if HAS_LIVE:
        chosen = tl.where(tl.load(live_ptr + token) != 0, chosen, -1)
    tl.store(chosen_ptr + token * TOP_K + slot, chosen, mask=slot < TOP_K)
    tl.store(weight_ptr + token * TOP_K + slot, weight, mask=slot < TOP_K)


@triton.jit
def _choice(
    logits_ptr, bias_ptr, token, expert, experts, bias_stride, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """The biased scores that choose; -inf behind the last expert."""
    x = tl.load(logits_ptr + token * experts + expert, mask=expert < experts, other=0.0)
    choice = _expert_score(x, SIGMOID, True)
    if HAS_BIAS:
        choice += tl.load(bias_ptr + token * bias_stride + expert, mask=expert < experts, other=0.0)
    return tl.where(expert < experts, choice, float("-inf"))


@triton.jit
def _ordered(x):
    """fp32 -> int32 of the same order; both zeros are one."""
    raw = (x + 0.0).to(tl.int32, bitcast=True)
    return raw ^ ((raw >> 31) & 0x7FFFFFFF)


@triton.jit
def _expert_score(x, SIGMOID: tl.constexpr, FAST: tl.constexpr):
    """FAST, to choose by: exponential without denormals, quotient by a reciprocal root, each in a third of the instructions."""
    if SIGMOID:
        return 1 / (1 + tl.exp(-x))
    # softplus(x) = max(x, 0) + log(1 + t), t = exp(-|x|), and log(1 + t) = 2 atanh(t / (2 + t)): a quotient of at most 1 / 3
    # needs few terms of the series, and the log of 1 + t would lose a small t
    if FAST:
        t = tl.exp2(tl.abs(x) * -1.4426950408889634)
        root = tl.rsqrt(2 + t)
        z = t * (root * root)
    else:
        t = tl.exp(-tl.abs(x))
        z = t / (2 + t)
    square = z * z
    series = 1 / 9 + square * (1 / 11 + square * (1 / 13))
    series = 1 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * series)))
    return tl.sqrt(tl.maximum(x, 0.0) + 2 * z * series)


def plan_rows_reference(
    experts: torch.Tensor, count: int, alignment: int = ALIGNMENT
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """experts int32 [T, k] in 0..count-1 (-1: not computed here) -> the grouped row of each choice, and each row's group.

    Returns (row_of_choice int32 [T, k], -1 where not computed; group_of_row int32 [capacity], -1 for padding;
    counts int32 [count]). An expert's rows begin at a multiple of `alignment`, a power of two. capacity = T k rounded up with
    one partial block per expert, a shape known to the host.
    """
    flat = experts.reshape(-1).long()
    counts = torch.bincount(flat[flat >= 0], minlength=count)
    begin = ((counts + alignment - 1) // alignment * alignment).cumsum(0).roll(1)
    begin[0] = 0
    row_of_choice = torch.full_like(flat, -1)
    capacity = row_capacity(experts.shape[0], experts.shape[1], count, alignment)
    group_of_row = torch.full((capacity,), -1, dtype=torch.int32, device=experts.device)
    for e in range(count):
        mine = (flat == e).nonzero().flatten()
        rows = begin[e] + torch.arange(len(mine), device=flat.device)
        row_of_choice[mine] = rows
        group_of_row[rows] = e
    return row_of_choice.view_as(experts).int(), group_of_row, counts.int()


def row_capacity(tokens: int, top_k: int, count: int, alignment: int = ALIGNMENT) -> int:
    """Rows that the grouped layout of any routing of so many tokens needs."""
    choices = tokens * top_k
    return cdiv(choices + min(count, choices) * (alignment - 1), alignment) * alignment


def plan_rows(experts: torch.Tensor, count: int, alignment: int = ALIGNMENT) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `plan_rows_reference`, no copy to the host; one launch for few choices, two for many."""
    row_of_choice, group_of_row, counts, *_ = _plan(experts, None, count, alignment, apart=False)
    return row_of_choice, group_of_row, counts


def plan_choices(
    experts: torch.Tensor, weights: torch.Tensor, count: int, alignment: int = ALIGNMENT, apart: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`plan_rows` and, instead of counts, what each row is: the weight of its choice fp32 [capacity], its token int32
    [capacity], as `gemm_upcast` reads them; padding is not written there. `apart`: in two launches, however few choices."""
    row_of_choice, group_of_row, _, weight_of_row, token_of_row = _plan(experts, weights, count, alignment, apart)
    return row_of_choice, group_of_row, weight_of_row, token_of_row


def _plan(
    experts: torch.Tensor, weights: torch.Tensor | None, count: int, alignment: int, apart: bool
) -> tuple[torch.Tensor, ...]:
    tokens, top_k = experts.shape
    row_of_choice = torch.empty_like(experts, memory_format=torch.contiguous_format)
    capacity = row_capacity(tokens, top_k, count, alignment)
    group_of_row = torch.empty(capacity, dtype=torch.int32, device=experts.device)
    weight_of_row = torch.empty(0 if weights is None else capacity, dtype=torch.float32, device=experts.device)
    token_of_row = torch.empty(0 if weights is None else capacity, dtype=torch.int32, device=experts.device)
    counts = torch.empty(count, dtype=torch.int32, device=experts.device)
    flat = experts.contiguous()
    given = flat, flat if weights is None else weights.contiguous(), counts, row_of_choice, group_of_row
    given = *given, weight_of_row, token_of_row, tokens * top_k
    found = row_of_choice, group_of_row, counts, weight_of_row, token_of_row
    shared = {"TOP_K": top_k, "ALIGN": alignment, "WEIGHTS": weights is not None}
    if tokens * top_k <= FEW and not apart:
        bins = max(32, next_power_of_2(count + 1))  # the last is that of choices not computed here
        _plan_kernel[(count,)](*given, capacity, count, BINS=bins, **shared, **tuning.plan_few())
        return found
    config = tuning.plan_rows()
    _count_kernel[(count,)](flat, counts, row_of_choice, group_of_row, tokens * top_k, capacity, **config)
    if tokens:
        _place_kernel[(count,)](*given, count, EXPERTS=next_power_of_2(count), **shared, **config)
    return found


@triton.jit
def _plan_kernel(
    experts_ptr, weight_ptr, count_ptr, row_ptr, group_ptr, spread_ptr, token_ptr, choices, capacity, count,
    BINS: tl.constexpr, TOP_K: tl.constexpr, ALIGN: tl.constexpr, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program an expert: each counts the choices of all, so that none waits for another, and each place has one writer."""
    expert = tl.program_id(0)
    counts = tl.zeros([BINS], tl.int32)
    for begin in range(0, choices, BLOCK):
        counts += tl.histogram(_chosen(experts_ptr, begin + tl.arange(0, BLOCK), choices, count), BINS)
    other = tl.arange(0, BINS)
    segments = tl.where(other < count, (counts + ALIGN - 1) // ALIGN * ALIGN, 0)
    first = tl.sum(tl.where(other < expert, segments, 0), 0)
    end = tl.sum(tl.where(other <= expert, segments, 0), 0)
    for begin in range(tl.sum(segments, 0) + expert * BLOCK, capacity, tl.num_programs(0) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(group_ptr + at, tl.full([BLOCK], -1, tl.int32), mask=at < capacity)
    row = first
    for begin in range(0, choices, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        chosen = _chosen(experts_ptr, at, choices, count)
        left_out = (chosen == tl.where(expert == 0, count, -1)) & (at < choices)
        tl.store(row_ptr + at, tl.full([BLOCK], -1, tl.int32), mask=left_out)
        row = _place(chosen == expert, at, row, expert, weight_ptr, row_ptr, group_ptr, spread_ptr, token_ptr, TOP_K, WEIGHTS)
    tl.store(count_ptr + expert, row - first)
    padding = row + tl.arange(0, ALIGN)
    tl.store(group_ptr + padding, tl.full([ALIGN], -1, tl.int32), mask=padding < end)


@triton.jit
def _chosen(experts_ptr, at, choices, count):
    """Experts of choices `at`; `count` where there is none of 0..count-1."""
    chosen = tl.load(experts_ptr + at, mask=at < choices, other=-1)
    return tl.where((chosen >= 0) & (chosen < count), chosen, count)


@triton.jit
def _place(
    mine, at, row, expert, weight_ptr, row_ptr, group_ptr, spread_ptr, token_ptr,
    TOP_K: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """The choices `at` that are `mine` take rows of `expert` from `row` on, in order; the row behind them."""
    order = tl.cumsum(mine.to(tl.int32), 0)
    own = row + order - 1
    tl.store(row_ptr + at, own, mask=mine)
    tl.store(group_ptr + own, tl.zeros_like(own) + expert, mask=mine)
    if WEIGHTS:
        tl.store(spread_ptr + own, tl.load(weight_ptr + at, mask=mine, other=0.0), mask=mine)
        tl.store(token_ptr + own, at // TOP_K, mask=mine)
    return row + tl.max(order, 0)


@triton.jit
def _count_kernel(experts_ptr, count_ptr, row_ptr, group_ptr, choices, capacity, BLOCK: tl.constexpr):
    """Counts, and -1 where the other kernel may write nothing: each program a stretch of both."""
    expert = tl.program_id(0)
    _fill(row_ptr, choices, BLOCK)
    _fill(group_ptr, capacity, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, choices, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total += (tl.load(experts_ptr + at, mask=at < choices, other=-1) == expert).to(tl.int32)
    tl.store(count_ptr + expert, tl.sum(total, 0))


@triton.jit
def _fill(ptr, size, BLOCK: tl.constexpr):
    for begin in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(ptr + at, tl.full([BLOCK], -1, tl.int32), mask=at < size)


@triton.jit
def _place_kernel(
    experts_ptr, weight_ptr, count_ptr, row_ptr, group_ptr, spread_ptr, token_ptr, choices, count,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, ALIGN: tl.constexpr, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    other = tl.arange(0, EXPERTS)
    counts = tl.load(count_ptr + other, mask=(other < count) & (other < expert), other=0)
    row = tl.sum((counts + ALIGN - 1) // ALIGN * ALIGN, 0)
    for begin in range(0, choices, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        mine = tl.load(experts_ptr + at, mask=at < choices, other=-1) == expert
        row = _place(mine, at, row, expert, weight_ptr, row_ptr, group_ptr, spread_ptr, token_ptr, TOP_K, WEIGHTS)


def permute_reference(x: torch.Tensor, row_of_choice: torch.Tensor, rows: int) -> torch.Tensor:
    """x [T, D] -> [rows, D]: each token's row copied to all rows of its choices; other rows are 0 here."""
    out = torch.zeros(rows, x.shape[1], dtype=x.dtype, device=x.device)
    for k in range(row_of_choice.shape[1]):
        there = row_of_choice[:, k] >= 0
        out[row_of_choice[there, k].long()] = x[there]
    return out


def permute(x: torch.Tensor, row_of_choice: torch.Tensor, rows: int) -> torch.Tensor:
    """As `permute_reference`, for any element of 1 or 2 bytes; rows without a choice are not written."""
    out = torch.empty(rows, x.shape[1], dtype=x.dtype, device=x.device)
    tokens, top_k = row_of_choice.shape
    words = _as_words(x), _as_words(out)
    size = words[0].shape[1]
    if tokens:
        block = min(1024, next_power_of_2(size))
        _permute_kernel[(tokens, cdiv(size, block))](
            *words, row_of_choice, size, words[0].stride(0), TOP_K=top_k, BLOCK=block, num_warps=4
        )
    return out


def _as_words(t: torch.Tensor) -> torch.Tensor:
    """The widest integer view of contiguous rows."""
    size = t.shape[1] * t.element_size()
    kind = next(k for k in (torch.int64, torch.int32, torch.int16, torch.uint8) if size % k.itemsize == 0)
    return t.contiguous().view(kind)


@triton.jit
def _permute_kernel(x_ptr, out_ptr, row_ptr, size, stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + token * stride + at, mask=at < size)
    for k in tl.static_range(TOP_K):
        row = tl.load(row_ptr + token * TOP_K + k).to(tl.int64)
        tl.store(out_ptr + row * size + at, value, mask=at < tl.where(row >= 0, size, 0))


def combine_reference(
    y: torch.Tensor, row_of_choice: torch.Tensor, weights: torch.Tensor | None, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """y [rows, D], weights fp32 [T, k] or None (already applied) -> bf16 [T, D]: the routed sum in fp32 in top-k order,

    rounded to bf16, then the shared expert's bf16 output added.
    """
    total = torch.zeros(row_of_choice.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    for k in range(row_of_choice.shape[1]):
        there = row_of_choice[:, k] >= 0
        part = y[row_of_choice[there, k].long()].float()
        total[there] += part if weights is None else part * weights[there, k : k + 1]
    total = total.to(torch.bfloat16)
    return total if shared is None else (total.float() + shared.float()).to(torch.bfloat16)


def combine(
    y: torch.Tensor, row_of_choice: torch.Tensor, weights: torch.Tensor | None, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """As `combine_reference`; y and shared bf16."""
    tokens, top_k = row_of_choice.shape
    dim = y.shape[1]
    out = torch.empty(tokens, dim, dtype=torch.bfloat16, device=y.device)
    if tokens:
        block = min(1024, next_power_of_2(dim))
        _combine_kernel[(tokens, cdiv(dim, block))](
            y, row_of_choice, weights if weights is not None else y, shared if shared is not None else y, out, dim,
            TOP_K=top_k, WEIGHTS=weights is not None, SHARED=shared is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _combine_kernel(
    y_ptr, row_ptr, weight_ptr, shared_ptr, out_ptr, dim,
    TOP_K: tl.constexpr, WEIGHTS: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(row_ptr + token * TOP_K + k).to(tl.int64)
        part = tl.load(y_ptr + row * dim + at, mask=at < tl.where(row >= 0, dim, 0), other=0.0).to(tl.float32)
        if WEIGHTS:
            # A choice that is not computed here contributes an exact 0, whatever its weight.
            part *= tl.load(weight_ptr + token * TOP_K + k)
        total += part
    total = to_bf16(total)
    if SHARED:
        other = tl.load(shared_ptr + token * dim + at, mask=at < dim, other=0.0).to(tl.float32)
        total = to_bf16(total.to(tl.float32) + other)
    tl.store(out_ptr + token * dim + at, total, mask=at < dim)
