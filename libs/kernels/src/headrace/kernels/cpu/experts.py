"""A mixture of experts on few fp32 rows: route, and each row through its experts, as one loop.

Weights are read where a model keeps them, w_in [2, E + 1, I, d] (gate, up) and w_out [d, E + 1, I]; the last expert is shared.
Knows V4.1's arithmetic (sqrt of softplus scores, clamped SwiGLU); does not know batches: the caller says when few is few.
"""

from __future__ import annotations

import math

import numpy as np

from .rows import best, compiled, dot


@compiled
def route(x, gate, bias, scale, chosen, weights):
    """Expert ids [T, k] and weights [T, k] of rows x [T, d]; gate [E, d]. The bias [E] chooses but does not weigh."""
    experts, top_k = gate.shape[0], chosen.shape[1]
    scores, choice = np.empty(experts, np.float32), np.empty(experts, np.float32)
    for t in range(x.shape[0]):
        for e in range(experts):
            z = dot(gate[e], x[t])
            scores[e] = np.float32(math.sqrt(max(z, np.float32(0)) + np.float32(math.log1p(math.exp(-abs(z))))))
            choice[e] = scores[e] + bias[e]
        best(choice, top_k, chosen[t])
        total = np.float32(1e-20)
        for k in range(top_k):
            total += scores[chosen[t, k]]
        for k in range(top_k):
            weights[t, k] = scores[chosen[t, k]] / total * scale


@compiled
def experts(x, chosen, weights, w_in, w_out, limit, out):
    """out [T, d] = sum over a row's experts of weight * expert(row), and the shared expert. Expert by expert, so that the
    weights of each are read once. A row may name an expert twice: then it counts twice."""
    rows, d = x.shape
    every, inter = w_in.shape[1], w_in.shape[2]
    out[:] = 0
    most = rows * max(chosen.shape[1], 1)
    mine, share, hidden = np.empty(most, np.int64), np.empty(most, np.float32), np.empty((most, inter), np.float32)
    for e in range(every):
        count = 0
        for t in range(rows):
            if e == every - 1:
                mine[count], share[count] = t, 1.0
                count += 1
            else:
                for k in range(chosen.shape[1]):
                    if chosen[t, k] == e:
                        mine[count], share[count] = t, weights[t, k]
                        count += 1
        if not count:
            continue
        for i in range(inter):
            for j in range(count):
                row = x[mine[j]]
                gate, up = np.float32(0), np.float32(0)
                g, u = w_in[0, e, i], w_in[1, e, i]
                for n in range(d):
                    gate += g[n] * row[n]
                    up += u[n] * row[n]
                gate, up = min(gate, limit), min(max(up, -limit), limit)
                hidden[j, i] = gate / (np.float32(1) + np.float32(math.exp(-gate))) * up * share[j]
        for n in range(d):
            weight = w_out[n, e]
            for j in range(count):
                line, total = hidden[j], np.float32(0)
                for i in range(inter):
                    total += weight[i] * line[i]
                out[mine[j], n] += total
