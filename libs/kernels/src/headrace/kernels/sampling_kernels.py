"""Parts of `sampling_split`'s kernels: noise, penalties, walking a whole row in one program, acceptance of drafts."""

from headrace.kernels._triton import tl, triton
from headrace.kernels.topk import kth_key, sort_key

_BELOW_ONE = tl.constexpr(1 - 2.0**-24)
LOWEST = tl.constexpr(0x00800000)  # the sort key of the lowest finite value: whoever reaches it is not -inf


@triton.jit
def uniform(key, token):
    """int64 key and tokens -> fp32 in (0, 1); see `sampling.uniform_reference`."""
    h = (token.to(tl.uint32) * 0x9E3779B1) ^ (key & 0xFFFFFFFF).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16) ^ ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    h = h ^ (h >> 16)
    return tl.minimum(((h >> 8).to(tl.int32).to(tl.float32) + 0.5) * 5.9604644775390625e-08, _BELOW_ONE)


@triton.jit
def exponential(u):
    """-log(u) of u in (0, 1), within 2e-7 of itself near 1 too: half the instructions of a logarithm of any fp32.

    u = 2^k (1 + f) with 1 + f in [2 / 3, 4 / 3); (log(1 + f) - f) / f^2 by a polynomial, fitted for the least relative error.
    """
    raw = u.to(tl.int32, bitcast=True)
    power = (raw - 0x3F2AAAAB) & -8388608
    f = (raw - power).to(tl.float32, bitcast=True) - 1
    p = 0.14025932550430298 * f - 0.15388642251491547
    p = p * f + 0.1399589627981186
    p = p * f - 0.1641594022512436
    p = p * f + 0.20011162757873535
    p = p * f - 0.2500782012939453
    p = p * f + 0.33333197236061096
    p = p * f - 0.49999937415122986
    return power.to(tl.float32) * -8.262958405176314e-08 - (p * (f * f) + f)


@triton.jit
def exp_of(x):
    """exp(x) of x <= 0 whose result may be 0 instead of a denormal."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def penalised(value, count, frequency_ptr, presence_ptr, repetition_ptr):
    repetition = tl.load(repetition_ptr)
    value = tl.where(value > 0, value / repetition, value * repetition)
    return value - (count * tl.load(frequency_ptr) + tl.where(count > 0, tl.load(presence_ptr), 0.0))


@triton.jit
def limit_of_row(logits, vocabulary, top, inverse, temperature, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """The sort key that a token of a row at temperature > 0 must reach to be kept."""
    limit = tl.full([], LOWEST, tl.uint32)
    if top_k > 0 and top_k < vocabulary:
        kth, _ = kth_key(logits, vocabulary, top_k, BLOCK)
        limit = tl.maximum(limit, kth)
    if top_p < 1:
        target = top_p * _mass(logits, limit, top, inverse, vocabulary, BLOCK)
        found = _mass_limit_of_row(logits, limit, target, top, inverse, vocabulary, BLOCK)
        limit = tl.maximum(limit, found)
    if min_p > 0:
        limit = tl.maximum(limit, sort_key(top + tl.log(min_p) * temperature))
    return limit


@triton.jit
def draw_of_row(logits, vocabulary, limit, top, inverse, key, BLOCK: tl.constexpr):
    """A draw among kept tokens, temperature > 0: (sum of exp((l - top) / temperature), lowest kept logit, first best token)."""
    lane_best = tl.full([BLOCK], float("-inf"), tl.float32)
    lane_winner = tl.zeros([BLOCK], tl.int32)
    lane_sum = tl.zeros([BLOCK], tl.float32)
    lane_low = tl.full([BLOCK], float("inf"), tl.float32)
    for begin in tl.range(0, vocabulary, BLOCK, num_stages=3):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocabulary, other=float("-inf"))
        kept = (sort_key(x) >= limit) & (at < vocabulary)
        share = tl.where(kept, tl.exp((x - top) * inverse), 0.0)
        lane_sum += share
        lane_low = tl.minimum(lane_low, tl.where(kept, x, float("inf")))
        # Largest log(p) + Gumbel is largest p / exponential: the same draw for one logarithm less.
        score = share / -tl.log(uniform(key, at.to(tl.int64)))
        better = kept & (score > lane_best)
        lane_best = tl.where(better, score, lane_best)
        lane_winner = tl.where(better, at, lane_winner)
    winner = tl.min(tl.where(lane_best == tl.max(lane_best, 0), lane_winner, vocabulary - 1), 0)
    return tl.sum(lane_sum, 0), tl.min(lane_low, 0), winner


@triton.jit
def _mass_limit_of_row(logits, limit, target, top, inverse, vocabulary, BLOCK: tl.constexpr):
    """The largest key such that tokens reaching it and the limit have target of the mass, two bits a pass."""
    found = tl.zeros([], tl.uint32)
    bit = tl.full([], 0x40000000, tl.uint32)
    for _ in range(16):
        first = found | bit
        second = found | (bit << 1).to(tl.uint32)
        third = second | bit
        one, two, three = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for begin in tl.range(0, vocabulary, BLOCK, num_stages=3):
            at = begin + tl.arange(0, BLOCK)
            x = tl.load(logits + at, mask=at < vocabulary, other=float("-inf"))
            code = sort_key(x)
            share = tl.where(code >= limit, exp_of((x - top) * inverse), 0.0)
            one += tl.where(code >= first, share, 0.0)
            two += tl.where(code >= second, share, 0.0)
            three += tl.where(code >= third, share, 0.0)
        found = tl.where(tl.sum(one, 0) >= target, first, found)
        found = tl.where(tl.sum(two, 0) >= target, second, found)
        found = tl.where(tl.sum(three, 0) >= target, third, found)
        bit = (bit >> 2).to(tl.uint32)
    return found


@triton.jit
def _mass(logits, limit, top, inverse, vocabulary, BLOCK: tl.constexpr):
    """sum of exp((l - top) / temperature) over tokens whose key is at least limit."""
    lane = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, vocabulary, BLOCK, num_stages=3):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocabulary, other=float("-inf"))
        lane += tl.where(sort_key(x) >= limit, tl.exp((x - top) * inverse), 0.0)
    return tl.sum(lane, 0)


@triton.jit
def accept(
    draft_ptr, token_ptr, threshold_ptr, lse_ptr, logits_ptr, q_threshold_ptr, q_lse_ptr, q_logits_ptr, temperature_ptr,
    key_ptr, b, vocabulary, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """How many drafts of sequence b hold, and whether a residual is drawn after them."""
    temperature = tl.load(temperature_ptr + b)
    greedy = temperature == 0
    inverse = 1 / tl.where(greedy, 1.0, temperature)
    i = tl.arange(0, LANES)
    live = i < STEPS
    t, q_at = b * (STEPS + 1) + i, b * STEPS + i
    d = tl.load(draft_ptr + q_at, mask=live, other=-1)
    at = tl.maximum(d, 0)
    x = tl.load(logits_ptr + t * vocabulary + at, mask=live, other=0.0)
    y = tl.load(q_logits_ptr + q_at * vocabulary + at, mask=live, other=0.0)
    p = tl.exp(x * inverse - tl.load(lse_ptr + t, mask=live, other=0.0))
    p = tl.where(x >= tl.load(threshold_ptr + t, mask=live, other=0.0), p, 0.0)
    q = tl.exp(y * inverse - tl.load(q_lse_ptr + q_at, mask=live, other=0.0))
    q = tl.where(y >= tl.load(q_threshold_ptr + q_at, mask=live, other=0.0), q, 0.0)
    u = uniform(tl.load(key_ptr + q_at, mask=live, other=0), tl.zeros([LANES], tl.int64))
    same = d == tl.load(token_ptr + t, mask=live, other=-1)
    ok = tl.where(greedy, same, u * q < p) & (d >= 0)
    accepted = tl.min(tl.where(ok, STEPS, i), 0)
    rejected = tl.max(tl.where(live & (i == accepted), d, -1), 0)
    return tl.minimum(accepted, STEPS), (rejected >= 0) & (temperature != 0)
