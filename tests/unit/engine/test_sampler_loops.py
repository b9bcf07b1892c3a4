"""The compiled loops of the sampler choose what the plain torch code chooses, id for id."""

import math

import numpy as np
import pytest
import torch

from headrace.engine import rng, sampler
from headrace.engine.api import SamplingParams
from headrace.kernels import cpu

if not cpu.available():
    pytest.skip("numba is not installed", allow_module_level=True)

from headrace.kernels.cpu import sampling


def rows(kind, count, vocab, seed):
    """Logits that are spread, peaked, flat, full of ties, or mostly forbidden."""
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed))
    if kind == "peaked":
        return logits * 20
    if kind == "flat":
        return logits * 1e-4
    if kind == "ties":
        return (logits * 2).round()
    if kind == "forbidden":
        return logits.masked_fill(torch.arange(vocab) % 7 != 3, -math.inf)
    return logits * 3


@pytest.mark.parametrize("kind", ["spread", "peaked", "flat", "ties", "forbidden"])
@pytest.mark.parametrize("vocab", [5, 511, 512, 4099, 129_280])
def test_the_same_draws(kind, vocab):
    count = 40 if vocab < 10_000 else 6
    logits = rows(kind, count, vocab, vocab)
    draws = [
        sampler.Draw(
            SamplingParams(seed=100 * vocab + i, temperature=(1.0, 0.6, 2.5, 0.01)[i % 4], min_p=(0.0, 0.1, 0.0)[i % 3]),
            i % 2, 10 + i, [1, 2], 2,
        )
        for i in range(count)
    ]  # fmt: skip
    before = logits.clone()
    ours = sampler._draw_from_few(sampling, logits, draws)
    assert ours == sampler._draw_all(logits, draws)
    assert torch.equal(before, logits)


def test_the_noise_is_the_same_noise():
    keys = [rng.key(seed, 1, 7, rng.Purpose.SAMPLE) for seed in range(3)]
    theirs = rng.gumbel(rng.keys(keys).unsqueeze(-1), torch.arange(1000)).numpy()
    ours = [[sampling.gumbel(np.uint64(key), i) for i in range(1000)] for key in keys]
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_bound_is_never_below():
    x = np.concatenate([np.linspace(-60, 1, 4001), -np.logspace(-6, 2, 300)]).astype(np.float32)
    above = np.array([sampling.power_above(np.float32(value)) for value in x], np.float64)
    exact = 2.0 ** np.clip(x.astype(np.float64), -100, 1)
    assert (above >= exact * (1 - 1e-5)).all()  # _SLACK covers the rounding of the rest
    assert (above <= exact * 1.07).all()


@pytest.mark.parametrize("kind", ["spread", "peaked", "flat", "ties", "forbidden"])
@pytest.mark.parametrize(("vocab", "width"), [(5, 5), (300, 1), (4099, 100), (4099, 4099), (129_280, 1024)])
def test_the_same_best_few(kind, vocab, width, monkeypatch):
    values = rows(kind, 3, vocab, width)
    values[0, : vocab // 2] = -0.0  # equal to 0
    values[0, vocab // 2 :] = values[0, vocab // 2 :].clamp_min(0)
    ours = sampler._best(values, width)
    monkeypatch.setattr(sampler, "_loops", lambda logits: None)
    assert torch.equal(ours, sampler._best(values, width))
