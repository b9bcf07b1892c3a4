"""The compiled loops of V4.1 against the torch code that they stand beside, over shapes, and where they must not run."""

import math

import numpy as np
import pytest
import torch

from headrace.engine.models.v41 import layers
from headrace.engine.models.v41.attention import attend
from headrace.engine.models.v41.moe import MoE
from headrace.kernels import cpu, quantize

if not cpu.available():
    pytest.skip("numba is not installed", allow_module_level=True)

from headrace.kernels.cpu.attention import attend_rows


class Config:
    hc_mult, hc_eps, hc_sinkhorn_iters, rms_norm_eps = 4, 1e-6, 20, 1e-20
    swiglu_limit, routed_scaling_factor = 1.0, 1.5

    def __init__(self, hidden=32, inter=12):
        self.hidden_size, self.moe_intermediate_size = hidden, inter


def draw(*shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def without_loops(monkeypatch, call):
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "available", lambda: False)
        with torch.no_grad():
            return call()


def close(ours, theirs, tolerance=2e-6):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize(("hc", "d"), [(4, 32), (2, 5), (4, 257)])
def test_hyper_connections(rows, hc, d, monkeypatch):
    config = Config()
    config.hc_mult = hc
    mixes = 2 * hc + hc * hc
    streams, fn, base = draw(rows, hc, d), draw(mixes, hc * d, seed=1, scale=1 / math.sqrt(d)), draw(mixes, seed=2)
    scale, output, weight = torch.tensor([0.7, 1.3, 2.0]), draw(rows, d, seed=3), draw(d, seed=4)

    def call():
        pre, post, comb = layers.mix(streams, fn, base, scale, config)
        norm = layers.RMSNorm(d, 1e-6)
        norm.weight.data = weight
        collapsed = layers.collapse(streams, pre)
        return pre, post, comb, layers.expand(output, streams, post, comb), collapsed, norm(collapsed), norm(streams)

    with torch.inference_mode():
        ours = call()
    for one, other in zip(ours, without_loops(monkeypatch, call), strict=True):
        close(one, other)
    assert float((ours[2].sum(1) - 1).abs().max()) < 1e-3  # columns last


@pytest.mark.parametrize("shape", [(1, 8), (5, 3, 16), (7, 1, 10)])
@pytest.mark.parametrize("back", [False, True])
def test_rotation(shape, back, monkeypatch):
    angles = draw(shape[0], 3, seed=5)
    phases = torch.polar(torch.ones_like(angles), angles)
    turns = phases.conj() if back else phases
    with torch.inference_mode():
        ours = layers.rotate(draw(*shape), turns)
    close(ours, without_loops(monkeypatch, lambda: layers.rotate(draw(*shape), turns)))


@pytest.mark.parametrize("round_", [quantize.round_fp8_ue8m0, quantize.round_fp4_ue8m0])
@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 300.0, 1e30])
def test_rounding_has_the_same_bits(round_, scale, monkeypatch):
    x = draw(40, 64, scale=scale)
    x[0], x[1, :3], x[2, 5] = 0.0, torch.tensor([-0.0, 448.0, -1e9]), math.nan
    ours = round_(x)
    theirs = without_loops(monkeypatch, lambda: round_(x))
    assert torch.equal(ours[3:].view(torch.int32), theirs[3:].view(torch.int32))
    assert torch.equal(ours[:2].view(torch.int32), theirs[:2].view(torch.int32))
    assert ours[2, 5].isnan() and theirs[2, 5].isnan()


@pytest.mark.parametrize("rows", [1, 3, 32])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 2), (16, 4)])
def test_experts(rows, experts, top_k, monkeypatch):
    moe = MoE(Config(), experts, top_k).requires_grad_(False)
    for seed, parameter in enumerate(moe.parameters()):
        parameter.data = draw(*parameter.shape, seed=seed, scale=0.5)
    x = draw(rows, 32, seed=9)
    with torch.inference_mode():
        ours = moe(x)
    theirs = without_loops(monkeypatch, lambda: moe(x))
    close(ours, theirs, 1e-5)
    moe.gate.weight.data = draw(experts, 32, seed=77)  # a weight that is replaced is seen
    with torch.inference_mode():
        ours = moe(x)
    close(ours, without_loops(monkeypatch, lambda: moe(x)), 1e-5)


def test_a_row_may_name_an_expert_twice_and_a_row_that_is_no_number_stays_one():
    """A hash-routed row does it by its table, a NaN row by its gate: no score is the best there."""
    moe = MoE(Config(), 5, 4).requires_grad_(False)
    for seed, parameter in enumerate(moe.parameters()):
        parameter.data = draw(*parameter.shape, seed=seed, scale=0.5)
    x, chosen, weights = draw(20, 32, seed=9), torch.randint(0, 5, (20, 4)), draw(20, 4, seed=10)
    with torch.inference_mode():
        ours = moe.run(x, chosen, weights)
        close(moe._dense(x, chosen, weights), ours, 1e-5)
        close(moe._grouped(x, chosen, weights), ours, 1e-5)
        x[3] = torch.nan
        assert moe(x).isnan().all(1).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("chosen_width", [0, 6])
def test_attention_of_rows_that_come_alone(chosen_width):
    rows, heads, dim, window, ring_rows = 5, 3, 8, 7, 9
    positions, floors = torch.tensor([0, 3, 6, 40, 41]), torch.tensor([0, 2, 0, 38, 0])
    bases = torch.arange(rows) * ring_rows
    ring, fresh, q, sink = draw(rows * ring_rows, dim), draw(rows, dim, seed=1), draw(rows, heads, dim, seed=2), draw(heads)
    selected = draw(rows, chosen_width, dim, seed=3)
    numbers = torch.arange(chosen_width)
    chosen = numbers.expand(rows, -1).masked_fill(numbers >= torch.arange(rows)[:, None], -1)
    seen = positions[:, None] + torch.arange(1 - window, 1)
    cells = (bases[:, None] + seen % ring_rows).flatten()
    keys = ring[cells].view(rows, window, dim).clone()
    keys[:, -1] = fresh
    bias = torch.zeros(rows, 1, window).masked_fill_((seen < floors[:, None].clamp_min(0)).unsqueeze(1), -torch.inf)
    more = ()
    if chosen_width:
        more = (selected, torch.zeros(rows, 1, chosen_width).masked_fill_((chosen < 0).unsqueeze(1), -torch.inf))
    theirs = attend(q, keys, bias, sink, 0.4, *more)
    ours = torch.empty_like(q)
    attend_rows(
        q.numpy(), fresh.numpy(), ring.numpy(), bases.numpy(), positions.numpy(), floors.numpy(), window, ring_rows,
        sink.numpy(), np.float32(0.4), selected.numpy(), chosen.contiguous().numpy(), ours.numpy(),
    )  # fmt: skip
    close(ours, theirs)


def test_with_gradients_or_in_another_type_torch_runs():
    x = draw(3, 8)
    with torch.inference_mode():
        assert layers.loops_for(x) is not None
        assert layers.loops_for(x.bfloat16()) is None and layers.loops_for(x.t()) is None
    with torch.enable_grad():
        assert layers.loops_for(x) is None
