"""What lies between the products of a chunk, compiled: norms, rotation, routing, and the experts' sums, on bf16 rows.

The products of a chunk are the matrix library's; each of these would be five to fifteen torch operators on the same rows. Bits
are uint16 arrays of bf16, rounded where the torch path rounds.
"""

from __future__ import annotations

import math

import numpy as np

from headrace.kernels.cpu.rows import compiled, narrow, widen

from .fused_loops import dims, route

__all__ = ["collect", "deal", "dims", "latents", "norm", "rotate_heads"]


@compiled
def norm(x, begin, width, weight, eps, out):
    """out[r] = weight * x[r, begin : begin + width] / rms: bf16 bits, rounded before the weight and after it."""
    for r in range(x.shape[0]):
        row, total = x[r], np.float32(0)
        for i in range(width):
            value = widen(row[begin + i])
            total += value * value
        scale = np.float32(1.0 / math.sqrt(total / width + eps))
        for i in range(width):
            out[r, i] = narrow(widen(narrow(widen(row[begin + i]) * scale)) * widen(weight[i]))


@compiled
def turn_pairs(x, begin, turns, r, out, at):
    """Rotate adjacent pairs of x[r, begin:] by turns [R, n, 2] into out[r, at:]."""
    for i in range(turns.shape[1]):
        real, imaginary = widen(x[r, begin + 2 * i]), widen(x[r, begin + 2 * i + 1])
        c, s = turns[r, i, 0], turns[r, i, 1]
        out[r, at + 2 * i] = narrow(real * c - imaginary * s)
        out[r, at + 2 * i + 1] = narrow(real * s + imaginary * c)


@compiled
def rotate_heads(queries, head, nope, turns):
    """The rotary part of every head of queries [R, heads * head], in place."""
    for r in range(queries.shape[0]):
        for start in range(0, queries.shape[1], head):
            turn_pairs(queries, start + nope, turns, r, queries, start + nope)


@compiled
def latents(first, begin, rank, weight, eps, turns, out):
    """first[:, begin:] = compressed KV and rotary key -> out [R, rank + rope]: normed, rotated."""
    norm(first, begin, rank, weight, eps, out)
    for r in range(first.shape[0]):
        turn_pairs(first, begin + rank, turns, r, out, rank)


@compiled
def deal(x, gate, bias, d, weights, place, counts, sorted_rows):
    """Route rows x [R, hidden] and sort copies of them by expert.

    Filled: weights fp32 [R, k], place int64 [R, k] (where a row's k-th copy lies in sorted_rows [R * k, hidden]), counts int64
    [experts].
    """
    rows, hidden = x.shape
    chosen, wide = np.empty((rows, d.top_k), np.int64), np.empty(hidden, np.float32)
    counts[:] = 0
    for r in range(rows):
        for i in range(hidden):
            wide[i] = widen(x[r, i])
        route(wide, gate, bias, d, chosen[r], weights[r])
        for k in range(d.top_k):
            counts[chosen[r, k]] += 1
    following = np.empty(d.experts, np.int64)
    begin = 0
    for e in range(d.experts):
        following[e] = begin
        begin += counts[e]
    for r in range(rows):
        for k in range(d.top_k):
            at = following[chosen[r, k]]
            following[chosen[r, k]] += 1
            place[r, k] = at
            sorted_rows[at] = x[r]


@compiled
def collect(outputs, place, weights, shared, out):
    """out[r] = sum_k weights[r, k] * outputs[place[r, k]], rounded, + shared[r]. `shared` may have no rows."""
    rows, hidden = out.shape
    total = np.empty(hidden, np.float32)
    for r in range(rows):
        total[:] = 0
        for k in range(place.shape[1]):
            row, share = outputs[place[r, k]], weights[r, k]
            for i in range(hidden):
                total[i] += share * widen(row[i])
        if shared.shape[0]:
            for i in range(hidden):
                out[r, i] = narrow(widen(narrow(total[i])) + widen(shared[r, i]))
        else:
            for i in range(hidden):
                out[r, i] = narrow(total[i])
