"""V4 models against transformers' DeepseekV4ForCausalLM, in fp32 on tiny configs without quantisation.

The oracle's weights travel as files of its own, names and all. Norms, sinks, biases, mixing bases and hash tables are random
(their initial 1 and 0 hide bugs), and there are 16 index heads and more (with few, scores tie at exactly 0 and the oracle's
top-k is undefined there). Ours is read through the paged cache: whole, in chunks, row by row, and beside other sequences;
the oracle with and without its own cache.
"""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine.batch import Segment
from headrace.engine.cache import KVPool
from headrace.engine.loader import load_model
from headrace.engine.make_checkpoint import make_checkpoint

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]  # transformers warns a lot

TOLERANCE = 1e-5  # max|a - b| / max|b| of a logits tensor
TOKENS = 300  # three blocks, the last one partly filled
TINY = dict(
    vocab_size=128, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=5, num_attention_heads=4, head_dim=32,
    qk_rope_head_dim=16, q_lora_rank=32, o_lora_rank=16, o_groups=2, n_routed_experts=8, num_experts_per_tok=2,
    sliding_window=8, compress_ratios=[0, 0, 4, 128, 4], num_hash_layers=2, index_n_heads=32, index_head_dim=32, index_topk=8,
    max_position_embeddings=4096, rope_scaling=dict(rope_type="yarn", factor=16, beta_fast=32, beta_slow=1,
                                                    original_max_position_embeddings=64), bos_token_id=0, eos_token_id=1,
)  # fmt: skip
CASES = {
    "flash": {},
    # Both kinds at other ratios, an HCA layer first, a window longer than a block, no YaRN, every layer hashed but one.
    "other": dict(compress_ratios=None, layer_types=["heavily_compressed_attention", "compressed_sparse_attention",
                                                     "sliding_attention", "compressed_sparse_attention",
                                                     "heavily_compressed_attention"],
                  compress_rates=dict(compressed_sparse_attention=8, heavily_compressed_attention=16), sliding_window=150,
                  num_hash_layers=4, rope_scaling=None, hc_mult=2, swiglu_limit=0.5),
    # Rows see themselves and entries of the past, one of them by choice.
    "no-window": dict(num_hidden_layers=2, compress_ratios=[4, 128], num_hash_layers=0, sliding_window=1, index_topk=1),
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="the oracle is not installed")


@pytest.fixture(scope="module", params=list(CASES))
def pair(request, transformers, tmp_path_factory):
    """(the oracle, the folder it was saved to)."""
    oracle = build_oracle(transformers, TINY | CASES[request.param])
    path = tmp_path_factory.mktemp(request.param)
    oracle.save_pretrained(path)
    return oracle, path


def build_oracle(transformers, values):
    config = transformers.DeepseekV4Config(**{k: v for k, v in values.items() if v is not None})
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    oracle = transformers.DeepseekV4ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, value in oracle.state_dict().items():
            if name.endswith("tid2eid"):
                value.copy_(torch.rand(len(value), config.n_routed_experts).argsort(1)[:, : value.shape[1]])
            elif name.endswith("norm.weight") or name.endswith(("scale", "base")) or "correction_bias" in name:
                value.add_(0.3 * torch.randn_like(value))
            elif value.dim() == 1 or name.endswith("position_bias"):
                value.normal_()
            else:
                value.normal_(0, 1 / math.sqrt(value.shape[-1]))
    return oracle


def tokens(seed, count=TOKENS):
    return torch.randint(2, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Sequence:
    """Feeds one sequence's rows to a model, keeping what a scheduler would."""

    def __init__(self, model, slot=0, blocks=(2, 0, 3), pool=None):
        self.model, self.slot, self.blocks, self.ids = model, slot, list(blocks), []
        self.kv, self.states = pool or (KVPool(model.spec, 8), model.new_states(4))
        self.states.reset(slot)

    def segment(self, ids):
        start = len(self.ids)
        self.ids += ids
        before, rows = self.ids[max(0, start - 3) : start], range(start, len(self.ids))
        return Segment(self.slot, start, ids, before, self.blocks, outputs=rows)

    def feed(self, ids):
        return self.model.logits(self.model.forward([self.segment(ids)], self.kv, self.states))


def difference(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


@torch.no_grad()
def oracle_logits(oracle, ids):
    return oracle(torch.tensor([ids]), use_cache=False).logits[0].float()


@torch.no_grad()
def oracle_cached(oracle, ids, chunks):
    """Logits of every row, computed chunk by chunk through the oracle's own cache."""
    from transformers import DynamicCache

    cache, rows, start = DynamicCache(config=oracle.config), [], 0
    for length in chunks:
        out = oracle(torch.tensor([ids[start : start + length]]), cache=cache, use_cache=True)
        rows.append(out.logits[0].float())
        start += length
    return torch.cat(rows)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_way_through_the_cache_gives_the_oracles_logits(pair, batch_invariant):
    oracle, path = pair
    model = load_model(path, kv_store="fp32", numerics="exact", batch_invariant=batch_invariant)
    ids, other = tokens(1), tokens(2, 140)
    expected, expected_other = oracle_logits(oracle, ids), oracle_logits(oracle, other)
    assert difference(Sequence(model).feed(ids), expected) < TOLERANCE

    chunks = [100, 1, 59, 97] + [1] * 43  # odd places; the rest, over a block's end, one by one
    one = Sequence(model)
    one.kv.data.fill_(0xFF)  # NaN everywhere: nothing may read what was not written
    pool = one.kv, one.states
    two, mine, others, start = Sequence(model, 1, (5, 6), pool), [], [], 0
    for i, length in enumerate(chunks):
        both = [one.segment(ids[start : start + length])]
        start += length
        if i < 8:
            both.insert(0, two.segment(other[i * 17 : i * 17 + 17 if i < 7 else None]))
        rows = model.logits(model.forward(both, *pool))
        others.append(rows[:-length])
        mine.append(rows[-length:])
    assert start == len(ids) and len(two.ids) == len(other)
    assert difference(torch.cat(mine), expected) < TOLERANCE
    assert difference(torch.cat(others), expected_other) < TOLERANCE
    if oracle.config.sliding_window > 1:  # the oracle's cache forgets nothing at 1
        assert difference(torch.cat(mine), oracle_cached(oracle, ids, [200] + [1] * 100)) < TOLERANCE


def test_released_names_and_formats_are_the_oracles(transformers, tmp_path):
    """A random checkpoint in the released layout, FP8 and FP4; the oracle reads its decoded values under the same names."""
    path = make_checkpoint("v4-w16", 5, tmp_path / "packed")
    decode(path, tmp_path / "plain")
    oracle = transformers.DeepseekV4ForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation="eager").float().eval()
    ids = tokens(3)
    ours = Sequence(load_model(path, kv_store="fp32")).feed(ids)
    assert difference(ours, oracle_logits(oracle, ids)) < TOLERANCE
    assert torch.equal(ours, Sequence(load_model(tmp_path / "plain", kv_store="fp32")).feed(ids))


def decode(path, out):
    """Write the checkpoint's values as plain fp32, by the formats' definitions."""
    out.mkdir()
    packed, plain = {}, {}
    for file in path.glob("*.safetensors"):
        packed |= load_file(file)
    for name, value in packed.items():
        scale = packed.get(name.removesuffix(".weight") + ".scale")
        if name.endswith(".scale"):
            continue
        if value.dtype == torch.int8:
            codes = torch.stack([value & 15, value >> 4 & 15], dim=-1).flatten(1).long()
            table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            value = torch.cat([table, -table])[codes] * scale.float().repeat_interleave(32, 1)
        elif scale is not None:
            grid = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            value = value.float() * grid[: value.shape[0], : value.shape[1]]
        plain[name] = value.clone() if value.dtype == torch.int64 else value.float()
    save_file(plain, out / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"], config["expert_dtype"]
    (out / "config.json").write_text(json.dumps(config))
