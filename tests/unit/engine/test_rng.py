"""Noise: always finite, the same in torch and in the compiled loops."""

import math

import numpy as np
import pytest
import torch

from headrace.engine import rng

MASK = (1 << 64) - 1


def unmix(value: int) -> int:
    """Inverse of `rng.mix`."""

    def unshift(v: int, bits: int) -> int:
        out = v
        for _ in range(64 // bits):
            out = v ^ (out >> bits)
        return out

    value = unshift(value, 31) * pow(rng._MIX2, -1, 1 << 64) & MASK
    value = unshift(value, 27) * pow(rng._MIX1, -1, 1 << 64) & MASK
    return unshift(value, 30)


@pytest.mark.parametrize("bits", [MASK, MASK - (1 << 11), 0, 1 << 11])
def test_the_ends_of_the_range_are_inside_it(bits):
    stream = (unmix(bits) - rng._GAMMA) & MASK  # counter 0 of this stream gives these bits
    assert rng.mix((stream + rng._GAMMA) & MASK) == bits
    value = rng.uniform(rng.keys([stream]), torch.tensor([0]))
    assert 0.0 < float(value) < 1.0
    noise = float(rng.gumbel(rng.keys([stream]), torch.tensor([0])))
    assert math.isfinite(noise)
    loops = pytest.importorskip("headrace.kernels.cpu.sampling")
    assert loops.gumbel(np.uint64(stream), np.uint64(0)) == pytest.approx(noise, rel=1e-15)
