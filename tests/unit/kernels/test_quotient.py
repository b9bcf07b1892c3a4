"""The corrected reciprocal of `quantize_kernels.quotient`, in numpy: the interpreter divides, so only a GPU runs the kernel's.

fp32 arithmetic is emulated in fp64; a fused multiply-add rounds once, by rounding its fp64 sum to odd first.
"""

import numpy as np
import pytest

F32 = np.float32


def fma(a, b, c):
    a, b, c = (np.asarray(v, F32).astype(np.float64) for v in (a, b, c))
    product = a * b  # exact: 48 bits
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    odd = (error != 0) & (total.view(np.int64) & 1 == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return (total.view(np.int64) + np.where(odd, step, 0)).view(np.float64).astype(F32)


def quotient(x, divisor, reciprocal):
    guess = x * reciprocal
    return fma(fma(-guess, divisor, x), reciprocal, guess)


def significands(bits, seed=0, count=None):
    """All fp32 in [1, 2) with so many bits behind the point, or some of them."""
    whole = np.arange(1 << bits) if count is None else np.random.default_rng(seed).integers(0, 1 << bits, count)
    return ((whole.astype(np.uint32) << np.uint32(23 - bits)) | np.uint32(0x3F800000)).view(F32)


def assert_divides(x, divisor):
    x, divisor = np.broadcast_arrays(x, divisor)
    ours, theirs = quotient(x, divisor, (F32(1) / divisor)), x / divisor
    assert np.array_equal(ours, theirs), (x[ours != theirs][:3], divisor[ours != theirs][:3])


def test_the_emulated_sum_rounds_once():
    a, b = F32(1 + 2**-23), F32(1 - 2**-23)
    assert fma([a], [b], [F32(-1)])[0] == F32(-(2.0**-46))
    assert fma([a], [F32(1 + 2**-23)], [F32(0)])[0] == F32(1 + 2**-22)


def test_reciprocals_of_e4m3_are_exact_after_one_step():
    """From any guess within four units of the last place, more than an approximate division is off."""
    divisor = significands(3)[:, None]
    exact = F32(1) / divisor
    guess = (exact.view(np.int32) + np.arange(-4, 5, dtype=np.int32)).view(F32)
    step = fma(fma(-guess, divisor, np.ones_like(guess)), guess, guess)
    assert np.array_equal(step, np.broadcast_to(exact, step.shape))


@pytest.mark.parametrize("bits", [7, 16])
def test_divisions_by_e4m3_and_by_six(bits):
    for divisor in (*significands(3), F32(6)):
        assert_divides(significands(bits), divisor)


def test_divisions_by_fp8_scales():
    """x bf16 over amax / 448 of every bf16 amax, then fp32 over any scale."""
    scale = significands(7) * F32(1 / 448)
    assert_divides(significands(7)[:, None], scale)
    assert_divides(significands(23, 1, 1 << 20), significands(23, 2, 1 << 20))
