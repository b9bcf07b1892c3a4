"""Sampling: penalties, grammar mask, temperature, top-k, top-p, min-p, keyed Gumbel noise, draft verification, logprobs.

Order per row: penalties on seen tokens, grammar mask, temperature, top-k, top-p of what is left, min-p. Tokens equal to the
k-th or to the last of the top-p mass are all kept, so the kept set is a threshold on the logit and independent of token
order. Temperature 0 takes the best logit, the lower id of equals. Noise is a counter-based hash (MurmurHash3 and lowbias32
finalisers) of (key, token id): a draw depends on nothing else, and a key is made of (seed, choice, position, purpose).
Logprobs are of the raw logits.
Drafts are verified by speculative sampling (Leviathan et al. 2023): accept with min(1, p / q), else draw from max(p - q, 0).
"""

import dataclasses

import torch

from headrace.kernels._triton import next_power_of_2, tl, triton
from headrace.kernels.topk import kth_key, sort_key

PURPOSES = {"draw": 0, "accept": 1, "residual": 2, "draft": 3}
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclasses.dataclass
class SamplingRows:
    """Parameters of T rows, all on the device of the logits.

    temperature, top_p, min_p fp32 [T]; top_k int32 [T] (0: off); key int64 [T] from `noise_key`; mask int32 [T, ceil(V / 32)]
    of allowed tokens (bit v % 32 of word v // 32) or None; seen int32 [T, P] distinct token ids, -1 for none, with counts
    int32 [T, P] and frequency, presence, repetition fp32 [T], or all None.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    key: torch.Tensor
    mask: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    frequency: torch.Tensor | None = None
    presence: torch.Tensor | None = None
    repetition: torch.Tensor | None = None


def noise_key(seed: int, choice: int, position: int, purpose: str = "draw") -> int:
    """The key of one draw, as a signed 64-bit integer."""
    key = seed
    for part in (choice, position, PURPOSES[purpose]):
        key = _splitmix((key + part * _GOLDEN) & 0xFFFFFFFFFFFFFFFF)
    return key - (1 << 64) if key >> 63 else key


def _splitmix(z: int) -> int:
    """SplitMix64 (Steele et al. 2014) of one 64-bit counter."""
    z = (z + _GOLDEN) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * _MIX1) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * _MIX2) & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)


def uniform_reference(key: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """key int64 [T, 1], token int64 [V] -> fp32 in (0, 1) [T, V]: 24 bits of two 32-bit finalisers, one per half of key."""
    word = 0xFFFFFFFF
    h = ((token * 0x9E3779B1) & word) ^ (key & word)
    for shifts, factors, then in (((16, 13, 16), (0x85EBCA6B, 0xC2B2AE35), (key >> 32) & word),
                                  ((16, 15, 16), (0x7FEB352D, 0x846CA68B), 0)):  # fmt: skip
        for shift, factor in zip(shifts, (*factors, 1), strict=True):
            h = ((h ^ (h >> shift)) * factor) & word
        h = h ^ then
    return ((h >> 8).float() + 0.5) * 2.0**-24


def processed_logits_reference(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Logits fp32 [T, V] after penalties and grammar mask (forbidden: -inf)."""
    out = logits.float().clone()
    if rows.seen is not None:
        for t in range(len(out)):
            ids = rows.seen[t][rows.seen[t] >= 0].long()
            count = rows.counts[t][rows.seen[t] >= 0].float()
            value = out[t, ids]
            value = torch.where(value > 0, value / rows.repetition[t], value * rows.repetition[t])
            out[t, ids] = value - count * rows.frequency[t] - (count > 0) * rows.presence[t]
    if rows.mask is not None:
        token = torch.arange(out.shape[1], device=out.device)
        out[((rows.mask[:, token // 32] >> (token % 32)) & 1) == 0] = float("-inf")
    return out


def sample_reference(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, ...]:
    """The specification; as `sample`."""
    out = processed_logits_reference(logits, rows)
    token = torch.arange(out.shape[1], device=out.device)
    gumbel = -torch.log(-torch.log(uniform_reference(rows.key.unsqueeze(1), token)))
    chosen = torch.empty(len(out), dtype=torch.int32, device=out.device)
    threshold, lse = (torch.empty(len(out), dtype=torch.float32, device=out.device) for _ in range(2))
    for t, row in enumerate(out):
        temperature = float(rows.temperature[t])
        if temperature == 0:
            chosen[t], threshold[t], lse[t] = row.argmax(), row.max(), row.max()
            continue
        kept = row > float("-inf")
        k = int(rows.top_k[t])
        if 0 < k < len(row):
            kept &= row >= row.sort(descending=True).values[k - 1]
        scaled = row.double() / temperature
        p = torch.where(kept, torch.exp(scaled - scaled.max()), 0.0)
        if rows.top_p[t] < 1:
            order = row.masked_fill(~kept, float("-inf")).sort(descending=True, stable=True)
            mass = p[order.indices].cumsum(0)
            last = int((mass < float(rows.top_p[t]) * p.sum()).sum())
            kept &= row >= order.values[min(last, len(row) - 1)]
        kept &= p >= float(rows.min_p[t])
        threshold[t] = row[kept].min()
        lse[t] = torch.logsumexp(scaled[kept], 0)
        chosen[t] = torch.where(kept, row / temperature + gumbel[t], float("-inf")).argmax()
    logprob = torch.log_softmax(logits.float(), -1).gather(1, chosen.long().unsqueeze(1)).squeeze(1)
    return chosen, logprob, threshold, lse, out


def sample(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, ...]:
    """logits fp32 [T, V] -> (token int32 [T], its raw logprob fp32 [T], threshold fp32 [T], lse fp32 [T], processed [T, V]).

    The distribution that was drawn from is exp(l / temperature - lse) where l >= threshold, l the processed logit, else 0.
    One launch, one program a row. `processed` is `logits` itself where no penalty or mask changes it.
    """
    count, vocabulary = logits.shape
    logits = logits.contiguous()
    changed = rows.seen is not None or rows.mask is not None
    processed = torch.empty_like(logits) if changed else logits
    token = torch.empty(count, dtype=torch.int32, device=logits.device)
    logprob, threshold, lse = (torch.empty(count, dtype=torch.float32, device=logits.device) for _ in range(3))
    if count:
        unused = logits
        seen = rows.seen
        width = 0 if seen is None else seen.shape[1]
        _sample_kernel[(count,)](
            logits, processed, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.key,
            rows.mask if rows.mask is not None else unused, seen if seen is not None else unused,
            *(t if t is not None else unused for t in (rows.counts, rows.frequency, rows.presence, rows.repetition)),
            token, logprob, threshold, lse, vocabulary, width, 0 if rows.mask is None else rows.mask.stride(0),
            HAS_MASK=rows.mask is not None, HAS_SEEN=seen is not None, SEEN=max(16, next_power_of_2(width)),
            BLOCK=min(8192, max(256, next_power_of_2(vocabulary))), num_warps=16 if vocabulary > 8192 else 4,
        )  # fmt: skip
    return token, logprob, threshold, lse, processed


@triton.jit
def _uniform(key, token):
    """int64 key and tokens -> fp32 in (0, 1); see `uniform_reference`."""
    h = (token.to(tl.uint32) * 0x9E3779B1) ^ (key & 0xFFFFFFFF).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16) ^ ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    h = h ^ (h >> 16)
    return ((h >> 8).to(tl.int32).to(tl.float32) + 0.5) * 5.9604644775390625e-08


@triton.jit
def _sample_kernel(
    logits_ptr, processed_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, key_ptr, mask_ptr, seen_ptr, count_ptr,
    frequency_ptr, presence_ptr, repetition_ptr, token_ptr, logprob_ptr, threshold_ptr, lse_ptr, vocabulary, width, mask_stride,
    HAS_MASK: tl.constexpr, HAS_SEEN: tl.constexpr, SEEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    raw = logits_ptr + row * vocabulary
    logits = processed_ptr + row * vocabulary
    temperature = tl.load(temperature_ptr + row)

    # Raw log-sum-exp for logprobs, and the processed copy where anything changes.
    # Running values are kept per lane and reduced once: a reduction in every turn would cost more than the turn.
    lane_top = tl.full([BLOCK], float("-inf"), tl.float32)
    lane_sum = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, vocabulary, BLOCK, num_stages=3):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(raw + at, mask=at < vocabulary, other=float("-inf"))
        new_top = tl.maximum(tl.maximum(lane_top, x), -3.0e38)
        lane_sum = lane_sum * tl.exp(lane_top - new_top) + tl.exp(x - new_top)
        lane_top = new_top
        if HAS_SEEN or HAS_MASK:
            if HAS_MASK:
                word = tl.load(mask_ptr + row * mask_stride + at // 32, mask=at < vocabulary, other=0)
                x = tl.where(((word >> (at % 32)) & 1) == 1, x, float("-inf"))
            tl.store(logits + at, x, mask=at < vocabulary)
    raw_top = tl.max(lane_top, 0)
    raw_sum = tl.sum(lane_sum * tl.exp(lane_top - raw_top), 0)
    if HAS_SEEN:
        tl.debug_barrier()
        slot = tl.arange(0, SEEN)
        seen = tl.load(seen_ptr + row * width + slot, mask=slot < width, other=-1)
        count = tl.load(count_ptr + row * width + slot, mask=slot < width, other=0).to(tl.float32)
        value = tl.load(logits + seen, mask=seen >= 0, other=0.0)
        repetition = tl.load(repetition_ptr + row)
        value = tl.where(value > 0, value / repetition, value * repetition)
        value -= count * tl.load(frequency_ptr + row) + tl.where(count > 0, tl.load(presence_ptr + row), 0.0)
        tl.store(logits + seen, value, mask=seen >= 0)
    if HAS_SEEN or HAS_MASK:
        tl.debug_barrier()

    top = raw_top
    if HAS_SEEN or HAS_MASK:
        lane_top = tl.full([BLOCK], float("-inf"), tl.float32)
        for begin in tl.range(0, vocabulary, BLOCK, num_stages=3):
            at = begin + tl.arange(0, BLOCK)
            lane_top = tl.maximum(lane_top, tl.load(logits + at, mask=at < vocabulary, other=float("-inf")))
        top = tl.max(lane_top, 0)
    limit = tl.full([], 0x00800000, tl.uint32)  # the key of the lowest finite value: drops -inf
    greedy = temperature == 0
    inverse = 1 / tl.where(greedy, 1.0, temperature)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    if greedy:
        limit = sort_key(top)
    else:
        if top_k > 0 and top_k < vocabulary:
            kth, _ = kth_key(logits, vocabulary, top_k, BLOCK)
            limit = tl.maximum(limit, kth)
        if top_p < 1:
            target = top_p * _mass(logits, limit, top, inverse, vocabulary, BLOCK)
            found = tl.zeros([], tl.uint32)
            bit = tl.full([], 0x80000000, tl.uint32)
            for _ in range(32):
                trial = found | bit
                bit = bit >> 1
                if trial > limit:
                    if _mass(logits, trial, top, inverse, vocabulary, BLOCK) >= target:
                        found = trial
                else:
                    found = trial
            limit = tl.maximum(limit, found)
        if min_p > 0:
            limit = tl.maximum(limit, sort_key(top + tl.log(min_p) * temperature))

    # Draw among the kept; the first of equals.
    key = tl.load(key_ptr + row)
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
        score = x
        if not greedy:
            # Largest log(p) + Gumbel is largest p / exponential: the same draw for one logarithm less.
            score = share / -tl.log(_uniform(key, at.to(tl.int64)))
        better = kept & (score > lane_best)
        lane_best = tl.where(better, score, lane_best)
        lane_winner = tl.where(better, at, lane_winner)
    total = tl.sum(lane_sum, 0)
    lowest = tl.min(lane_low, 0)
    winner = tl.min(tl.where(lane_best == tl.max(lane_best, 0), lane_winner, vocabulary - 1), 0)
    tl.store(token_ptr + row, winner)
    tl.store(logprob_ptr + row, tl.load(raw + winner) - raw_top - tl.log(raw_sum))
    tl.store(threshold_ptr + row, lowest)
    tl.store(lse_ptr + row, tl.where(greedy, top, top * inverse + tl.log(total)))


@triton.jit
def _mass(logits, limit, top, inverse, vocabulary, BLOCK: tl.constexpr):
    """sum of exp((l - top) / temperature) over tokens whose key is at least limit."""
    lane = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, vocabulary, BLOCK, num_stages=3):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocabulary, other=float("-inf"))
        lane += tl.where(sort_key(x) >= limit, tl.exp((x - top) * inverse), 0.0)
    return tl.sum(lane, 0)


def verify_drafts_reference(
    drafts: torch.Tensor,
    target: tuple[torch.Tensor, ...],
    draft: tuple[torch.Tensor, ...],
    temperature: torch.Tensor,
    accept_key: torch.Tensor,
    residual_key: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification; shapes as in `verify_drafts`."""
    count, steps = drafts.shape
    accepted = torch.zeros(count, dtype=torch.int32, device=drafts.device)
    following = torch.empty(count, dtype=torch.int32, device=drafts.device)
    token, threshold, lse, logits = target
    vocabulary = torch.arange(logits.shape[-1], device=drafts.device)
    for b in range(count):
        for i in range(steps):
            t = b * (steps + 1) + i
            p = _probability(logits[t], threshold[t], lse[t], temperature[b])
            q = _probability(draft[2][b * steps + i], draft[0][b * steps + i], draft[1][b * steps + i], temperature[b])
            d = int(drafts[b, i])
            u = float(uniform_reference(accept_key[b, i].view(1, 1), torch.zeros_like(vocabulary[:1])))
            ok = d >= 0 and bool(d == int(token[t]) if temperature[b] == 0 else u * q[d] < p[d])
            if not ok:
                break
            accepted[b] += 1
        i = int(accepted[b])
        t = b * (steps + 1) + i
        following[b] = token[t]
        if i < steps and drafts[b, i] >= 0 and temperature[b] != 0:
            p = _probability(logits[t], threshold[t], lse[t], temperature[b])
            q = _probability(draft[2][b * steps + i], draft[0][b * steps + i], draft[1][b * steps + i], temperature[b])
            gumbel = -torch.log(-torch.log(uniform_reference(residual_key[b, i].view(1, 1), vocabulary)))[0]
            score = torch.log((p - q).clamp_min(0)) + gumbel
            following[b] = score.argmax() if score.max() > float("-inf") else token[t]
    return accepted, following


def _probability(logits, threshold, lse, temperature):
    scale = 1.0 if temperature == 0 else float(temperature)
    return torch.where(logits >= threshold, torch.exp(logits / scale - lse), 0.0)


def verify_drafts(
    drafts: torch.Tensor,
    target: tuple[torch.Tensor, ...],
    draft: tuple[torch.Tensor, ...],
    temperature: torch.Tensor,
    accept_key: torch.Tensor,
    residual_key: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many drafts of each sequence hold, and the token after them.

    drafts int32 [B, s], -1 behind a shorter draft; target (token int32, threshold, lse fp32 [B (s + 1)], processed logits
    fp32 [B (s + 1), V]) as `sample` gave them for the verified rows; draft (threshold, lse fp32 [B s], processed logits
    fp32 [B s, V]) of the distributions that the drafts were drawn from; temperature fp32 [B] of both; keys int64 [B, s].
    Returns accepted int32 [B] and following int32 [B]: the residual draw after a rejection, the target's own draw behind
    the last draft. Two launches.
    """
    count, steps = drafts.shape
    accepted, following = (torch.empty(count, dtype=torch.int32, device=drafts.device) for _ in range(2))
    if count:
        token, threshold, lse, logits = target
        vocabulary = logits.shape[-1]
        _accept_kernel[(count,)](
            drafts, token, threshold, lse, logits, *draft, temperature, accept_key, accepted, following, vocabulary,
            STEPS=steps, num_warps=1,
        )  # fmt: skip
        _residual_kernel[(count,)](
            drafts, threshold, lse, logits, *draft, temperature, residual_key, accepted, following, vocabulary,
            STEPS=steps, BLOCK=min(8192, max(256, next_power_of_2(vocabulary))), num_warps=8,
        )  # fmt: skip
    return accepted, following


@triton.jit
def _accept_kernel(
    draft_ptr, token_ptr, threshold_ptr, lse_ptr, logits_ptr, q_threshold_ptr, q_lse_ptr, q_logits_ptr, temperature_ptr,
    key_ptr, accepted_ptr, following_ptr, vocabulary, STEPS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + b)
    greedy = temperature == 0
    inverse = 1 / tl.where(greedy, 1.0, temperature)
    accepted = tl.zeros([], tl.int32)
    going = tl.full([], 1, tl.int32)
    for i in range(STEPS):
        t = b * (STEPS + 1) + i
        d = tl.load(draft_ptr + b * STEPS + i)
        at = tl.maximum(d, 0)
        x = tl.load(logits_ptr + t * vocabulary + at)
        y = tl.load(q_logits_ptr + (b * STEPS + i) * vocabulary + at)
        p = tl.where(x >= tl.load(threshold_ptr + t), tl.exp(x * inverse - tl.load(lse_ptr + t)), 0.0)
        q_at = b * STEPS + i
        q = tl.where(y >= tl.load(q_threshold_ptr + q_at), tl.exp(y * inverse - tl.load(q_lse_ptr + q_at)), 0.0)
        u = _uniform(tl.load(key_ptr + q_at), tl.zeros([], tl.int64))
        ok = tl.where(greedy, d == tl.load(token_ptr + t), u * q < p) & (d >= 0)
        going = tl.where(ok, going, 0)
        accepted += going
    tl.store(accepted_ptr + b, accepted)
    tl.store(following_ptr + b, tl.load(token_ptr + b * (STEPS + 1) + accepted))


@triton.jit
def _residual_kernel(
    draft_ptr, threshold_ptr, lse_ptr, logits_ptr, q_threshold_ptr, q_lse_ptr, q_logits_ptr, temperature_ptr, key_ptr,
    accepted_ptr, following_ptr, vocabulary, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    i = tl.load(accepted_ptr + b)
    temperature = tl.load(temperature_ptr + b)
    if i >= STEPS:
        return
    if temperature == 0:
        return
    if tl.load(draft_ptr + b * STEPS + i) < 0:
        return
    inverse = 1 / temperature
    t = b * (STEPS + 1) + i
    q_at = b * STEPS + i
    threshold, lse = tl.load(threshold_ptr + t), tl.load(lse_ptr + t)
    q_threshold, q_lse = tl.load(q_threshold_ptr + q_at), tl.load(q_lse_ptr + q_at)
    key = tl.load(key_ptr + q_at)
    best = tl.full([], float("-inf"), tl.float32)
    winner = tl.zeros([], tl.int32) - 1
    for begin in tl.range(0, vocabulary, BLOCK, num_stages=3):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + t * vocabulary + at, mask=at < vocabulary, other=float("-inf"))
        y = tl.load(q_logits_ptr + q_at * vocabulary + at, mask=at < vocabulary, other=float("-inf"))
        p = tl.where(x >= threshold, tl.exp(x * inverse - lse), 0.0)
        q = tl.where(y >= q_threshold, tl.exp(y * inverse - q_lse), 0.0)
        rest = tl.where(at < vocabulary, p - q, 0.0)
        score = tl.where(rest > 0, rest / -tl.log(_uniform(key, at.to(tl.int64))), float("-inf"))
        here = tl.max(score, 0)
        if here > best:
            best = here
            winner = begin + tl.argmax(score, 0)
    if winner >= 0:
        tl.store(following_ptr + b, winner)
