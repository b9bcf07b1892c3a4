"""Rounding to small float formats in groups with a power-of-two scale, in one pass: bit for bit what the reference in
`headrace.kernels.quantize` gives."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

_EXPONENT = np.uint32(0x7F800000)
exact = njit(nogil=True, cache=True)  # no reordering, no reciprocals: the same bits


@exact
def round_groups(x, group, mantissa_bits, smallest_normal, largest, floor, out):
    """x, out fp32 [N]: each group of values divided by ceil_power_of_two(max / largest), rounded to `mantissa_bits` (ties to
    even, saturating), and back. `floor`: least maximum of a group."""
    inverse = np.float32(1.0 / largest)
    for start in range(0, x.shape[0], group):
        most = np.float32(floor)
        for i in range(start, start + group):
            most = max(most, abs(x[i]))
        bits = (np.float32(most * inverse).view(np.uint32) + np.uint32(0x7FFFFF)) & _EXPONENT
        scale = np.uint32(bits).view(np.float32)
        for i in range(start, start + group):
            value = x[i] / scale
            if value != value:
                out[i] = value
                continue
            magnitude = min(abs(value), np.float32(largest))
            above = np.float32(max(magnitude, np.float32(smallest_normal)))
            step = np.uint32((above.view(np.uint32) & _EXPONENT) - np.uint32(mantissa_bits << 23)).view(np.float32)
            out[i] = math.copysign(np.float32(np.rint(magnitude / step) * step) * scale, value)
