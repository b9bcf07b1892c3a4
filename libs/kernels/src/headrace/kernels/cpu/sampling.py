"""One pass over a row of logits where torch needs several: the best few ids, and who can win a Gumbel-max draw.

Knows logits fp32 [R, V] and 64-bit keys. Does not know temperatures' meaning, requests or the noise's purpose; the noise is
`headrace.engine.rng`'s (SplitMix64 of key and id), whose constants are repeated here because a compiled loop can't call torch.
"""

from __future__ import annotations

import math

import numpy as np

from .rows import compiled

BLOCK = 512  # logits that are looked at with one bound
MOST = 2048  # candidates of a draw; a row with more is left to the caller
_SLACK = np.float32(1e-3)  # the bound's own rounding, in units of a score
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_LOG2_E = np.float32(1.4426951)


# ------------------------------------------------------------------ the best few


@compiled
def ordered(value):
    """fp32 -> uint32 that sorts like it; both zeros are one."""
    bits = np.float32(value + np.float32(0)).view(np.uint32)
    if bits == np.uint32(0x80000000):
        bits = np.uint32(0)
    return ~bits if bits >> np.uint32(31) else bits | np.uint32(0x80000000)


@compiled
def best_ids(values, out):
    """out[r] = ids of the W largest of values [R, V], largest first, the lower id first among equals: int64 [R, W].

    The upper 16 bits of each value are counted; whoever lies in the bin of the W-th or above is gathered and sorted.
    """
    rows, vocab = values.shape
    width = out.shape[1]
    counts = np.zeros(1 << 16, np.int64)
    for r in range(rows):
        counts[:] = 0
        row = values[r]
        for i in range(vocab):
            counts[ordered(row[i]) >> np.uint32(16)] += 1
        cut, above = (1 << 16) - 1, counts[(1 << 16) - 1]
        while above < width:
            cut -= 1
            above += counts[cut]
        keys = np.empty(above, np.int64)
        found = 0
        for i in range(vocab):
            key = ordered(row[i])
            if np.int64(key >> np.uint32(16)) >= cut:
                keys[found] = -((np.int64(key) << 31) + (vocab - 1 - i))  # ids are below 2^31
                found += 1
        keys.sort()
        for k in range(width):
            out[r, k] = vocab - 1 - ((-keys[k]) & ((np.int64(1) << 31) - 1))


# ------------------------------------------------------------------ Gumbel-max


@compiled
def random_bits(key, index):
    """64 bits of counter `index` in stream `key`, as in `rng.uniform`."""
    value = key + (np.uint64(index) + np.uint64(1)) * _GAMMA
    value = (value ^ (value >> np.uint64(30))) * _MIX1
    value = (value ^ (value >> np.uint64(27))) * _MIX2
    return value ^ (value >> np.uint64(31))


@compiled
def gumbel(key, index):
    """fp64, as `rng.gumbel`."""
    uniform = min((np.float64(random_bits(key, index) >> np.uint64(11)) + 0.5) * 2.0**-53, 1.0 - 2.0**-53)
    return -math.log(-math.log(uniform))


@compiled
def power_above(x):
    """At least 2^x for x <= 1: the line between powers of two. 0 far below, where no uniform can win."""
    bits = np.int32((min(max(x, np.float32(-100)), np.float32(1)) + np.float32(127)) * np.float32(1 << 23))
    return bits.view(np.float32)


@compiled
def may_win(row, start, stop, most, scale, lead, floor, key):
    """How many ids of [start, stop) could beat a leader that is `lead` above the best score.

    Id i wins iff gumbel_i > lead - (score_i - best), and then 1 - uniform_i < exp(score_i - best - lead).
    """
    hits = 0
    for i in range(start, stop):
        below = (row[i] - most) * scale
        reach = power_above((below - lead + _SLACK) * _LOG2_E)
        rest = np.float32(~random_bits(key, i) >> np.uint64(40)) * np.float32(2.0**-24)  # at most 1 - uniform
        hits += (rest <= reach) & (below >= floor)
    return hits


@compiled
def candidates(logits, best_of, temperatures, floors, keys, out):
    """Ids that hold the maximum of logits / temperature + gumbel, and a few others: out int64 [R, MOST], ascending, filled up
    with the first. -> how many each row has, int64 [R]; -1: more than MOST.

    best_of int64 [R]: the best id of each row. floors fp64 [R]: how far below the best a score may lie (min-p), -inf: any. keys
    uint64 [R]. The bound errs on the side of more candidates; a row's best id is always among them.
    """
    counts = np.zeros(logits.shape[0], np.int64)
    for r in range(logits.shape[0]):
        row, key = logits[r], keys[r]
        best = best_of[r]
        most = row[best]
        scale, floor = np.float32(1.0 / temperatures[r]), np.float32(floors[r]) - _SLACK
        lead = gumbel(key, best)
        count = 0
        for start in range(0, row.shape[0], BLOCK):
            stop = min(start + BLOCK, row.shape[0])
            inside = start <= best < stop
            if not inside and not may_win(row, start, stop, most, scale, np.float32(lead), floor, key):
                continue
            for i in range(start, stop):
                if i == best or may_win(row, i, i + 1, most, scale, np.float32(lead), floor, key):
                    if count == MOST:
                        break
                    out[r, count] = i
                    count += 1
                    lead = max(lead, (np.float64(row[i]) - np.float64(most)) / temperatures[r] + gumbel(key, i))
            if count == MOST:
                break
        out[r, count:] = out[r, 0]
        counts[r] = count if count < MOST else -1
    return counts
