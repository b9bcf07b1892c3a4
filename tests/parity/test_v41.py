"""The V4.1 model against NeMo-AutoModel 0.7.0, an independent implementation, in fp32 with the cache quantisers off
on both sides.

Weights travel from NeMo through its own adapter, under the released names, into a checkpoint that our loader reads.
Sinks, biases, norms and mixing bases are random (their initial 0 and 1 hide bugs), and there are 16 index heads (with
few, scores tie at exactly 0 and the oracle's top-k is undefined there). The quantisers themselves are compared bit
for bit.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headrace.engine.batch import Segment
from headrace.engine.cache import KVPool
from headrace.engine.loader import load_model
from headrace.engine.make_checkpoint import PRESETS, small_tokenizer_json
from headrace.kernels import quantize as ours

sys.path.insert(0, str(Path(__file__).parent))  # the oracle is shared
from nemo_oracle import build_oracle

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]  # transformers and NeMo warn a lot

TOLERANCE = 2e-5  # max|a - b| / max|b| of a logits tensor
# No engram, engram; w16 has every kind of layer, both ratios and candidates. Contexts are longer than window, top-k
# and candidates.
TOKENS = 183


@pytest.fixture(scope="module")
def nemo():
    import os

    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    return pytest.importorskip("nemo_automodel.components.models.deepseek_v41", reason="the oracle is not installed")


@pytest.fixture(scope="module", params=["engram", "plain"])
def pair(request, nemo, tmp_path_factory):
    """(the oracle, our model loaded from the oracle's exported weights)."""
    text = dict(PRESETS["w16"])
    if request.param == "plain":
        text["engram_layer_ids"] = []
    oracle, data = build_oracle(text)
    path = tmp_path_factory.mktemp(request.param)
    exported = oracle.state_dict_adapter.to_hf(oracle.state_dict())
    # An exporter may prefix names with `model.`; the loader takes both.
    save_file(
        {f"model.{k}" if request.param == "plain" else k: v.contiguous() for k, v in exported.items()},
        path / "model.safetensors",
    )
    (path / "config.json").write_text(json.dumps(data))
    (path / "tokenizer.json").write_text(json.dumps(small_tokenizer_json()))
    return oracle, load_model(path, kv_store="fp32", numerics="exact")


def tokens(seed, count=TOKENS):
    return torch.randint(3, 259, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def oracle_logits(oracle, ids):
    return oracle(torch.tensor([ids])).logits[0].float()


class Sequence:
    """Feeds one sequence's rows to a model, keeping what a scheduler would."""

    def __init__(self, model, slot=0, blocks=(2, 0, 3), pool=None):
        self.model, self.slot, self.blocks = model, slot, list(blocks)
        self.kv, self.states = pool or (KVPool(model.spec, 8), model.new_states(4))
        self.states.reset(slot)
        self.ids = []

    def segment(self, ids):
        start = len(self.ids)
        self.ids += ids
        rows = range(start, len(self.ids))
        return Segment(self.slot, start, ids, self.ids[max(0, start - 3) : start], self.blocks, outputs=rows)

    def feed(self, ids):
        return self.model.logits(self.model.forward([self.segment(ids)], self.kv, self.states))


def assert_close(got, want):
    assert got.shape == want.shape
    error = ((got - want).abs().max() / want.abs().max()).item()
    assert error <= TOLERANCE, error


def test_full_forward(pair):
    oracle, model = pair
    for seed in range(3):
        ids = tokens(seed)
        assert_close(Sequence(model).feed(ids), oracle_logits(oracle, ids))


@pytest.mark.parametrize("cut", [64, 101])
def test_prefill_then_decode_through_the_paged_cache(pair, cut):
    oracle, model = pair
    ids, sequence = tokens(3), Sequence(model)
    got = [sequence.feed(ids[:cut])] + [sequence.feed([token]) for token in ids[cut:]]
    assert_close(torch.cat(got), oracle_logits(oracle, ids))


@pytest.mark.parametrize("sizes", [(32, 32, 64, 55), (1, 30, 67, 84, 1), (3, 5, 7, 11, 13, 143, 1), (120, 1, 1, 1, 60)])
def test_chunks_at_even_and_odd_boundaries(pair, sizes):
    oracle, model = pair
    ids, sequence = tokens(4), Sequence(model)
    assert sum(sizes) == TOKENS
    got = [sequence.feed(ids[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))]
    assert_close(torch.cat(got), oracle_logits(oracle, ids))


def test_a_ragged_batch(pair):
    """Long, short and one-row segments of different sequences in one pass."""
    oracle, model = pair
    pool = (KVPool(model.spec, 8), model.new_states(4))
    sequences = [Sequence(model, slot, [2 * slot, 2 * slot + 1], pool) for slot in range(4)]
    prompts = [tokens(10 + slot) for slot in range(4)]
    plans = [(150, 1, 32), (20, 1, 1, 1, 160), (1, 1, 1, 180), (77, 77, 29)]
    got = [[] for _ in sequences]
    for step in range(5):
        live = [slot for slot, plan in enumerate(plans) if step < len(plan)]
        segments = []
        for slot in live:
            start = sum(plans[slot][:step])
            segments.append(sequences[slot].segment(prompts[slot][start : start + plans[slot][step]]))
        rows = model.logits(model.forward(segments, *pool)).split([len(s.ids) for s in segments])
        for slot, logits in zip(live, rows, strict=True):
            got[slot].append(logits)
    for slot, prompt in enumerate(prompts):
        assert_close(torch.cat(got[slot]), oracle_logits(oracle, prompt))


@pytest.mark.parametrize(
    ("form", "block", "round_trip"),
    [
        ("fp8", 32, lambda x: ours.unpack_window_record(ours.pack_window_record(x))),
        ("mxfp4", 32, lambda x: ours.unpack_index_record(ours.pack_index_record(x))),
        ("nvfp4", 16, lambda x: ours.unpack_main_record(ours.pack_main_record(x))),
    ],
)
def test_quantisers_are_bit_equal(nemo, form, block, round_trip):
    from nemo_automodel.components.models.deepseek_v41.quantization import quantize_cache

    draw = torch.Generator().manual_seed(0)
    scales = torch.exp2(torch.randint(-20, 12, (4096, 1), generator=draw).float())
    values = torch.randn(4096, 64, generator=draw) * scales
    values[:64] = (
        torch.linspace(-8, 8, 64) * torch.exp2(torch.arange(64.0) / 4 - 8)[:, None]
    )  # grids that hit midpoints
    values[64] = 0
    assert torch.equal(round_trip(values), quantize_cache(values, format=form, block_size=block))
