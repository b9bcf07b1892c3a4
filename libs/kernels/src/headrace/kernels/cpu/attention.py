"""Attention of single rows over a window ring and selected entries with a sink, one loop for all rows (V4.1, fp32).

Knows rings and softmax; does not know layers, blocks or how entries were chosen.
"""

from __future__ import annotations

import math

import numpy as np

from .rows import compiled, dot


@compiled
def attend_rows(q, fresh, ring, bases, positions, floors, window, ring_rows, sink, scale, selected, chosen, out):
    """out [T, H, D]: each row over its own window KV and `selected` [T, K, D], without those whose chosen [T, K] is below 0.

    q [T, H, D]; fresh [T, D]: the row's own KV; ring [cells, D]: the KV of an earlier position p of row t lies in cell
    bases[t] + p % ring_rows; positions max(floors[t], positions[t] - window + 1) and on are seen. sink [H]: in the denominator
    only. K may be 0.
    """
    heads, dim, most = q.shape[1], q.shape[2], selected.shape[1]
    keys, weights = np.empty((window + most, dim), np.float32), np.empty(window + most, np.float32)
    for t in range(q.shape[0]):
        count = 0
        for p in range(max(floors[t], positions[t] - window + 1, 0), positions[t]):
            keys[count] = ring[bases[t] + p % ring_rows]
            count += 1
        keys[count] = fresh[t]
        count += 1
        for k in range(most):
            if chosen[t, k] >= 0:
                keys[count] = selected[t, k]
                count += 1
        for h in range(heads):
            highest = sink[h]
            for k in range(count):
                weights[k] = dot(q[t, h], keys[k]) * scale
                highest = max(highest, weights[k])
            total = np.float32(math.exp(sink[h] - highest))
            line = out[t, h]
            line[:] = 0
            for k in range(count):
                share = np.float32(math.exp(weights[k] - highest))
                total += share
                key = keys[k]
                for i in range(dim):
                    line[i] += share * key[i]
            for i in range(dim):
                line[i] /= total
