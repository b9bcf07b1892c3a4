"""Hyper-connections (single-pass mHC), norms and rotation on fp32 rows, as one loop each.

T rows, hc residual streams, d hidden size. A mix is forty normalisations of a 4x4 matrix: eighty torch operators of nothing.
"""

from __future__ import annotations

import math

import numpy as np

from .rows import compiled, softmax


@compiled
def mix(x, projected, base, scale, hc, norm_eps, eps, iterations, pre, post, comb):
    """Coefficients of a sublayer from its input streams x [T, hc * d] and their projection [T, 2 hc + hc^2], before the norm.

    base [2 hc + hc^2], scale [3]. Filled: pre, post [T, hc], comb [T, hc, hc].
    """
    for r in range(x.shape[0]):
        total = np.float32(0)
        for i in range(x.shape[1]):
            total += x[r, i] * x[r, i]
        inverse = np.float32(1.0 / math.sqrt(total / x.shape[1] + norm_eps))
        for i in range(hc):
            gate = base[i] + projected[r, i] * inverse * scale[0]
            pre[r, i] = np.float32(1) / (np.float32(1) + np.float32(math.exp(-gate))) + eps
            gate = base[hc + i] + projected[r, hc + i] * inverse * scale[1]
            post[r, i] = np.float32(2) / (np.float32(1) + np.float32(math.exp(-gate)))
        matrix = comb[r]
        for i in range(hc):
            for j in range(hc):
                at = (2 + i) * hc + j
                matrix[i, j] = base[at] + projected[r, at] * inverse * scale[2]
        balance(matrix, iterations, eps)


@compiled
def balance(matrix, iterations, eps):
    """Sinkhorn in place: softmax over rows, then columns and rows in turn are divided by their sums, columns last."""
    n = matrix.shape[0]
    for i in range(n):
        softmax(matrix[i])
        for j in range(n):
            matrix[i, j] += eps
    for step in range(2 * iterations - 1):
        for a in range(n):
            total = eps
            if step % 2 == 0:
                for b in range(n):
                    total += matrix[b, a]
                for b in range(n):
                    matrix[b, a] /= total
            else:
                for b in range(n):
                    total += matrix[a, b]
                for b in range(n):
                    matrix[a, b] /= total


@compiled
def expand(output, streams, post, comb, out):
    """out[t, k] = post[t, k] * output[t] + sum_j comb[t, j, k] * streams[t, j]: output [T, d], streams and out [T, hc, d]."""
    hc, d = streams.shape[1], streams.shape[2]
    for t in range(streams.shape[0]):
        for k in range(hc):
            line, share = out[t, k], post[t, k]
            for i in range(d):
                line[i] = share * output[t, i]
            for j in range(hc):
                stream, share = streams[t, j], comb[t, j, k]
                for i in range(d):
                    line[i] += share * stream[i]


@compiled
def collapse(streams, pre, out):
    """out[t] = sum_j pre[t, j] * streams[t, j]: [T, hc, d] -> [T, d]."""
    for t in range(streams.shape[0]):
        line = out[t]
        line[:] = 0
        for j in range(streams.shape[1]):
            stream, share = streams[t, j], pre[t, j]
            for i in range(line.shape[0]):
                line[i] += share * stream[i]


@compiled
def norm(x, weight, eps, out):
    """out = weight * x / rms(x) for every row of x [T, d]."""
    d = x.shape[1]
    for t in range(x.shape[0]):
        total = np.float32(0)
        for i in range(d):
            total += x[t, i] * x[t, i]
        scale = np.float32(1.0 / math.sqrt(total / d + eps))
        for i in range(d):
            out[t, i] = x[t, i] * scale * weight[i]


@compiled
def rotate(x, turns, sign):
    """Turn adjacent pairs of the last channels of x [T, H, D] by turns [T, n, 2], with sign -1 back, in place."""
    n = turns.shape[1]
    start = x.shape[2] - 2 * n
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            for i in range(n):
                real, imaginary = x[t, h, start + 2 * i], x[t, h, start + 2 * i + 1]
                c, s = turns[t, i, 0], turns[t, i, 1] * sign
                x[t, h, start + 2 * i] = real * c - imaginary * s
                x[t, h, start + 2 * i + 1] = real * s + imaginary * c
