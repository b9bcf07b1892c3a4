"""MLA models against transformers' DeepseekV3ForCausalLM and DeepseekV2ForCausalLM, in fp32 on tiny configs.

The oracle's weights travel as files in its own layout. Norms, biases and projections are random (their initial 1, 0
and 0.02 hide bugs). Ours is read through the paged cache: whole, in chunks, row by row, and beside other sequences;
the oracle with and without its own cache.
"""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from headrace.engine.batch import Segment
from headrace.engine.cache import KVPool
from headrace.engine.loader import load_model

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]  # transformers warns a lot

TOLERANCE = 1e-5  # max|a - b| / max|b| of a logits tensor
TOKENS = 300  # three blocks, the last one partly filled
TINY = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
    v_head_dim=24, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, n_group=2,
    topk_group=1, routed_scaling_factor=2.5, max_position_embeddings=4096, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=16.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1,
    mscale=1.0, mscale_all_dim=0.7,
)  # fmt: skip
CASES = {
    "v3": ("V3", {}),
    "v3-yarn": ("V3", dict(rope_parameters=YARN)),  # mscale and mscale_all_dim differ: both effects are seen
    "v3-half-rope": ("V3", dict(rope_interleave=False, rope_parameters=YARN | dict(mscale=0.7))),
    "moonlight": ("V3", dict(q_lora_rank=None, n_group=1, topk_group=1, n_shared_experts=2)),
    "v3-groups": ("V3", dict(n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=4, norm_topk_prob=False)),
    "v2-lite": ("V2", dict(q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1, n_shared_experts=2,
                           routed_scaling_factor=1.0, rope_parameters=YARN | dict(mscale=0.707, mscale_all_dim=0.707))),
    "v2": ("V2", dict(topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16.0)),
    "v3-dense": ("V3", dict(first_k_dense_replace=3)),
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="the oracle is not installed")


@pytest.fixture(scope="module", params=list(CASES))
def pair(request, transformers, tmp_path_factory):
    """(the oracle, the folder it was saved to)."""
    generation, changes = CASES[request.param]
    oracle = build_oracle(transformers, generation, TINY | changes)
    path = tmp_path_factory.mktemp(request.param)
    oracle.save_pretrained(path)
    return oracle, path


def build_oracle(transformers, generation, values):
    config = getattr(transformers, f"Deepseek{generation}Config")(**values)
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    oracle = getattr(transformers, f"Deepseek{generation}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, value in oracle.state_dict().items():
            if name.endswith("norm.weight") or "correction_bias" in name:
                value.add_(0.3 * torch.randn_like(value))
            elif value.is_floating_point():
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
        out = oracle(torch.tensor([ids[start : start + length]]), past_key_values=cache, use_cache=True)
        rows.append(out.logits[0].float())
        start += length
    return torch.cat(rows)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_way_through_the_cache_gives_the_oracles_logits(pair, batch_invariant):
    oracle, path = pair
    model = load_model(path, kv_store="fp32", batch_invariant=batch_invariant)
    ids, other = tokens(1), tokens(2, 140)
    expected, expected_other = oracle_logits(oracle, ids), oracle_logits(oracle, other)
    assert difference(Sequence(model).feed(ids), expected) < TOLERANCE

    chunks = [100, 1, 59, 97] + [1] * 43
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
    assert difference(torch.cat(mine), oracle_cached(oracle, ids, [200] + [1] * 100)) < TOLERANCE


def test_experts_of_a_layer_in_two_tensors(transformers, tmp_path):
    oracle = build_oracle(transformers, "V3", TINY)
    oracle.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["DeepseekV3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = {name: value.contiguous() for name, value in oracle.state_dict().items()}
    assert "model.layers.1.mlp.experts.gate_up_proj" in state
    save_file(state, tmp_path / "model.safetensors")
    ids = tokens(3, 40)
    assert difference(Sequence(load_model(tmp_path, kv_store="fp32")).feed(ids), oracle_logits(oracle, ids)) < TOLERANCE


def test_fp8_blocks_against_the_oracle_with_decoded_weights(transformers, tmp_path):
    """Rows and columns that fill no whole 128x128 block, experts included; the oracle gets the decoded values."""
    values = TINY | dict(hidden_size=160, moe_intermediate_size=144, intermediate_size=200, kv_lora_rank=136)
    oracle = build_oracle(transformers, "V3", values)
    oracle.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    plain, state, decoded = load_file(tmp_path / "model.safetensors"), {}, {}
    for name, value in plain.items():
        if "_proj" not in name or "kv_b_proj" in name:  # one projection stays plain, as some exporters leave it
            state[name] = decoded[name] = value
            continue
        scale = torch.zeros([-(-n // 128) for n in value.shape])
        codes, back = torch.empty_like(value, dtype=torch.float8_e4m3fn), torch.empty_like(value)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                at = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
                scale[i, j] = value[at].abs().max() / 448
                codes[at] = (value[at] / scale[i, j]).to(torch.float8_e4m3fn)
                back[at] = codes[at].float() * scale[i, j]
        state[name], state[f"{name}_scale_inv"], decoded[name] = codes, scale, back
    save_file(decoded, tmp_path / "model.safetensors")
    expected = type(oracle).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    save_file(state, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = tokens(4, 60)
    ours = Sequence(load_model(tmp_path, kv_store="fp32")).feed(ids)
    assert difference(ours, oracle_logits(expected, ids)) < TOLERANCE
    assert difference(ours, oracle_logits(oracle, ids)) > 1e-3  # the quantisation itself is seen
