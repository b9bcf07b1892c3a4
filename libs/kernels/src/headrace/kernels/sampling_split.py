"""Sampling with a row's vocabulary in parts, so that few rows fill a card and no part is read twice where nothing filters.

Launches: parts (statistics of each, and the draw of rows without top-k, top-p and min-p), then, unless the caller knows that no
row has one of the three, candidates (the tokens that may be kept, listed in order), then the join, a program a row. A part's
size depends on the vocabulary alone and parts are joined in their order: a row's bits do not depend on the batch.

A filter needs a threshold, and few tokens can be it. The k-th largest maximum of groups of tokens is no larger than the k-th
logit. For top-p, each part's mass above fixed levels gives the highest level whose mass above reaches p; where none does,
tokens so unlikely that a whole vocabulary of them would not make (1 - p) of the mass are dropped. The join checks that the
listed tokens suffice, finds the threshold among them in registers, and walks the row where they do not or are too many.
"""

import torch

from headrace.kernels._triton import cdiv, next_power_of_2, tl, triton
from headrace.kernels.sampling_kernels import (
    LOWEST,
    accept,
    draw_of_row,
    exp_of,
    exponential,
    limit_of_row,
    penalised,
    uniform,
)
from headrace.kernels.topk import kth_of, score_of, sort_key

LEVELS = tl.constexpr(8)  # multiples of STEP, from a part's maximum down, whose mass above is kept
STEP = tl.constexpr(1.5)  # nats
_FIELDS = tl.constexpr(5)  # raw maximum, raw sum, maximum, sum, lowest


def sample_split(logits: torch.Tensor, processed: torch.Tensor, rows, outputs: tuple[torch.Tensor, ...], config: dict) -> None:
    """As `sampling.sample`: fills outputs (token, logprob, threshold, lse) and, where it is not `logits` itself, processed.

    config: PART tokens a part, GROUPS groups of it, DENSE candidates of a row that are searched in registers, BITS of a key a
    turn, num_warps of the first two launches, JOIN_WARPS of the last.
    """
    count, vocabulary = logits.shape
    device = logits.device
    size, groups = config["PART"], config["GROUPS"]
    parts = cdiv(vocabulary, size)
    padded = next_power_of_2(parts)
    filters = rows.filters
    held = torch.empty(count, 2, padded, dtype=torch.int32, device=device)  # winner, number of candidates
    stats = torch.empty(count, 5, padded, dtype=torch.float32, device=device)
    maxima, mass, listed = held, held, held
    if filters:
        maxima = torch.empty(count, padded, groups, dtype=torch.float32, device=device)
        mass = torch.empty(count, padded, LEVELS.value, dtype=torch.float32, device=device)
        listed = torch.empty(count, parts, config["DENSE"], dtype=torch.int32, device=device)
    seen, mask = rows.seen, rows.mask
    settings = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    shared = {"FILTERS": filters, "PARTS": padded, "PART": size, "GROUPS": groups}
    width = 0 if seen is None else seen.shape[1]
    _part_kernel[(count, parts)](
        logits, processed, *settings, rows.key, logits if mask is None else mask,
        *(logits if t is None else t for t in (seen, rows.counts, rows.frequency, rows.presence, rows.repetition)),
        stats, held, maxima, mass, vocabulary, width, 0 if mask is None else mask.stride(0),
        HAS_MASK=mask is not None, HAS_SEEN=seen is not None, SEEN=max(16, next_power_of_2(width)),
        num_warps=config["num_warps"], **shared,
    )  # fmt: skip
    if filters:
        _candidate_kernel[(count, parts)](
            processed, *settings, stats, held, maxima, mass, listed, vocabulary, parts, ROOM=config["DENSE"],
            num_warps=config["num_warps"], **shared,
        )  # fmt: skip
    warps = config["JOIN_WARPS"]
    _join_kernel[(count,)](
        logits, processed, *settings, rows.key, stats, held, listed, *outputs, vocabulary, parts, FILTERS=filters, PARTS=padded,
        DENSE=config["DENSE"], BITS=config["BITS"], BLOCK=min(256 * warps, max(256, next_power_of_2(vocabulary))),
        num_warps=warps if filters or padded > 32 else 1,  # up to 32 parts are summed in one order by any number of warps
    )  # fmt: skip


@triton.jit
def _settings(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, vocabulary):
    """(temperature, 1 / temperature, greedy, top_k or 0, top_p, min_p, whether any of the three filters)."""
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature == 0
    inverse = 1 / tl.where(greedy, 1.0, temperature)
    top_k = tl.load(top_k_ptr + row)
    top_k = tl.where((top_k > 0) & (top_k < vocabulary), top_k, 0)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    filtered = ((top_k > 0) | (top_p < 1) | (min_p > 0)) & (temperature != 0)
    return temperature, inverse, greedy, top_k, top_p, min_p, filtered


@triton.jit
def _part_kernel(
    logits_ptr, processed_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, key_ptr, mask_ptr, seen_ptr, count_ptr,
    frequency_ptr, presence_ptr, repetition_ptr, stats_ptr, held_ptr, maxima_ptr, mass_ptr, vocabulary, width, mask_stride,
    HAS_MASK: tl.constexpr, HAS_SEEN: tl.constexpr, SEEN: tl.constexpr, FILTERS: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    logits = processed_ptr + row * vocabulary
    begin = part * PART
    at = begin + tl.arange(0, PART)
    x = tl.load(logits_ptr + row * vocabulary + at, mask=at < vocabulary, other=float("-inf"))
    raw, raw_top = x, tl.max(x, 0)
    if HAS_MASK:
        word = tl.load(mask_ptr + row * mask_stride + at // 32, mask=at < vocabulary, other=0)
        x = tl.where(((word >> (at % 32)) & 1) == 1, x, float("-inf"))
    if HAS_MASK or HAS_SEEN:
        tl.store(logits + at, x, mask=at < vocabulary)
    if HAS_SEEN:
        tl.debug_barrier()
        slot = tl.arange(0, SEEN)
        seen = tl.load(seen_ptr + row * width + slot, mask=slot < width, other=-1)
        mine = (seen >= begin) & (seen < begin + PART)
        count = tl.load(count_ptr + row * width + slot, mask=mine, other=0).to(tl.float32)
        value = tl.load(logits + seen, mask=mine, other=0.0)
        value = penalised(value, count, frequency_ptr + row, presence_ptr + row, repetition_ptr + row)
        tl.debug_barrier()
        tl.store(logits + seen, value, mask=mine)
        tl.debug_barrier()
        x = tl.load(logits + at, mask=at < vocabulary, other=float("-inf"))
    top = raw_top
    if HAS_MASK or HAS_SEEN:
        top = tl.max(x, 0)
    _, inverse, greedy, top_k, top_p, min_p, filtered = _settings(
        temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, vocabulary
    )
    below = (x - tl.maximum(top, -3.0e38)) * inverse
    share = exp_of(below)
    total = tl.sum(share, 0)
    raw_sum = total
    if HAS_MASK or HAS_SEEN or inverse != 1:
        raw_sum = tl.sum(exp_of(raw - tl.maximum(raw_top, -3.0e38)), 0)
    lowest = tl.min(tl.where(at < vocabulary, x, float("inf")), 0)
    if lowest == float("-inf"):
        lowest = tl.min(tl.where(x > float("-inf"), x, float("inf")), 0)
    stats = stats_ptr + row * _FIELDS * PARTS + part
    tl.store(stats, raw_top)
    tl.store(stats + PARTS, raw_sum)
    tl.store(stats + 2 * PARTS, top)
    tl.store(stats + 3 * PARTS, total)
    tl.store(stats + 4 * PARTS, lowest)
    winner = begin
    if not (FILTERS and filtered):
        score = x
        if not greedy:
            # Largest log(p) + Gumbel is largest p / exponential: the same draw for one logarithm less.
            score = _share_of_noise(share, tl.load(key_ptr + row), at)
        winner = tl.min(tl.where(score == tl.max(score, 0), at, vocabulary - 1), 0)
    tl.store(held_ptr + row * 2 * PARTS + part, winner)
    if FILTERS:  # noqa: SIM102 - decided when compiling, the next one when running
        if filtered:
            if top_k > 0:
                best = tl.max(tl.reshape(x, [PART // GROUPS, GROUPS]), 0)
                tl.store(maxima_ptr + (row * PARTS + part) * GROUPS + tl.arange(0, GROUPS), best)
            elif top_p < 1:
                first = top * inverse - tl.floor(top * inverse / STEP) * STEP
                for level in tl.static_range(LEVELS):
                    mass = tl.sum(tl.where(below >= -(first + STEP * level), share, 0.0), 0)
                    tl.store(mass_ptr + (row * PARTS + part) * LEVELS + level, mass)


@triton.jit
def _joined(stats_ptr, row, parts, inverse, PARTS: tl.constexpr):
    """(maxima of the parts, their maximum, sum of exp((l - maximum) / temperature))."""
    part = tl.arange(0, PARTS)
    stats = stats_ptr + row * _FIELDS * PARTS + part
    tops = tl.load(stats + 2 * PARTS, mask=part < parts, other=float("-inf"))
    sums = tl.load(stats + 3 * PARTS, mask=part < parts, other=0.0)
    top = tl.max(tops, 0)
    return tops, top, tl.sum(sums * tl.exp((tops - tl.maximum(top, -3.0e38)) * inverse), 0)


@triton.jit
def _candidate_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, stats_ptr, held_ptr, maxima_ptr, mass_ptr, list_ptr,
    vocabulary, parts, ROOM: tl.constexpr, FILTERS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Lists one part's tokens that may be kept, in their order, as far as there is room, and how many they are."""
    row = tl.program_id(0).to(tl.int64)
    temperature, inverse, greedy, top_k, top_p, min_p, filtered = _settings(
        temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, vocabulary
    )
    if not filtered:
        return
    part = tl.program_id(1)
    # Four neighbours are one thread's, so that threads are counted through, not tokens.
    at = part * PART + tl.arange(0, PART // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    x = tl.load(logits_ptr + row * vocabulary + at, mask=at < vocabulary, other=float("-inf"))
    tops, top, total = _joined(stats_ptr, row, parts, inverse, PARTS)
    cut = top + tl.log(tl.maximum(min_p, 1e-30)) * temperature
    if top_k > 0:
        group = tl.arange(0, PARTS * GROUPS)
        best = tl.load(maxima_ptr + row * PARTS * GROUPS + group, mask=group < parts * GROUPS, other=float("-inf"))
        cut = score_of(tl.maximum(kth_of(tl.where(best > float("-inf"), sort_key(best), 0), top_k, 16, 2), LOWEST))
    elif top_p < 1:
        cut = _sure_level(mass_ptr + row * PARTS * LEVELS, parts, tops, top, total, temperature, inverse, top_p, PARTS)
        cut = tl.maximum(cut, top - temperature * (tl.log(vocabulary / ((1 - top_p) * total)) + 0.01))
    kept = ((x >= cut) & (x > float("-inf"))).to(tl.int32)
    four = tl.sum(kept, 1)
    place = (tl.cumsum(four, 0) - four)[:, None] + tl.cumsum(kept, 1) - 1
    tl.store(list_ptr + (row * parts + part) * ROOM + place, at, mask=(kept == 1) & (place < ROOM))
    tl.store(held_ptr + (row * 2 + 1) * PARTS + part, tl.sum(four, 0))


@triton.jit
def _sure_level(mass_ptr, parts, tops, top, total, temperature, inverse, top_p, PARTS: tl.constexpr):
    """The highest level above which the parts have top_p of the mass; -inf: none."""
    part = tl.arange(0, PARTS)
    level = tl.floor(top * inverse / STEP) - tl.arange(0, LEVELS)
    own_level = tl.floor(tops * inverse / STEP)[:, None] - level[None, :]  # negative: the part lies below
    read = (part < parts)[:, None] & (own_level >= 0)
    at = part[:, None] * LEVELS + tl.where(read, own_level, 0.0).to(tl.int32)
    mass = tl.sum(tl.load(mass_ptr + at, mask=read, other=0.0) * tl.exp((tops - top) * inverse)[:, None], 0)
    limit = level * STEP * temperature
    return tl.max(tl.where(mass >= top_p * total * 1.00001, limit - tl.abs(limit) * 1e-6, float("-inf")), 0)


@triton.jit
def _join_kernel(
    raw_ptr, logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, key_ptr, stats_ptr, held_ptr, list_ptr,
    token_ptr, logprob_ptr, threshold_ptr, lse_ptr, vocabulary, parts,
    FILTERS: tl.constexpr, PARTS: tl.constexpr, DENSE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    raw = raw_ptr + row * vocabulary
    logits = logits_ptr + row * vocabulary
    temperature, inverse, greedy, top_k, top_p, min_p, filtered = _settings(
        temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, vocabulary
    )
    key = tl.load(key_ptr + row)
    part = tl.arange(0, PARTS)
    live = part < parts
    stats = stats_ptr + row * _FIELDS * PARTS + part
    raw_tops = tl.load(stats, mask=live, other=float("-inf"))
    raw_top = tl.max(raw_tops, 0)
    raw_sum = tl.sum(tl.load(stats + PARTS, mask=live, other=0.0) * tl.exp(raw_tops - tl.maximum(raw_top, -3.0e38)), 0)
    _, top, total = _joined(stats_ptr, row, parts, inverse, PARTS)
    lowest = tl.min(tl.load(stats + 4 * PARTS, mask=live, other=float("inf")), 0)
    winner = tl.load(held_ptr + row * 2 * PARTS + part, mask=live, other=0)
    x = tl.load(logits + winner, mask=live, other=float("-inf"))
    score = x
    if not greedy:
        score = _share_of_noise(exp_of((x - tl.maximum(top, -3.0e38)) * inverse), key, winner)
    token = tl.min(tl.where(live & (score == tl.max(score, 0)), winner, vocabulary - 1), 0)
    if greedy:
        lowest = top
    if FILTERS:  # noqa: SIM102 - decided when compiling, the next one when running
        if filtered:
            held = tl.load(held_ptr + (row * 2 + 1) * PARTS + part, mask=live, other=0)
            found = tl.sum(held, 0) <= DENSE
            if found:
                found, total, lowest, token = _among_candidates(
                    logits, list_ptr + row * parts * DENSE, held_ptr + (row * 2 + 1) * PARTS, parts, key, top, total,
                    temperature, inverse, top_k, top_p, min_p, vocabulary, PARTS, DENSE, BITS,
                )  # fmt: skip
            if not found:
                limit = limit_of_row(logits, vocabulary, top, inverse, temperature, top_k, top_p, min_p, BLOCK)
                total, lowest, token = draw_of_row(logits, vocabulary, limit, top, inverse, key, BLOCK)
    tl.store(token_ptr + row, token)
    tl.store(logprob_ptr + row, tl.load(raw + token) - raw_top - tl.log(raw_sum))
    tl.store(threshold_ptr + row, lowest)
    tl.store(lse_ptr + row, tl.where(greedy, top, top * inverse + tl.log(total)))


@triton.jit
def _among_candidates(
    logits, list_ptr, held_ptr, parts, key, top, total, temperature, inverse, top_k, top_p, min_p, vocabulary,
    PARTS: tl.constexpr, DENSE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """(whether the listed tokens suffice, sum of exp((l - top) / temperature), lowest kept logit, token)."""
    slot = tl.arange(0, DENSE)
    count = tl.zeros([], tl.int32)
    home = tl.zeros([DENSE], tl.int32)
    first = tl.zeros([DENSE], tl.int32)
    for part in tl.static_range(PARTS):  # of each slot: its part and that part's first slot
        count += tl.load(held_ptr + part, mask=part < parts, other=0)
        home += (slot >= count).to(tl.int32)
        first = tl.where(slot >= count, count, first)
    at = tl.load(list_ptr + home * DENSE + slot - first, mask=slot < count, other=0)
    x = tl.load(logits + at, mask=slot < count, other=float("-inf"))
    code = tl.where(slot < count, sort_key(x), 0)
    limit = tl.full([], LOWEST, tl.uint32)
    enough = count >= top_k
    if top_k > 0:
        limit = tl.maximum(limit, kth_of(code, top_k, 0, BITS))
    share = tl.where(code >= limit, exp_of((x - top) * inverse), 0.0)
    if top_p < 1:
        own = tl.sum(share, 0)
        target = top_p * tl.where(top_k > 0, own, total)
        enough = enough & (own >= target)
        limit = tl.maximum(limit, _mass_limit(code, share, target, BITS))
    if min_p > 0:
        limit = tl.maximum(limit, sort_key(top + tl.log(min_p) * temperature))
    kept = code >= limit
    share = tl.where(kept, share, 0.0)
    score = tl.where(kept, _share_of_noise(share, key, at), -1.0)
    winner = tl.min(tl.where(score == tl.max(score, 0), at, vocabulary - 1), 0)
    return enough, tl.sum(share, 0), tl.min(tl.where(kept, x, float("inf")), 0), winner


@triton.jit
def _share_of_noise(share, key, token):
    """share / -log(u); the square of a reciprocal root is one instruction and two products, a quotient nine."""
    root = tl.rsqrt(exponential(uniform(key, token)))
    return share * (root * root)


@triton.jit
def _mass_limit(code, share, target, BITS: tl.constexpr):
    """The largest limit such that codes reaching it have target of the shares, BITS bits a turn."""
    limit = tl.zeros([], tl.uint32)
    digit = tl.arange(0, 1 << BITS)
    for turn in tl.static_range(32 // BITS):
        shift = 32 - BITS * (turn + 1)
        trial = limit | (digit.to(tl.uint32) << shift)
        reached = tl.sum(tl.where(code[:, None] >= trial[None, :], share[:, None], 0.0), 0)
        highest = tl.max(tl.where(reached >= target, digit, 0), 0)
        limit = limit | (highest.to(tl.uint32) << shift)
    return limit


def residual_split(
    drafts: torch.Tensor,
    target: tuple[torch.Tensor, ...],
    draft: tuple[torch.Tensor, ...],
    temperature: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor],
    outputs: tuple[torch.Tensor, torch.Tensor],
    config: dict,
) -> None:
    """As `sampling.verify_drafts`, filling outputs (accepted, following); keys of acceptance and of the residual draw."""
    count, steps = drafts.shape
    vocabulary = target[3].shape[-1]
    parts = cdiv(vocabulary, config["PART"])
    padded = next_power_of_2(parts)
    best = torch.empty(count, padded, dtype=torch.float32, device=drafts.device)
    winner = torch.empty(count, padded, dtype=torch.int32, device=drafts.device)
    _residual_part_kernel[(count, parts)](
        drafts, *target, *draft, temperature, *keys, *outputs, best, winner, vocabulary,
        STEPS=steps, LANES=next_power_of_2(steps), PARTS=padded, PART=config["PART"], num_warps=config["num_warps"],
    )  # fmt: skip
    _residual_join_kernel[(count,)](best, winner, outputs[1], parts, PARTS=padded, num_warps=1)


@triton.jit
def _residual_part_kernel(
    draft_ptr, token_ptr, threshold_ptr, lse_ptr, logits_ptr, q_threshold_ptr, q_lse_ptr, q_logits_ptr, temperature_ptr,
    accept_key_ptr, key_ptr, accepted_ptr, following_ptr, best_ptr, winner_ptr, vocabulary,
    STEPS: tl.constexpr, LANES: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One part's best token of the residual; every program of a sequence finds for itself how many drafts hold."""
    b = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    i, drawn = accept(
        draft_ptr, token_ptr, threshold_ptr, lse_ptr, logits_ptr, q_threshold_ptr, q_lse_ptr, q_logits_ptr, temperature_ptr,
        accept_key_ptr, b, vocabulary, STEPS, LANES,
    )  # fmt: skip
    if part == 0:
        tl.store(accepted_ptr + b, i)
        tl.store(following_ptr + b, tl.load(token_ptr + b * (STEPS + 1) + i))
    best = float("-inf")
    winner = tl.full([], -1, tl.int32)
    if drawn:
        temperature = tl.load(temperature_ptr + b)
        inverse = 1 / temperature
        t, q_at = b * (STEPS + 1) + i, b * STEPS + i
        at = part * PART + tl.arange(0, PART)
        x = tl.load(logits_ptr + t * vocabulary + at, mask=at < vocabulary, other=float("-inf"))
        y = tl.load(q_logits_ptr + q_at * vocabulary + at, mask=at < vocabulary, other=float("-inf"))
        p = tl.where(x >= tl.load(threshold_ptr + t), tl.exp(x * inverse - tl.load(lse_ptr + t)), 0.0)
        q = tl.where(y >= tl.load(q_threshold_ptr + q_at), tl.exp(y * inverse - tl.load(q_lse_ptr + q_at)), 0.0)
        rest = tl.where(at < vocabulary, p - q, 0.0)
        score = tl.where(rest > 0, _share_of_noise(rest, tl.load(key_ptr + q_at), at), float("-inf"))
        best = tl.max(score, 0)
        winner = tl.min(tl.where((score == best) & (rest > 0), at, 0x7FFFFFFF), 0)
    tl.store(best_ptr + b * PARTS + part, best)
    tl.store(winner_ptr + b * PARTS + part, winner)


@triton.jit
def _residual_join_kernel(best_ptr, winner_ptr, following_ptr, parts, PARTS: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    best = tl.load(best_ptr + b * PARTS + part, mask=part < parts, other=float("-inf"))
    winner = tl.load(winner_ptr + b * PARTS + part, mask=part < parts, other=0)
    top = tl.max(best, 0)
    if top > float("-inf"):
        tl.store(following_ptr + b, tl.min(tl.where(best == top, winner, 0x7FFFFFFF), 0))
