"""config.json of a DeepSeek-V4.1 checkpoint, typed and checked once.

Knows: the names of both released files (`config.json`: root + text_config + vision_config; `inference/config.json`:
flat) and which values contradict each other. Does not know tensors or devices. Every error names the key, the value
and what would be right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...config import ConfigError, build, child, names, token_ids


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN, used by layers with compressed KV only."""

    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """DeepSeek-ViT and its aligner (`models/vision`)."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int = 14
    rope_theta: float = 10000.0
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None  # wider images are squeezed to this ratio


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One V4.1 model. Names are those of text_config."""

    family: ClassVar[str] = "v41"

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    n_routed_experts: int
    num_experts_per_tok: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None = None
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    num_key_value_heads: int = 1
    n_shared_experts: int = 1
    hidden_act: str = "silu"
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling = RopeScaling()
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16000000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    dspark_confidence_normed: bool = False  # the confidence head reads the normed hidden vector (NeMo-trained drafts)
    # Root keys.
    bos_token_id: int = 0
    eos_token_id: tuple[int, ...] = (1,)
    pad_token_id: int = 2
    image_token_id: int = 129264
    vision: VisionConfig | None = None
    quantized: bool = False  # quantization_config present: FP8 linears with 32x32 scales, packed FP4 experts

    # ---------------------------------------------------------------- derived

    @property
    def cut_layer(self) -> int:
        """First decoder layer: the last layer that owns global KV. Layers from here on only need a prompt's tail
        (CED)."""
        return self.kv_source_layer_ids[-1] if self.kv_source_layer_ids else self.num_hidden_layers

    @property
    def lookback(self) -> int:
        """Token ids before a row that Engram hashes with it."""
        return self.engram_max_ngram_size - 1 if self.engram_layer_ids else 0

    def kv_owner(self, layer: int) -> int:
        """The layer whose compressed KV this one reads."""
        return max(s for s in self.kv_source_layer_ids if s <= layer)

    def index_owner(self, layer: int) -> int:
        """The layer whose selection this one uses."""
        return max(s for s in self.index_source_layer_ids if s <= layer)

    def uses_candidates(self, layer: int) -> bool:
        """Index sources after the candidate source select inside its candidate blocks."""
        source = self.candidate_source_layer_id
        return source is not None and layer > source and layer in self.index_source_layer_ids


# The flat inference/config.json spells some keys differently.
_FLAT_NAMES = {
    "dim": "hidden_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_mtp_layers": "num_nextn_predict_layers",
    "n_heads": "num_attention_heads",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
    "rope_head_dim": "qk_rope_head_dim",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "engram_layers": "engram_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "engram_pad_id": "engram_pad_token_id",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
    "dspark_target_layers": "dspark_target_layer_ids",
    "max_seq_len": "max_position_embeddings",
}
_FLAT_ROPE = {
    "rope_factor": "factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_seq_len": "original_max_position_embeddings",
}
_FLAT_VISION = {
    "vision_n_layers": "num_hidden_layers",
    "vision_dim": "hidden_size",
    "vision_n_heads": "num_attention_heads",
    "vision_inter_dim": "intermediate_size",
    "vision_patch_size": "patch_size",
    "vision_rope_theta": "rope_theta",
    "vision_downsample_ratio": "downsample_ratio",
    "vision_max_n_token": "max_image_tokens",
    "vision_min_pixels": "min_pixels",
    "vision_max_wh_ratio": "max_wh_ratio",
}


def parse_config(data: dict[str, Any]) -> ModelConfig:
    """A decoded config.json of either form -> checked ModelConfig. Raises ConfigError."""
    if "text_config" in data:
        text, vision = dict(child(data, "text_config")), data.get("vision_config")
    elif "dim" in data:
        text, vision = _unflatten(data)
    else:
        text, vision = dict(data), data.get("vision_config")
    architecture = data.get("architectures", ["DeepseekV41ForCausalLM"])
    model_type = data.get("model_type", "deepseek_v41")
    if architecture != ["DeepseekV41ForCausalLM"] or model_type not in ("deepseek_v41", "deepseek_v41_text"):
        raise ConfigError(
            f"architectures {architecture} (model_type {model_type!r}) is not DeepseekV41ForCausalLM (deepseek_v41)"
        )
    values = {key: text[key] for key in names(ModelConfig) if key in text}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "tie_word_embeddings"):
        if data.get(key) is not None:
            values[key] = data[key]
    values["eos_token_id"] = token_ids(values.get("eos_token_id", 1))
    values["rope_scaling"] = _rope_scaling(text.get("rope_scaling"))
    values["vision"] = build(VisionConfig, child({"vision_config": vision}, "vision_config")) if vision else None
    values["quantized"] = _quantized(data)
    if values.get("candidate_source_layer_id") == -1:
        values["candidate_source_layer_id"] = None
    config = build(ModelConfig, values)
    _check(config)
    return config


def _unflatten(data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    text = {_FLAT_NAMES.get(key, key): value for key, value in data.items()}
    text["rope_scaling"] = {"rope_type": "yarn", **{name: data[key] for key, name in _FLAT_ROPE.items() if key in data}}
    vision = {name: data[key] for key, name in _FLAT_VISION.items() if key in data}
    return text, vision or None


def _rope_scaling(value: Any) -> RopeScaling:
    if value is None:
        return RopeScaling()
    if not isinstance(value, dict):
        raise ConfigError(f"rope_scaling is {value!r}, not an object")
    kind = value.get("rope_type", value.get("type", "yarn"))
    if kind != "yarn":
        raise ConfigError(f"rope_scaling.rope_type is {kind!r}; only 'yarn' is supported")
    return build(RopeScaling, {key: value[key] for key in names(RopeScaling) if key in value})


def _quantized(data: dict[str, Any]) -> bool:
    if "quantization_config" not in data:
        return data.get("dtype") == "fp8"  # the flat form says so here
    quantization = child(data, "quantization_config")
    expected = {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    for key, want in expected.items():
        got = quantization.get(key, want)
        if got != want:
            raise ConfigError(f"quantization_config.{key} is {got!r}; this engine reads {want!r}")
    return True


# ------------------------------------------------------------------ checks

_POSITIVE = [
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "n_routed_experts",
    "num_experts_per_tok",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "hc_mult",
    "hc_sinkhorn_iters",
    "max_position_embeddings",
    "rms_norm_eps",
    "hc_eps",
    "rope_theta",
    "compress_rope_theta",
    "routed_scaling_factor",
    "swiglu_limit",
    "candidate_topk_blocks",
    "candidate_block_size",
]
_FIXED = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_MOST = {"hc_sinkhorn_iters": 1000, "hc_mult": 64}  # far above any trained model; more would only hang the first step
SUPPORTED_RATIOS = (0, 1, 2)


def _check(c: ModelConfig) -> None:
    for name in _POSITIVE:
        if getattr(c, name) <= 0:
            raise ConfigError(f"{name} is {getattr(c, name)}; it must be positive")
    for name, most in _MOST.items():
        if getattr(c, name) > most:
            raise ConfigError(f"{name} is {getattr(c, name)}; at most {most} make sense")
    for name in names(RopeScaling):
        if getattr(c.rope_scaling, name) <= 0:
            raise ConfigError(f"rope_scaling.{name} is {getattr(c.rope_scaling, name)}; it must be positive")
    for name, want in _FIXED.items():
        if getattr(c, name) != want:
            raise ConfigError(f"{name} is {getattr(c, name)!r}; V4.1 has {want!r}")
    _check_dimensions(c)
    _check_schedule(c)
    _check_engram(c)
    if c.vision is not None:
        _check_vision(c.vision)
    if c.num_nextn_predict_layers and not c.dspark_target_layer_ids:
        raise ConfigError(
            f"num_nextn_predict_layers is {c.num_nextn_predict_layers} but dspark_target_layer_ids is empty"
        )
    if c.num_nextn_predict_layers:
        for name in ("dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts"):
            if getattr(c, name) <= 0:
                raise ConfigError(f"{name} is {getattr(c, name)}; it must be positive")
        if c.dspark_num_experts_per_tok > c.dspark_n_routed_experts:
            raise ConfigError(
                f"dspark_num_experts_per_tok {c.dspark_num_experts_per_tok} exceeds dspark_n_routed_experts "
                f"{c.dspark_n_routed_experts}"
            )
        if not 0 <= c.dspark_noise_token_id < c.vocab_size:
            raise ConfigError(
                f"dspark_noise_token_id {c.dspark_noise_token_id} lies outside vocab_size {c.vocab_size}"
            )
    for layer in c.dspark_target_layer_ids if c.num_nextn_predict_layers else ():
        if not 0 <= layer < c.num_hidden_layers:
            raise ConfigError(f"dspark_target_layer_ids names layer {layer}; there are {c.num_hidden_layers}")


def _check_dimensions(c: ModelConfig) -> None:
    if c.num_attention_heads % c.o_groups:
        raise ConfigError(f"num_attention_heads {c.num_attention_heads} is not a multiple of o_groups {c.o_groups}")
    limit = min(c.head_dim, c.index_head_dim)
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > limit:
        raise ConfigError(
            f"qk_rope_head_dim {c.qk_rope_head_dim} must be even and at most {limit} "
            f"(head_dim {c.head_dim}, index_head_dim {c.index_head_dim})"
        )
    for name in ("head_dim", "index_head_dim"):
        if getattr(c, name) % 32:
            raise ConfigError(f"{name} is {getattr(c, name)}; KV records are quantised in groups of 32")
    if c.num_experts_per_tok > c.n_routed_experts:
        raise ConfigError(f"num_experts_per_tok {c.num_experts_per_tok} exceeds n_routed_experts {c.n_routed_experts}")
    if c.quantized and (c.hidden_size % 32 or c.moe_intermediate_size % 32):
        raise ConfigError(
            f"FP4 experts need multiples of 32: hidden_size {c.hidden_size}, "
            f"moe_intermediate_size {c.moe_intermediate_size}"
        )
    for token in (c.bos_token_id, *c.eos_token_id, c.pad_token_id):
        if not 0 <= token < c.vocab_size:
            raise ConfigError(f"a special token id {token} lies outside vocab_size {c.vocab_size}")


def _check_schedule(c: ModelConfig) -> None:
    layers = c.num_hidden_layers
    if len(c.compress_ratios) != layers + c.num_nextn_predict_layers and len(c.compress_ratios) < layers:
        raise ConfigError(f"compress_ratios has {len(c.compress_ratios)} entries for {layers} layers")
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        ids = getattr(c, name)
        if list(ids) != sorted(set(ids)):
            raise ConfigError(f"{name} {list(ids)} is not strictly increasing")
        for layer in ids:
            if not 0 <= layer < layers:
                raise ConfigError(f"{name} names layer {layer}; there are {layers} layers")
    for layer in c.kv_source_layer_ids:
        if layer not in c.index_source_layer_ids:
            raise ConfigError(f"kv_source_layer_ids names layer {layer}, which is not in index_source_layer_ids")
    owner = None
    for layer, ratio in enumerate(c.compress_ratios[:layers]):
        if ratio not in SUPPORTED_RATIOS:
            raise ConfigError(f"compress_ratios[{layer}] is {ratio}; V4.1 has {SUPPORTED_RATIOS}")
        if ratio == 0:
            for name in ("kv_source_layer_ids", "index_source_layer_ids"):
                if layer in getattr(c, name):
                    raise ConfigError(f"{name} names layer {layer}, but compress_ratios[{layer}] is 0 (window only)")
            continue
        owner = layer if layer in c.kv_source_layer_ids else owner
        if owner is None or c.compress_ratios[owner] != ratio:
            have = (
                "no KV source before it"
                if owner is None
                else f"source layer {owner} of ratio {c.compress_ratios[owner]}"
            )
            raise ConfigError(f"layer {layer} has compress ratio {ratio} but {have}")
    candidate = c.candidate_source_layer_id
    if candidate is not None:
        if candidate not in c.kv_source_layer_ids:
            raise ConfigError(
                f"candidate_source_layer_id {candidate} is not in kv_source_layer_ids {list(c.kv_source_layer_ids)}"
            )
        reach = c.candidate_topk_blocks * c.candidate_block_size
        if reach < c.index_topk:
            raise ConfigError(
                f"candidate_topk_blocks {c.candidate_topk_blocks} x candidate_block_size {c.candidate_block_size} = "
                f"{reach} positions cannot hold index_topk {c.index_topk}"
            )


def _check_engram(c: ModelConfig) -> None:
    if len(c.engram_layer_ids) != len(c.engram_num_embeddings):
        raise ConfigError(
            f"engram_num_embeddings has {len(c.engram_num_embeddings)} entries for {len(c.engram_layer_ids)} layers"
        )
    if not c.engram_layer_ids:
        return
    if c.engram_max_ngram_size < 2:
        raise ConfigError(f"engram_max_ngram_size is {c.engram_max_ngram_size}; an n-gram has at least 2 tokens")
    for name in ("engram_n_heads", "engram_head_dim", "engram_vocab_size", "engram_compressed_vocab_size"):
        if getattr(c, name) <= 0:
            raise ConfigError(f"{name} is {getattr(c, name)}; it must be positive")
    if c.engram_head_dim % 32 and c.quantized:
        raise ConfigError(f"engram_head_dim is {c.engram_head_dim}; table rows are scaled in groups of 32")
    if not 0 <= c.engram_pad_token_id < c.vocab_size:
        raise ConfigError(f"engram_pad_token_id {c.engram_pad_token_id} lies outside vocab_size {c.vocab_size}")


def _check_vision(v: VisionConfig) -> None:
    for name in names(VisionConfig):
        value = getattr(v, name)
        if value is not None and value <= 0:
            raise ConfigError(f"vision_config.{name} is {value}; it must be positive")
    if v.hidden_size % (4 * v.num_attention_heads):
        raise ConfigError(
            f"vision_config.hidden_size {v.hidden_size} must be a multiple of 4 x num_attention_heads "
            f"({4 * v.num_attention_heads}): a quarter of a head's channels turns with the row, a quarter with the column"
        )
    if v.max_image_tokens < 4:
        raise ConfigError(f"vision_config.max_image_tokens is {v.max_image_tokens}; the smallest image has 4 tokens")
