"""Random checkpoints in exactly the released layout, for tests, benchmarks and a first run.

Knows how to write what a family's `schema.checkpoint_schema` lists (V4.1 and V4). Weights are drawn so that logits have a
sane spread and nothing hides a bug: norm weights are not 1, sinks and biases not 0. The words such a model says are random.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from headrace.kernels.quantize import quantize_fp4_ue8m0, quantize_fp8_ue8m0

from . import models
from .checkpoint import INDEX
from .config import parse_config
from .models.v4.config import FP8_BLOCK
from .models.v41.engram import bucket_sizes, compressed_ids
from .models.v41.schema import BLOCK, Schema, TensorSpec, scale_name

SHARD_BYTES = 256 << 20  # a new shard begins above this; there are always at least two, and one more for Engram tables

_COMMON: dict[str, Any] = {
    "num_key_value_heads": 1, "n_shared_experts": 1, "hidden_act": "silu", "swiglu_limit": 10.0, "rms_norm_eps": 1e-20,
    "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "tie_word_embeddings": False,
    "rope_theta": 10000.0, "compress_rope_theta": 160000.0, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "engram_max_ngram_size": 4, "engram_pad_token_id": 2, "num_nextn_predict_layers": 0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 65536,
}  # fmt: skip

# At least 16 index heads everywhere: with few, all of them are often clipped by relu, scores tie at exactly 0 and a
# selection would hang on tie-breaking.
PRESETS: dict[str, dict[str, Any]] = {
    # A 16-token window, every kind of layer at both ratios: exact replay costs 120 rows.
    "w16": {
        "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4,
        "head_dim": 32, "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16,
        "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1], "kv_source_layer_ids": [1, 4],
        "index_source_layer_ids": [1, 3, 4, 6], "index_n_heads": 16,
        "index_head_dim": 32, "index_topk": 16, "candidate_source_layer_id": 4, "candidate_topk_blocks": 8,
        "candidate_block_size": 4, "engram_layer_ids": [1, 3], "engram_vocab_size": 400, "engram_n_heads": 2,
        "engram_head_dim": 32,
    },
    "nano": {
        "hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
        "head_dim": 64, "qk_rope_head_dim": 32, "q_lora_rank": 64, "o_lora_rank": 32, "o_groups": 2,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64, "compress_ratios": [0, 2, 2, 1, 1, 1],
        "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 5], "index_n_heads": 16, "index_head_dim": 64,
        "index_topk": 64, "candidate_source_layer_id": 3, "candidate_topk_blocks": 32, "candidate_block_size": 8,
        "engram_layer_ids": [1], "engram_vocab_size": 2000, "engram_n_heads": 4, "engram_head_dim": 32,
    },
    "tiny": {
        "hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4,
        "head_dim": 64, "qk_rope_head_dim": 32, "q_lora_rank": 128, "o_lora_rank": 64, "o_groups": 2,
        "n_routed_experts": 16, "num_experts_per_tok": 2, "sliding_window": 128,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1], "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 6], "index_n_heads": 16, "index_head_dim": 64,
        "index_topk": 128, "candidate_source_layer_id": 4, "candidate_topk_blocks": 64, "candidate_block_size": 8,
        "engram_layer_ids": [1, 3], "engram_vocab_size": 8000, "engram_n_heads": 4, "engram_head_dim": 64,
    },
}  # fmt: skip
PRESETS["w16-draft"] = PRESETS["w16"] | {
    "compress_ratios": [*PRESETS["w16"]["compress_ratios"], 0, 0, 0], "num_nextn_predict_layers": 3,
    "dspark_block_size": 5, "dspark_noise_token_id": 259, "dspark_target_layer_ids": [3, 6, 7],
    "dspark_markov_rank": 16, "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2,
}  # fmt: skip
PRESETS["nano-vision"] = PRESETS["nano"]
V4 = "DeepseekV4ForCausalLM"
# V4's own values of what both families have, and what V4.1 has not.
_V4: dict[str, Any] = {
    "architectures": [V4],
    "model_type": "deepseek_v4",
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# All three kinds of layer, a 16-token window, hashed first layers: exact replay costs 90 rows.
PRESETS["v4-w16"] = _V4 | {
    "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4,
    "head_dim": 32, "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16, "compress_ratios": [0, 0, 4, 128, 4, 128],
    "num_hash_layers": 2, "index_n_heads": 16, "index_head_dim": 32, "index_topk": 16,
}  # fmt: skip
# vision_config of the presets that see: images of 12 to 64 tokens.
VISION: dict[str, dict[str, Any]] = {
    "nano-vision": {
        "model_type": "deepseek_v41_vision", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "intermediate_size": 128, "patch_size": 14, "rope_theta": 10000.0, "downsample_ratio": 3, "max_image_tokens": 64,
        "min_pixels": 7056, "max_wh_ratio": None,
    },
}  # fmt: skip


def make_checkpoint(preset: str, seed: int, out: str | Path, *, tokenizer_json: dict[str, Any] | None = None) -> Path:
    """Write a random checkpoint of a preset (one of `PRESETS`) and return its directory.

    `tokenizer_json`: a decoded tokenizer.json; default is `small_tokenizer_json()`, one token per byte and V4.1's
    control tokens. Equal arguments give equal files.
    """
    if preset not in PRESETS:
        raise ValueError(f"no preset {preset!r}; choose one of {', '.join(PRESETS)}")
    return write_checkpoint(PRESETS[preset], seed, out, tokenizer_json=tokenizer_json, vision=VISION.get(preset))


def write_checkpoint(
    text: dict[str, Any],
    seed: int,
    out: str | Path,
    *,
    tokenizer_json: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
) -> Path:
    """Write a random checkpoint with these text_config keys (over the common ones) and this vision_config, if any; of V4 when
    `text` has its `architectures`."""
    tokenizer = json.dumps(tokenizer_json or small_tokenizer_json(), ensure_ascii=False, indent=1)
    make = v4_config_json if text.get("architectures") == [V4] else config_json
    data = make(text, Tokenizer.from_str(tokenizer)) | ({"vision_config": vision} if vision else {})
    return save_checkpoint(random_values(parse_config(data), seed), data, tokenizer, out)


def save_checkpoint(
    values: Iterable[tuple[str, torch.Tensor]], data: dict[str, Any], tokenizer: str, out: str | Path
) -> Path:
    """Write a checkpoint in the released layout: (released name, fp32 value) of every tensor, the root config.json
    `data`, and the text of tokenizer.json. Without quantization_config tensors stay fp32. Returns `out`."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    config = parse_config(data)
    schema = _schema(config)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in values:
        if tuple(value.shape) != schema[name].shape:
            raise ValueError(f"{name} has shape {list(value.shape)}; config.json says {list(schema[name].shape)}")
        spec = schema.pop(name)
        tensors |= store(name, spec, value) if config.quantized else {name: value}
    if schema:
        raise ValueError(f"{next(iter(schema))} is missing ({len(schema)} tensors are)")
    save_sharded(tensors, out)
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "add_bos_token": False}
    sampling = {"bos_token_id": 0, "eos_token_id": 1, "temperature": 1.0, "top_p": 1.0}
    for name, content in {
        "tokenizer.json": tokenizer,
        "config.json": json.dumps(data, indent=1),
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", **special}, ensure_ascii=False, indent=1
        ),
        "generation_config.json": json.dumps(sampling, indent=1),
    }.items():
        (out / name).write_text(content)
    return out


def config_json(text: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The root config.json; sizes that follow from the tokenizer and the hash primes are filled in."""
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    text = {"model_type": "deepseek_v41_text", "vocab_size": size, **_COMMON, **text}
    image = tokenizer.token_to_id(IMAGE)
    root = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": image if image is not None else size - 1,
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
            "scale_fmt": "ue8m0", "expert_dtype": "fp4",
        },
        "text_config": text,
    }  # fmt: skip
    if text.get("engram_layer_ids"):
        text["engram_compressed_vocab_size"] = int(compressed_ids(tokenizer).max()) + 1
        text.setdefault("engram_num_embeddings", [0] * len(text["engram_layer_ids"]))
        sizes = bucket_sizes(parse_config(root))
        text["engram_num_embeddings"] = [sum(sizes[layer]) for layer in text["engram_layer_ids"]]
    return root


def v4_config_json(keys: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """V4's config.json, which is flat, in the released spelling."""
    left_out = ("engram_", "dspark_")
    common = {key: value for key, value in _COMMON.items() if not key.startswith(left_out)}
    quantization = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "fmt": "e4m3", "scale_fmt": "ue8m0",
    }  # fmt: skip
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return {
        "dtype": "bfloat16",
        "expert_dtype": "fp4",
        "vocab_size": size,
        "quantization_config": quantization,
        **common,
        **keys,
    }


# ------------------------------------------------------------------ weights


def _schema(config: Any) -> Schema:
    return models.module(config.family, "schema").checkpoint_schema(config)


def random_values(config: Any, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the schema by name, fp32 (int64 where it is a table), drawn from `seed`."""
    rng = np.random.default_rng(seed)
    for name, spec in _schema(config).items():
        yield name, torch.from_numpy(_draw(name, spec, config, rng))


def store(name: str, spec: TensorSpec, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """fp32 value -> the tensors that lie in a quantised checkpoint."""
    if spec.kind == "i64":
        return {name: value}
    if spec.kind in ("bf16", "f32"):
        return {name: value.to(torch.bfloat16 if spec.kind == "bf16" else torch.float32)}
    if spec.kind == "fp8":
        weight, scale = quantize_blocks(value, spec.block)
    elif spec.kind == "fp8_rows":
        weight, scale = quantize_fp8_ue8m0(value, BLOCK)
    else:
        packed, scale = quantize_fp4_ue8m0(value, BLOCK)
        weight = packed.view(torch.int8)
    return {name: weight, scale_name(name): scale.view(torch.float8_e8m0fnu)}


def quantize_blocks(value: torch.Tensor, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] -> E4M3 [out, in] and one UE8M0 byte per block of weights, [ceil(out / block), ceil(in / block)]."""
    out, width = value.shape
    padded = torch.nn.functional.pad(value, (0, -width % block, 0, -out % block))
    blocks = padded.unflatten(0, (-1, block)).unflatten(2, (-1, block)).transpose(1, 2)  # [R, C, block, block]
    q, scale = quantize_fp8_ue8m0(blocks.flatten(2), block * block)
    q = q.view(torch.uint8).view(blocks.shape).transpose(1, 2).reshape(padded.shape)[:out, :width]
    return q.contiguous().view(torch.float8_e4m3fn), scale.squeeze(-1).contiguous()


def _draw(name: str, spec: TensorSpec, config: Any, rng: np.random.Generator) -> np.ndarray:
    if spec.kind == "i64":  # experts of a token, each at most once
        everyone = np.arange(config.n_routed_experts)
        return rng.permuted(np.tile(everyone, (spec.shape[0], 1)), axis=1)[:, : spec.shape[1]].copy()
    noise = rng.standard_normal(spec.shape, dtype=np.float32)
    leaf = name.rpartition(".")[2] if not name.endswith(".weight") else name.split(".")[-2]
    if "norm" in leaf or leaf in ("q_weight", "k_weight"):
        return 1 + 0.2 * noise
    if leaf in ("hc_attn_scale", "hc_ffn_scale", "hc_head_scale"):
        return 0.5 + 0.1 * noise
    if leaf in ("hc_attn_base", "hc_ffn_base"):
        return 0.5 * noise + _stream_bias(config.hc_mult)
    if leaf in ("ape", "hc_head_base"):
        return 0.5 * noise
    if leaf in ("bias", "bias_vl"):
        return 0.1 * noise
    if leaf == "attn_sink" or leaf.startswith("image_"):
        return noise
    if name == "embed.weight" or name.endswith("engram.embed.weight"):
        return noise
    gain = {"head": 2.5, "w1": 1.5, "w3": 1.5}.get(leaf, 1.0)
    return noise * np.float32(gain / math.sqrt(spec.shape[-1]))


def _stream_bias(hc: int) -> np.ndarray:
    """Streams mostly keep to themselves: a larger diagonal of the combination matrix."""
    return np.concatenate([np.zeros(2 * hc, np.float32), (2 * np.eye(hc, dtype=np.float32)).ravel()])


def save_sharded(tensors: dict[str, torch.Tensor], out: Path) -> None:
    """safetensors shards and their index; Engram tables in shards of their own, as released."""
    tables = {name: tensor for name, tensor in tensors.items() if ".engram.embed." in name}
    rest = {name: tensor for name, tensor in tensors.items() if name not in tables}
    limit = min(SHARD_BYTES, sum(t.nbytes for t in rest.values()) // 2 + 1)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in rest.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > limit:
            shards.append({})
        shards[-1][name] = tensor.contiguous()
    if tables:
        shards.append(tables)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        (out / file).chmod(0o644)  # services may run as other users
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    (out / INDEX).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=1)
    )


# ------------------------------------------------------------------ a small tokenizer

BOS, EOS, PAD, IMAGE = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜deepseek_image｜>"
# What V4.1's templates write and its models emit, in the order of their ids in the large vocabulary.
CONTROL = (
    "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>",
    "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜task｜>", "<｜end_of_query｜>", IMAGE,
    "<｜ref｜>", "<｜/ref｜>", "<｜box｜>", "<｜/box｜>", "<｜point｜>", "<｜/point｜>", "<｜polygon｜>", "<｜/polygon｜>",
)  # fmt: skip


def small_tokenizer_json() -> dict[str, Any]:
    """Byte-level BPE without merges: bos, eos and pad are 0, 1, 2, then 256 bytes, then the control tokens."""
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((BOS, EOS, PAD, *letters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS, PAD])
    tokenizer.add_tokens(list(CONTROL))
    return json.loads(tokenizer.to_str())


__all__ = ["PRESETS", "VISION", "make_checkpoint", "save_checkpoint", "small_tokenizer_json", "write_checkpoint"]
