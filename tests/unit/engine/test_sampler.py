"""Sampling: against a reference written with sorts in plain numpy, against distributions, and alone against in a batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import rng, sampler
from headrace.engine.api import SamplingParams
from headrace.engine.sampler import Draw, sample

EOS = (1,)


def draw(position=10, choice=0, ids=(), prompt_len=None, **params) -> Draw:
    ids = list(ids)
    return Draw(SamplingParams(**params), choice, position, ids, len(ids) if prompt_len is None else prompt_len)


def tokens(logits, draws) -> list[int]:
    return [chosen.token for chosen in sample(logits, draws, EOS)]


# ---------------------------------------------------------------- noise


def test_known_vectors():
    """SplitMix64 from state 1234567, as published with the generator, and a key that must never change."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    state = rng.keys([1234567])
    mask = (1 << 64) - 1
    assert [rng.mix((1234567 + (i + 1) * 0x9E3779B97F4A7C15) & mask) for i in range(4)] == expected
    got = rng.uniform(state, torch.arange(4))
    assert got.tolist() == [((value >> 11) + 0.5) * 2.0**-53 for value in expected]
    assert rng.key(7, 0, 100, rng.Purpose.SAMPLE) == 16516224725315883288


def test_keys_differ_in_every_part():
    seen = {
        rng.key(seed, choice, position, purpose)
        for seed in (0, 1, 2**63, 2**64 - 1)
        for choice in range(4)
        for position in range(50)
        for purpose in rng.Purpose
    }
    assert len(seen) == 4 * 4 * 50 * 4


def test_uniforms_are_uniform_and_independent_between_streams():
    streams = rng.keys([rng.key(3, 0, position, rng.Purpose.SAMPLE) for position in range(200)]).unsqueeze(-1)
    values = rng.uniform(streams, torch.arange(500))
    assert values.min() > 0 and values.max() < 1
    counts = torch.histc(values.float(), bins=64, min=0, max=1)
    chi = float(((counts - values.numel() / 64) ** 2 / (values.numel() / 64)).sum())
    assert chi < 63 + 5 * math.sqrt(2 * 63)
    correlation = torch.corrcoef(values)
    off = correlation - torch.eye(200)
    assert off.abs().max() < 6 / math.sqrt(500) and off.mean().abs() < 1e-3
    noise = rng.gumbel(streams, torch.arange(500))
    assert abs(noise.mean() - 0.5772) < 0.02 and abs(noise.var() - math.pi**2 / 6) < 0.05


# ---------------------------------------------------------------- distribution


@pytest.mark.parametrize(
    "params",
    [{"temperature": 1.0}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.8}],
)
def test_draws_follow_the_distribution(params):
    """Chi-square over 20,000 positions, alpha 1e-4."""
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0]])
    n = 20_000
    counts = np.zeros(8)
    for start in range(0, n, 2000):
        draws = [draw(position=start + i, seed=11, **params) for i in range(2000)]
        counts += np.bincount(tokens(logits.expand(2000, -1), draws), minlength=8)
    expected = reference_distribution(logits[0].numpy(), SamplingParams(**params)) * n
    assert (counts[expected == 0] == 0).all()
    inside = expected > 0
    chi = ((counts - expected)[inside] ** 2 / expected[inside]).sum()
    degrees = inside.sum() - 1
    assert chi < degrees + 3.72 * math.sqrt(2 * degrees) + 10


def reference_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, top-k, top-p, min-p, by sorting (lower id first among equals), float64."""
    scores = logits.astype(np.float64) / params.temperature
    order = np.lexsort((np.arange(len(scores)), -scores))
    keep = np.zeros(len(scores), dtype=bool)
    keep[order[: params.top_k or len(scores)]] = True
    p = np.where(keep, np.exp(scores - scores.max()), 0)
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    if params.top_p < 1:
        keep[order[(before >= params.top_p) & (np.arange(len(order)) > 0)]] = False
    keep &= scores >= scores.max() + (math.log(params.min_p) if params.min_p else -math.inf)
    p = np.where(keep, p, 0)
    return p / p.sum()


@settings(deadline=None, max_examples=100)
@given(
    st.integers(2, 60), st.integers(0, 10_000), st.sampled_from([0, 1, 2, 7, 50]), st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([0.5, 1.0, 2.0]), st.booleans(),
)  # fmt: skip
def test_a_draw_is_the_argmax_of_noise_over_the_allowed_set(vocab, seed, top_k, top_p, min_p, temperature, ties):
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=vocab).astype(np.float32) * 2
    if ties:
        logits = np.round(logits)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    p = reference_distribution(logits, params)
    stream = rng.keys([rng.key(seed, 2, 33, rng.Purpose.SAMPLE)])
    noise = rng.gumbel(stream, torch.arange(vocab)).numpy()
    with np.errstate(divide="ignore"):
        expected = int(np.argmax(np.where(p > 0, logits.astype(np.float64) / temperature, -np.inf) + noise))
    assert tokens(torch.from_numpy(logits)[None], [Draw(params, 2, 33, [], 0)]) == [expected]


def test_more_candidates_are_looked_at_when_the_mass_is_spread(monkeypatch):
    """A nearly flat row needs more than CANDIDATES for its top_p; the row beside it doesn't notice."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.cat([torch.randn(1, 4000, generator=generator) * 0.1, torch.randn(1, 4000, generator=generator) * 6])
    draws = [draw(seed=s, top_p=0.9, position=s) for s in range(2)]
    small = tokens(logits, draws)
    monkeypatch.setattr(sampler, "CANDIDATES", 4000)
    assert tokens(logits, draws) == small == [tokens(logits[i : i + 1], draws[i : i + 1])[0] for i in range(2)]


@settings(deadline=None, max_examples=60)
@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 1e6), top_p=st.floats(1e-300, 1), top_k=st.integers(0, 1 << 70), min_p=st.floats(0, 1),
        presence_penalty=st.floats(-2, 2), frequency_penalty=st.floats(-2, 2), repetition_penalty=st.floats(1e-3, 1e3),
        seed=st.integers(-(1 << 70), 1 << 70), max_tokens=st.just(9), min_tokens=st.integers(0, 9),
        stop_token_ids=st.lists(st.integers(-3, 1 << 70), max_size=3), ignore_eos=st.booleans(), logprobs=st.integers(-1, 1000),
    )
)  # fmt: skip
def test_no_accepted_parameters_break_a_step(params):
    params.check()
    ids = [3, 1 << 33, 5]
    one = sample(torch.linspace(-4, 9, 50)[None], [Draw(params, 0, 3, ids, 1)], (1, 60))[0]
    assert 0 <= one.token < 50 and (one.top is None) == (params.logprobs < 0)


# ---------------------------------------------------------------- rows don't see each other


@pytest.mark.parametrize("vocab", [281, 1000, 4099])
def test_a_row_is_bitwise_the_same_alone_and_in_any_batch(vocab):
    generator = torch.Generator().manual_seed(vocab)
    kinds = [
        {"temperature": 0.0}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.02}, {"top_k": 5, "top_p": 0.5},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5}, {"repetition_penalty": 1.3, "temperature": 0.0},
        {"min_tokens": 20, "max_tokens": 30},
    ]  # fmt: skip
    rows = 37
    logits = torch.randn(rows, vocab, generator=generator) * 3
    draws = [
        draw(position=i, seed=i * 7, choice=i % 3, ids=range(i % 11), prompt_len=i % 5, logprobs=i % 6, **kinds[i % len(kinds)])
        for i in range(rows)
    ]
    together = sample(logits, draws, EOS)
    order = torch.randperm(rows, generator=generator).tolist()
    shuffled = sample(logits[order], [draws[i] for i in order], EOS)
    for i in range(rows):
        assert sample(logits[i : i + 1].clone(), [draws[i]], EOS) == [together[i]]
        assert shuffled[order.index(i)] == together[i]


def test_logits_are_left_as_they_were_and_logprobs_are_of_the_raw_model():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    changes = {"temperature": 0.0, "repetition_penalty": 5.0, "max_tokens": 9, "min_tokens": 9}
    draws = [draw(ids=range(5), logprobs=k, **changes) for k in range(4)]
    chosen = sample(logits, draws, EOS)
    assert torch.equal(logits, before)
    raw = torch.log_softmax(before, -1)
    for row, one in enumerate(chosen):
        assert one.logprob == raw[row, one.token].item()
        values, ids = raw[row].topk(row)
        assert one.top == list(zip(ids.tolist(), values.tolist(), strict=True))
    assert sample(logits[:1], [draw()], EOS)[0].top is None


def test_ties_go_to_the_lower_id():
    logits = torch.zeros(3, 64)
    logits[:, 40:] = 1.0
    draws = [draw(temperature=0.0, logprobs=3), draw(top_k=2, logprobs=3), draw(top_p=1e-9, logprobs=3)]
    chosen = sample(logits, draws, EOS)
    assert chosen[0].token == 40 and chosen[1].token in (40, 41) and chosen[2].token == 40
    assert all([token for token, _ in one.top] == [40, 41, 42] for one in chosen)


def test_order_of_scores_as_integers_is_that_of_floats():
    values = torch.tensor([[-math.inf, -3.5, -0.0, 0.0, 1e-30, 2.0, math.inf, -1e-30]])
    assert sampler._best(values, 8)[0].tolist() == sorted(range(8), key=lambda i: (-values[0, i].item(), i))


# ---------------------------------------------------------------- penalties, forbidden tokens


def test_penalties_count_as_documented():
    logits = torch.tensor([[1.0, -1.0, 2.0, 0.5, 3.0, -2.0]])
    one = draw(ids=[0, 1, 5, 2, 2, 4], prompt_len=3, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    out = sampler._modify(logits, [one], ())
    expected = [1.0 / 2, -1.0 * 2, 2.0 / 2 - 0.5 - 2 * 0.25, 0.5, 3.0 / 2 - 0.5 - 0.25, -2.0 * 2]
    assert out[0].tolist() == pytest.approx(expected)
    assert sampler._modify(logits, [draw()], EOS) is logits, "nothing is copied when nobody asks"


def test_a_token_in_prompt_and_output_counts_its_output_only():
    out = sampler._modify(torch.zeros(1, 4), [draw(ids=[2, 2, 2, 2, 3], prompt_len=3, frequency_penalty=1.0)], ())
    assert out[0].tolist() == [0.0, 0.0, -1.0, -1.0]


def test_min_tokens_forbids_what_would_stop():
    logits = torch.tensor([[0.0, 9.0, 8.0, 7.0]])
    for made, expected in ((0, 3), (1, 3), (2, 1)):
        one = draw(ids=[0] * (4 + made), prompt_len=4, position=4 + made, temperature=0.0, min_tokens=2, stop_token_ids=[2])
        assert tokens(logits, [one]) == [expected]
    one = draw(ids=[0] * 4, prompt_len=4, position=4, temperature=0.0, min_tokens=2, ignore_eos=True)
    assert tokens(logits, [one]) == [1]
