"""config.json: both forms, and refusals that name the key."""

import json
from pathlib import Path

import pytest

from headrace.engine.config import ConfigError, parse_config, read_config
from headrace.engine.models.v41.schema import checkpoint_schema

TEXT = dict(
    vocab_size=129280, hidden_size=5120, moe_intermediate_size=2304, num_hidden_layers=40, num_attention_heads=64,
    num_key_value_heads=1, head_dim=512, qk_rope_head_dim=64, q_lora_rank=1280, o_lora_rank=1024, o_groups=8,
    n_routed_experts=384, num_experts_per_tok=6, sliding_window=128, compress_ratios=[0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
    kv_source_layer_ids=[2, 8, 14, 20], index_source_layer_ids=[2, 8, 14, 20, 24, 28, 32, 36], index_n_heads=32,
    index_head_dim=128, index_topk=512, candidate_source_layer_id=20, candidate_topk_blocks=2048, candidate_block_size=8,
    engram_layer_ids=[1, 14], engram_num_embeddings=[384006168, 384016682], num_nextn_predict_layers=3,
    dspark_target_layer_ids=[37, 38, 39], rope_scaling={"rope_type": "yarn", "factor": 16},
)  # fmt: skip
VISION = dict(num_hidden_layers=32, hidden_size=1024, num_attention_heads=16, intermediate_size=2816)
QUANTIZATION = {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
FLAT = dict(
    vocab_size=129280, dim=5120, moe_inter_dim=2304, n_layers=40, n_mtp_layers=3, n_heads=64, head_dim=512, rope_head_dim=64,
    q_lora_rank=1280, o_lora_rank=1024, o_groups=8, n_routed_experts=384, n_activated_experts=6, score_func="sqrtsoftplus",
    route_scale=1.5, norm_eps=1e-20, window_size=128, compress_ratios=TEXT["compress_ratios"], kv_source_layers=[2, 8, 14, 20],
    index_source_layers=TEXT["index_source_layer_ids"], index_n_heads=32, index_head_dim=128, index_topk=512,
    candidate_source_layer=20, candidate_topk_blocks=2048, candidate_block_size=8, original_seq_len=65536, rope_factor=16,
    engram_layer_ids=[1, 14], engram_num_embeddings=[384006168, 384016682], engram_pad_id=2,
    dspark_target_layer_ids=[37, 38, 39], dspark_n_activated_experts=3, vision_n_layers=32, vision_dim=1024,
    vision_n_heads=16, vision_inter_dim=2816, dtype="fp8", expert_dtype="fp4",
)  # fmt: skip


def released(**changes):
    return {
        "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "quantization_config": QUANTIZATION,
        "text_config": TEXT | changes, "vision_config": VISION,
    }  # fmt: skip


def test_the_released_config_has_the_released_tensors():
    config = parse_config(released())
    stored = [item for name, spec in checkpoint_schema(config).items() for item in spec.stored(name, config.quantized)]
    bits = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
    total = 0
    for _, dtypes, shape in stored:
        size = bits[dtypes[0]]
        for n in shape:
            size *= n
        total += size
    assert (len(stored), total) == (96_085, 510_286_023_000)
    assert config.cut_layer == 20 and config.lookback == 3
    assert [config.kv_owner(layer) for layer in (2, 7, 19, 39)] == [2, 2, 14, 20]
    assert [config.index_owner(layer) for layer in (27, 36)] == [24, 36]
    assert [config.uses_candidates(layer) for layer in (14, 20, 21, 24)] == [False, False, False, True]


def test_the_flat_form_says_the_same():
    assert parse_config(FLAT) == parse_config(released())


def test_no_candidates():
    assert parse_config(released(candidate_source_layer_id=None)).candidate_source_layer_id is None
    assert parse_config(released(candidate_source_layer_id=-1)).candidate_source_layer_id is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "5120"}, "hidden_size is '5120', not an integer"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be positive"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8; V4.1 has 1"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ({"o_groups": 7}, "num_attention_heads 64 is not a multiple of o_groups 7"),
        ({"qk_rope_head_dim": 130}, "qk_rope_head_dim 130 must be even and at most 128"),
        ({"head_dim": 500}, "head_dim is 500"),
        ({"num_experts_per_tok": 400}, "num_experts_per_tok 400 exceeds n_routed_experts 384"),
        ({"compress_ratios": [0, 0]}, "compress_ratios has 2 entries for 40 layers"),
        ({"compress_ratios": [0, 0] + [4] * 41}, r"compress_ratios\[2\] is 4"),
        (
            {"compress_ratios": [0, 0] + [2] * 10 + [1] * 31},
            "layer 12 has compress ratio 1 but source layer 8 of ratio 2",
        ),
        ({"kv_source_layer_ids": [8, 2, 14, 20]}, "kv_source_layer_ids .* is not strictly increasing"),
        (
            {"kv_source_layer_ids": [3, 8, 14, 20]},
            "kv_source_layer_ids names layer 3, which is not in index_source_layer_ids",
        ),
        ({"kv_source_layer_ids": [8, 14, 20]}, "layer 2 has compress ratio 2 but no KV source before it"),
        (
            {"index_source_layer_ids": [0, 2, 8, 14, 20]},
            r"index_source_layer_ids names layer 0, but compress_ratios\[0\] is 0",
        ),
        ({"index_source_layer_ids": [2, 8, 14, 20, 40]}, "index_source_layer_ids names layer 40; there are 40 layers"),
        ({"candidate_source_layer_id": 24}, "candidate_source_layer_id 24 is not in kv_source_layer_ids"),
        (
            {"candidate_topk_blocks": 8},
            "candidate_topk_blocks 8 x candidate_block_size 8 = 64 positions cannot hold index_topk 512",
        ),
        ({"engram_num_embeddings": [5]}, "engram_num_embeddings has 1 entries for 2 layers"),
        ({"engram_pad_token_id": 200000}, "engram_pad_token_id 200000 lies outside vocab_size 129280"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.rope_type is 'linear'"),
        ({"rope_scaling": {"factor": 0}}, "rope_scaling.factor is 0.*; it must be positive"),
        ({"rope_scaling": {"rope_type": "yarn", "beta_slow": -1}}, "rope_scaling.beta_slow is -1"),
        ({"hc_sinkhorn_iters": 10**9}, "hc_sinkhorn_iters is 1000000000; at most 1000"),
        ({"dspark_target_layer_ids": [40]}, "dspark_target_layer_ids names layer 40"),
    ],
)
def test_contradictions_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(released(**changes))


def test_missing_keys_and_other_models_are_named():
    data = released()
    del data["text_config"]
    with pytest.raises(ConfigError, match="vocab_size is missing"):
        parse_config(data)
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        parse_config({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    with pytest.raises(ConfigError, match="weight_block_size"):
        parse_config(released() | {"quantization_config": QUANTIZATION | {"weight_block_size": [128, 128]}})


def test_files(tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(released(o_groups=7)))
    with pytest.raises(ConfigError, match="config.json: num_attention_heads 64"):
        read_config(tmp_path)


def test_the_released_dimensions_are_those_of_the_gpu_kernels():
    pytest.importorskip("triton")
    from headrace.engine.models.v41.gpu.model import runs

    assert runs(parse_config(released())) == ""
    assert "index_n_heads is 24" in runs(parse_config(released(index_n_heads=24)))
