"""The compiled path of single rows against torch in fp32 on the same bf16 weights and the same bf16 store.

Sequences are fed row by row from their beginning, so every entry that is read was written by the path under test.
"""

import pytest
import torch

from headrace.engine.batch import Segment
from headrace.engine.cache import KVPool
from headrace.engine.loader import load_model
from headrace.engine.models.mla import attention, layers
from headrace.kernels import cpu

from .test_mla import write

pytestmark = pytest.mark.skipif(
    not (cpu.available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()), reason="no numba, or no bf16 products here"
)

YARN = dict(type="yarn", factor=16.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1, mscale=1.0,
            mscale_all_dim=0.7)  # fmt: skip
CASES = {
    "v3": {},
    "yarn": dict(rope_scaling=YARN),
    "half-rope": dict(rope_interleave=False),
    "direct-queries": dict(q_lora_rank=None, n_shared_experts=2, n_group=1),
    "groups": dict(n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=4, norm_topk_prob=False),
    "v2": dict(architectures=["DeepseekV2ForCausalLM"], topk_method="group_limited_greedy", scoring_func="softmax", n_group=4,
               topk_group=2, routed_scaling_factor=16.0),
    "v2-lite": dict(architectures=["DeepseekV2ForCausalLM"], topk_method="greedy", scoring_func="softmax", n_group=1),
    "dense": dict(first_k_dense_replace=3),
    "no-shared": dict(n_shared_experts=None),
    "odd": dict(hidden_size=72, kv_lora_rank=36, qk_rope_head_dim=6, qk_nope_head_dim=13, v_head_dim=11, num_attention_heads=3),
}  # fmt: skip
LENGTHS = (1, 7, 131, 260)


class Fed:
    """A model and its memory; sequence i has slot i and blocks of its own."""

    def __init__(self, model):
        self.model, self.kv, self.states = model, KVPool(model.spec, 16), model.new_states(4)
        self.kv.data.fill_(0xFF)  # NaN wherever nothing was written

    def segment(self, sequence, ids, start, stop, **more):
        table = [3 * sequence + block for block in range(3)]
        return Segment(sequence, start, ids[start:stop], ids[max(0, start - 3) : start], table, outputs=(stop - 1,), **more)

    def rows(self, *segments):
        return self.model.logits(self.model.forward(segments, self.kv, self.states))


def draw(count, seed=3):
    return torch.randint(2, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def row_by_row(model, together=True):
    """Logits of every row of all sequences; those that are not over go together, or each alone: {(sequence, row): logits}."""
    fed, found = Fed(model), {}
    ids = [draw(length, seed) for seed, length in enumerate(LENGTHS)]
    for row in range(max(LENGTHS)):
        alive = [i for i, length in enumerate(LENGTHS) if row < length]
        for few in [alive] if together else [[i] for i in alive]:
            logits = fed.rows(*[fed.segment(i, ids[i], row, row + 1) for i in few])
            found |= {(i, row): line for i, line in zip(few, logits, strict=True)}
    return found


def worst(ours, theirs):
    scale = max(float(line.abs().max()) for line in theirs.values())
    return max(float((ours[key] - theirs[key]).abs().max()) for key in theirs) / scale


@pytest.mark.parametrize("case", list(CASES))
def test_rows_agree_with_torch_in_fp32(case, tmp_path):
    path = write(tmp_path / "model", **CASES[case])
    model, reference = load_model(path), load_model(path, kv_store="bf16", dtype=torch.float32)
    assert model.fused is not None and reference.fused is None
    ours, theirs = row_by_row(model), row_by_row(reference)
    assert worst(ours, theirs) < 0.01  # the head's product rounds its result to bf16 (0.004)


def test_a_row_does_not_depend_on_the_others(tmp_path):
    model = load_model(write(tmp_path / "model"))
    assert worst(row_by_row(model, together=False), row_by_row(model)) < 0.005  # only sums of fours and ones differ


def test_rows_and_chunks_of_one_step_come_back_in_order(tmp_path):
    """Single rows beside chunks, with and without outputs: each result is that of the segment that asked for it."""
    model = load_model(write(tmp_path / "model"))
    ids = [draw(140, seed) for seed in range(4)]
    fed, alone = Fed(model), Fed(model)
    for one in (fed, alone):
        for sequence, start in ((1, 139), (3, 128)):
            one.rows(one.segment(sequence, ids[sequence], 0, start))
    segments = [
        fed.segment(0, ids[0], 0, 40), fed.segment(1, ids[1], 139, 140), fed.segment(2, ids[2], 0, 133),
        fed.segment(3, ids[3], 128, 129),
    ]  # fmt: skip
    segments[2].outputs = (5, 131)
    together = fed.rows(*segments)
    apart = torch.cat([alone.rows(segment) for segment in segments])
    assert together.shape == apart.shape == (5, 300)
    assert float((together - apart).abs().max() / apart.abs().max()) < 0.01
    assert float((together[0] - apart[1]).abs().max() / apart.abs().max()) > 0.1  # rows of other segments are far away


def test_rows_below_the_floor_are_not_written(tmp_path):
    model = load_model(write(tmp_path / "model"))
    ids, fed = draw(200), Fed(model)
    fed.rows(fed.segment(0, ids, 0, 150))
    fed.kv.data[1, 0] ^= 1  # somebody else's byte now
    before = fed.kv.data.clone()
    fed.rows(fed.segment(0, ids, 140, 141, write_floor=150))
    assert torch.equal(fed.kv.data, before)
    fed.rows(fed.segment(0, ids, 150, 151, write_floor=150))
    assert not torch.equal(fed.kv.data, before)


@pytest.mark.parametrize("why", ["batch_invariant", "fp32", "no numba"])
def test_what_keeps_to_torch(why, tmp_path, monkeypatch):
    path = write(tmp_path / "model")
    if why == "no numba":
        monkeypatch.setattr(cpu, "available", lambda: False)
    options = {"batch_invariant": dict(batch_invariant=True), "fp32": dict(kv_store="fp32"), "no numba": {}}[why]
    assert load_model(path, **options).fused is None


@pytest.mark.parametrize("case", list(CASES))
def test_chunks_agree_with_torch_in_fp32(case, tmp_path, monkeypatch):
    """What lies between the products, compiled: no further from the fp32 model than the torch operators it stands for."""
    path = write(tmp_path / "model", **CASES[case])
    model, reference = load_model(path), load_model(path, kv_store="bf16", dtype=torch.float32)
    ids = draw(300)

    def chunks(model):
        fed = Fed(model)
        segments = [fed.segment(0, ids, 0, 170), fed.segment(0, ids, 170, 300)]
        for segment in segments:
            segment.outputs = range(segment.start, segment.stop)
        return torch.cat([fed.rows(segment) for segment in segments])

    theirs = chunks(reference)
    ours = error(chunks(model), theirs)
    monkeypatch.setattr(layers, "loops_for", lambda x: None)
    monkeypatch.setattr(attention, "loops_for", lambda x: None)
    assert ours < max(1.3 * error(chunks(model), theirs), 0.003)


def error(ours, theirs):
    """Of the middle row: single rows may be far away, where rounding chose another expert."""
    return float(((ours - theirs).square().mean(1) / theirs.square().mean(1)).sqrt().median())


@pytest.mark.parametrize("threads", [2, 3])
def test_lanes_change_nothing_but_the_thread(threads, tmp_path):
    """Segments dealt over lanes, heads in parts: every wanted row is what one lane gives."""
    path = write(tmp_path / "model", vocab_size=301)
    results = []
    for count in (1, threads):
        torch.set_num_threads(count)
        model = load_model(path)
        assert len(model.head) == count
        fed = Fed(model)
        lengths = (139, 60, 17)
        ids = [draw(150, seed) for seed in range(4)]
        fed.rows(*[fed.segment(i, ids[i], 0, length) for i, length in enumerate(lengths)])
        mixed = [fed.segment(i, ids[i], length, length + 1) for i, length in enumerate(lengths)]
        mixed[1].outputs = ()
        results.append(fed.rows(mixed[0], fed.segment(3, ids[3], 0, 140), *mixed[1:]))
        results[-1] = torch.cat([results[-1], fed.rows(*[fed.segment(i, ids[i], 141, 142) for i in (0, 3)])])
        assert torch.get_num_threads() == count
    assert results[0].shape == results[1].shape == (5, 301)
    assert float((results[0] - results[1]).abs().max() / results[0].abs().max()) < 0.01
