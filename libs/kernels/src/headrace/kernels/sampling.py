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

from headrace.kernels import tuning
from headrace.kernels.sampling_split import residual_split, sample_split

PURPOSES = {"draw": 0, "accept": 1, "residual": 2, "draft": 3}
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclasses.dataclass
class SamplingRows:
    """Parameters of T rows, all on the device of the logits.

    temperature, top_p, min_p fp32 [T]; top_k int32 [T] (0: off); key int64 [T] from `noise_key`; mask int32 [T, ceil(V / 32)]
    of allowed tokens (bit v % 32 of word v // 32) or None; seen int32 [T, P] distinct token ids, -1 for none, with counts
    int32 [T, P] and frequency, presence, repetition fp32 [T], or all None. filters False promises that no row has top-k, top-p
    or min-p, which saves a launch where a row is cut into parts.
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
    filters: bool = True


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
    """key int64 [T, 1], token int64 [V] -> fp32 in (0, 1) [T, V]: 24 bits of two 32-bit finalisers, one per half of key.

    The largest would round to 1, whose noise is infinite: one draw in 130 of a vocabulary of 129,280 would have such a token.
    """
    word = 0xFFFFFFFF
    h = ((token * 0x9E3779B1) & word) ^ (key & word)
    for shifts, factors, then in (((16, 13, 16), (0x85EBCA6B, 0xC2B2AE35), (key >> 32) & word),
                                  ((16, 15, 16), (0x7FEB352D, 0x846CA68B), 0)):  # fmt: skip
        for shift, factor in zip(shifts, (*factors, 1), strict=True):
            h = ((h ^ (h >> shift)) * factor) & word
        h = h ^ then
    return (((h >> 8).float() + 0.5) * 2.0**-24).clamp_max(1 - 2.0**-24)


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
    Two launches, or three (see `sampling_split`). `processed` is `logits` itself where no penalty or mask changes it.
    """
    count, vocabulary = logits.shape
    logits = logits.contiguous()
    changed = rows.seen is not None or rows.mask is not None
    processed = torch.empty_like(logits) if changed else logits
    token = torch.empty(count, dtype=torch.int32, device=logits.device)
    logprob, threshold, lse = (torch.empty(count, dtype=torch.float32, device=logits.device) for _ in range(3))
    if count:
        sample_split(logits, processed, rows, (token, logprob, threshold, lse), tuning.sample())
    return token, logprob, threshold, lse, processed


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
        keys, config = (accept_key, residual_key), tuning.verify_drafts()
        residual_split(drafts, target, draft, temperature, keys, (accepted, following), config)
    return accepted, following
