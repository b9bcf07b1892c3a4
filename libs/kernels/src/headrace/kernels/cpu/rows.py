"""Products, norms and small parts on rows, as numba functions that other compiled loops call.

bf16 values are uint16 arrays of the same bits; sums are fp32. Rows: x [R, in]. Knows arithmetic; does not know layers.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit

# Sums may be reordered (that is what vector lanes need); NaN and infinity keep their meaning.
FAST = {"reassoc", "contract", "arcp", "nsz"}
compiled = njit(nogil=True, cache=True, fastmath=FAST)
inlined = njit(nogil=True, cache=True, fastmath=FAST, inline="always")


def bits16(tensor: torch.Tensor) -> np.ndarray:
    """A bf16 CPU tensor as uint16 numpy array on the same memory."""
    return tensor.view(torch.int16).numpy().view(np.uint16)


@inlined
def widen(value):
    """bf16 bits -> fp32."""
    return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


@inlined
def narrow(value):
    """fp32 -> bf16 bits, to nearest even; for finite values."""
    bits = np.float32(value).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@compiled
def product(x, weight, out):
    """out[r, o] = x[r] . weight[o]: x fp32 [R, in], weight bf16 bits [out, in], out fp32 [R, >= out].

    A tile of two outputs and four rows: a weight is widened once and each load serves several sums. A single row reads every
    weight once and keeps none.
    """
    rows, width = x.shape
    outs = weight.shape[0]
    if rows == 1:
        for o in range(outs):
            total = np.float32(0)
            for i in range(width):
                total += widen(weight[o, i]) * x[0, i]
            out[0, o] = total
        return
    first, second = np.empty(width, np.float32), np.empty(width, np.float32)
    for o in range(0, outs, 2):
        other = min(o + 1, outs - 1)  # an odd last output is computed twice
        for i in range(width):
            first[i], second[i] = widen(weight[o, i]), widen(weight[other, i])
        whole = rows // 4 * 4
        for r in range(0, whole, 4):
            x0, x1, x2, x3 = x[r], x[r + 1], x[r + 2], x[r + 3]
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
            for i in range(width):
                f, s = first[i], second[i]
                v0, v1, v2, v3 = x0[i], x1[i], x2[i], x3[i]
                a0 += f * v0
                a1 += f * v1
                a2 += f * v2
                a3 += f * v3
                b0 += s * v0
                b1 += s * v1
                b2 += s * v2
                b3 += s * v3
            out[r, o], out[r + 1, o], out[r + 2, o], out[r + 3, o] = a0, a1, a2, a3
            out[r, other], out[r + 1, other], out[r + 2, other], out[r + 3, other] = b0, b1, b2, b3
        for r in range(whole, rows):
            row = x[r]
            a0 = b0 = np.float32(0)
            for i in range(width):
                a0 += first[i] * row[i]
                b0 += second[i] * row[i]
            out[r, o], out[r, other] = a0, b0


@compiled
def dot(x, y):
    """fp32 vectors of one length."""
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * y[i]
    return total


@compiled
def rms_norm(x, weight, eps, out):
    """out = weight * x / rms(x): fp32 vectors."""
    width = x.shape[0]
    scale = np.float32(1.0 / math.sqrt(dot(x, x) / width + eps))
    for i in range(width):
        out[i] = x[i] * scale * weight[i]


@compiled
def rotate(x, turn):
    """Turn adjacent pairs of x [2 n] in place by complex numbers `turn` [n, 2] (real, imaginary)."""
    for i in range(turn.shape[0]):
        real, imaginary = x[2 * i], x[2 * i + 1]
        x[2 * i] = real * turn[i, 0] - imaginary * turn[i, 1]
        x[2 * i + 1] = real * turn[i, 1] + imaginary * turn[i, 0]


@compiled
def silu_product(wide, inter, out):
    """out[r, i] = silu(gate) * up: wide [R, 2 I], gate first."""
    for r in range(out.shape[0]):
        for i in range(inter):
            gate = wide[r, i]
            out[r, i] = gate / (np.float32(1) + np.float32(math.exp(-gate))) * wide[r, inter + i]


@compiled
def softmax(x):
    """In place over a vector."""
    most = x[0]
    for i in range(1, x.shape[0]):
        most = max(most, x[i])
    total = np.float32(0)
    for i in range(x.shape[0]):
        x[i] = np.float32(math.exp(x[i] - most))
        total += x[i]
    scale = np.float32(1) / total
    for i in range(x.shape[0]):
        x[i] *= scale


@compiled
def best(values, count, chosen):
    """chosen[:count] = places of the `count` largest values, largest first, the lower place first among equals. Overwrites
    those values by -inf."""
    for k in range(count):
        at = 0
        for i in range(1, values.shape[0]):
            if values[i] > values[at]:
                at = i
        chosen[k] = at
        values[at] = -np.inf
