"""The compiled loops against the same sums in numpy, over shapes that are not multiples of any tile."""

import numpy as np
import pytest
import torch

from headrace.kernels import cpu

if not cpu.available():
    pytest.skip("numba is not installed", allow_module_level=True)

from headrace.kernels.cpu import rows


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9, 17])
@pytest.mark.parametrize(("outs", "width"), [(1, 1), (3, 7), (8, 64), (33, 130)])
def test_product(count, outs, width):
    x, weight = draw(count, width), torch.from_numpy(draw(outs, width, seed=1)).bfloat16()
    out = np.full((count, outs + 2), 7, np.float32)
    rows.product(x, rows.bits16(weight), out)
    np.testing.assert_allclose(out[:, :outs], x @ weight.float().numpy().T, atol=1e-4)
    assert (out[:, outs:] == 7).all()


def test_rounding_is_to_nearest_even_like_torch():
    values = torch.cat([torch.randn(10_000), torch.tensor([0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 3e38, 1e-40])])

    @rows.compiled
    def narrowed(x, out):
        for i in range(x.shape[0]):
            out[i] = rows.narrow(x[i])

    out = np.empty(len(values), np.uint16)
    narrowed(values.numpy(), out)
    assert (out == rows.bits16(values.bfloat16())).all()


@pytest.mark.parametrize("width", [1, 5, 64, 257])
def test_norm_and_softmax(width):
    x, weight, out = draw(width), draw(width, seed=1), np.empty(width, np.float32)
    rows.rms_norm(x, weight, 1e-6, out)
    expected = torch.rms_norm(torch.from_numpy(x), (width,), torch.from_numpy(weight), 1e-6)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    y = 30 * x
    rows.softmax(y)
    np.testing.assert_allclose(y, torch.softmax(torch.from_numpy(30 * x), 0), rtol=1e-5, atol=1e-7)


def test_best_takes_the_lower_place_among_equals():
    values, chosen = np.array([1, 3, 2, 3, -np.inf, 3], np.float32), np.empty(4, np.int64)
    rows.best(values, 4, chosen)
    assert chosen.tolist() == [1, 3, 5, 2]


@pytest.mark.parametrize("heads", [(), (3,)])
def test_no_rows_are_no_error(heads):
    from headrace.engine.models.v41.layers import rotate

    with torch.inference_mode():
        x = torch.zeros(0, *heads, 32)
        assert rotate(x, torch.zeros(0, 8, dtype=torch.complex64)).shape == (0, *heads, 32)
