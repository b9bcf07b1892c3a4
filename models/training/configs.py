"""The models that this folder makes: text_config of each, over the common V4.1 keys of `make_checkpoint`.

`micro` is for tests of the pipeline itself. All have every kind of layer: window only, KV sources of both ratios, a layer that
reuses a selection, one that selects among candidates, Engram, and a draft of three stages.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from headrace.engine.make_checkpoint import config_json

_DRAFT: dict[str, Any] = {"num_nextn_predict_layers": 3, "dspark_block_size": 5, "dspark_num_experts_per_tok": 2}

# Pictures of 126 x 126 pixels (`generators/pictures.py`) need no resizing: their area is the least that is asked for.
VISION: dict[str, dict[str, Any]] = {
    "micro": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64},
    "tiny": {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256},
}
_PIXELS = {"patch_size": 14, "downsample_ratio": 3, "max_image_tokens": 64, "min_pixels": 126 * 126, "rope_theta": 10000.0}

CONFIGS: dict[str, dict[str, Any]] = {
    "micro": {
        "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 5, "num_attention_heads": 2, "head_dim": 32,
        "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 1, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 16, "compress_ratios": [0, 2, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 4], "index_n_heads": 16, "index_head_dim": 32, "index_topk": 16,
        "candidate_source_layer_id": 2, "candidate_topk_blocks": 4, "candidate_block_size": 8, "engram_layer_ids": [1],
        "engram_vocab_size": 100, "engram_n_heads": 1, "engram_head_dim": 32, "hc_sinkhorn_iters": 4, **_DRAFT,
        "dspark_target_layer_ids": [2, 3, 4], "dspark_markov_rank": 16, "dspark_n_routed_experts": 2,
    },
    "nano": {
        "hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32,
        "qk_rope_head_dim": 16, "q_lora_rank": 64, "o_lora_rank": 32, "o_groups": 2, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 32, "compress_ratios": [0, 2, 1, 1, 0, 0, 0], "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3], "index_n_heads": 16, "index_head_dim": 32, "index_topk": 128,
        "candidate_source_layer_id": 2, "candidate_topk_blocks": 32, "candidate_block_size": 8, "engram_layer_ids": [1],
        "engram_vocab_size": 1000, "engram_n_heads": 2, "engram_head_dim": 32, "hc_sinkhorn_iters": 4, **_DRAFT,
        "dspark_target_layer_ids": [1, 2, 3], "dspark_markov_rank": 32, "dspark_n_routed_experts": 4,
    },
    "tiny": {
        "hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "head_dim": 64,
        "qk_rope_head_dim": 32, "q_lora_rank": 128, "o_lora_rank": 64, "o_groups": 2, "n_routed_experts": 16,
        "num_experts_per_tok": 2, "sliding_window": 128, "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 4], "index_source_layer_ids": [2, 4, 6], "index_n_heads": 16, "index_head_dim": 64,
        "index_topk": 256, "candidate_source_layer_id": 4, "candidate_topk_blocks": 64, "candidate_block_size": 8,
        "engram_layer_ids": [1, 3], "engram_vocab_size": 3000, "engram_n_heads": 4, "engram_head_dim": 32,
        "hc_sinkhorn_iters": 10, **_DRAFT,
        "dspark_target_layer_ids": [5, 6, 7], "dspark_markov_rank": 32, "dspark_n_routed_experts": 4,
    },
}  # fmt: skip


def root_config(name: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """The root config.json of a model with this tokenizer. The draft's noise is the System token, as released."""
    if name not in CONFIGS:
        raise ValueError(f"no config {name!r}; there are {', '.join(CONFIGS)}")
    noise = tokenizer.token_to_id("<｜System｜>")
    if noise is None:
        raise ValueError("the tokenizer has no <｜System｜>; train one with `python -m models.training tokenizer`")
    vision = {"vision_config": VISION[name] | _PIXELS} if name in VISION else {}
    return config_json(CONFIGS[name] | {"dspark_noise_token_id": noise}, tokenizer) | vision
