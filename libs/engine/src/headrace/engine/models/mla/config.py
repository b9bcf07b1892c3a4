"""config.json of `DeepseekV3ForCausalLM` and `DeepseekV2ForCausalLM`, typed and checked once.

Knows the names as Hugging Face writes them (rotary settings under `rope_scaling` or, since transformers 5, under
`rope_parameters`), what the two generations leave out, and which values contradict each other. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...config import ConfigError, build, child, names, token_ids

FP8_BLOCK = 128  # weights per scale, in both directions


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. `yarn` false: plain; then only `rope_theta` counts. mscale and mscale_all_dim as in YaRN for
    DeepSeek-V2: their ratio scales the rotated parts, mscale_all_dim also the softmax."""

    rope_theta: float = 10000.0
    yarn: bool = False
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0  # 0: not given
    mscale_all_dim: float = 0.0
    attention_factor: float = 0.0  # 0: follows from factor, mscale, mscale_all_dim
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One MLA model. Names are those of config.json; what is absent there has its generation's value (`_ABSENT`)."""

    family: ClassVar[str] = "mla"

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    max_position_embeddings: int
    routed_scaling_factor: float
    scoring_func: str  # "sigmoid" (V3) | "softmax" (V2)
    topk_method: str  # "noaux_tc" (V3) | "greedy" | "group_limited_greedy" (V2)
    norm_topk_prob: bool
    q_lora_rank: int | None = None  # None: queries are projected directly
    n_routed_experts: int | None = None  # None: every layer is dense
    num_experts_per_tok: int | None = None
    n_shared_experts: int | None = None
    moe_intermediate_size: int = 0
    moe_layer_freq: int = 1
    first_k_dense_replace: int = 0
    n_group: int | None = None
    topk_group: int | None = None
    rms_norm_eps: float = 1e-6
    rope: Rope = Rope()
    rope_interleave: bool = True  # pairs of rotary channels are adjacent; False: channel i and i + half
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: int = 0  # extra layers behind the last that only a draft would use
    eos_token_id: tuple[int, ...] = (1,)
    quantized: bool = False  # FP8 weights, one fp32 scale per 128x128

    # ---------------------------------------------------------------- derived

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Elements that one token leaves in one layer's cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def has_experts(self, layer: int) -> bool:
        return bool(self.n_routed_experts) and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0


_ABSENT = {
    "DeepseekV3ForCausalLM": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True},
    "DeepseekV2ForCausalLM": {"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False},
}


def parse_config(data: dict[str, Any]) -> ModelConfig:
    """A decoded config.json -> checked ModelConfig. Raises ConfigError."""
    absent = _ABSENT[data["architectures"][0]]
    values = absent | {key: data[key] for key in names(ModelConfig) if data.get(key) is not None}
    values["eos_token_id"] = token_ids(values.get("eos_token_id", 1))
    values["rope"] = _rope(data)
    values["quantized"] = _quantized(data)
    config = build(ModelConfig, values)
    _check(config)
    return config


def _rope(data: dict[str, Any]) -> Rope:
    key = "rope_parameters" if data.get("rope_parameters") is not None else "rope_scaling"
    given = dict(child(data, key)) if data.get(key) is not None else {}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise ConfigError(f"{key}.rope_type is {kind!r}; MLA has 'default' and 'yarn'")
    if data.get("rope_theta") is not None:
        given.setdefault("rope_theta", data["rope_theta"])
    if kind == "yarn":
        if given.get("factor") is None or given.get("original_max_position_embeddings") is None:
            raise ConfigError(f"{key}: yarn needs factor and original_max_position_embeddings; it has {sorted(given)}")
        given["yarn"] = True
    return build(Rope, {name: given[name] for name in names(Rope) if given.get(name) is not None})


def _quantized(data: dict[str, Any]) -> bool:
    if data.get("quantization_config") is None:
        return False
    quantization = child(data, "quantization_config")
    expected = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
    for key, want in expected.items():
        got = quantization.get(key, want if key == "fmt" else None)
        if got != want:
            raise ConfigError(f"quantization_config.{key} is {got!r}; this engine reads {want!r}")
    return True


# ------------------------------------------------------------------ checks

_POSITIVE = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "max_position_embeddings", "routed_scaling_factor", "rms_norm_eps",
    "moe_layer_freq",
]  # fmt: skip
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_ROUTING = {("sigmoid", "noaux_tc"), ("softmax", "greedy"), ("softmax", "group_limited_greedy")}


def _check(c: ModelConfig) -> None:
    for name in _POSITIVE:
        if getattr(c, name) <= 0:
            raise ConfigError(f"{name} is {getattr(c, name)}; it must be positive")
    for name, want in _FIXED.items():
        if getattr(c, name) != want:
            raise ConfigError(f"{name} is {getattr(c, name)!r}; this engine runs {want!r}")
    for name in ("rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
        if getattr(c.rope, name) <= 0:
            raise ConfigError(f"{name} of the rotary embedding is {getattr(c.rope, name)}; it must be positive")
    if c.qk_rope_head_dim % 2:
        raise ConfigError(f"qk_rope_head_dim is {c.qk_rope_head_dim}; rotary channels come in pairs")
    for token in c.eos_token_id:
        if not isinstance(token, int) or not 0 <= token < c.vocab_size:
            raise ConfigError(f"eos_token_id {token!r} is not an id below vocab_size {c.vocab_size}")
    if c.n_routed_experts:
        _check_experts(c)


def _check_experts(c: ModelConfig) -> None:
    experts, top_k = c.n_routed_experts, c.num_experts_per_tok
    for name in ("num_experts_per_tok", "moe_intermediate_size"):
        if not getattr(c, name):
            raise ConfigError(f"{name} is missing; n_routed_experts is {experts}")
    if (c.scoring_func, c.topk_method) not in _ROUTING:
        raise ConfigError(
            f"scoring_func {c.scoring_func!r} with topk_method {c.topk_method!r}: this engine runs "
            + ", ".join(f"{scoring} with {method}" for scoring, method in sorted(_ROUTING))
        )
    if c.scoring_func == "softmax" and c.norm_topk_prob:
        # Published implementations disagree: one scales the normalised weights, one does not, one never normalises.
        raise ConfigError("norm_topk_prob is true; with softmax scores it must be false")
    if top_k > experts:
        raise ConfigError(f"num_experts_per_tok {top_k} exceeds n_routed_experts {experts}")
    if c.topk_method == "greedy":
        return
    for name in ("n_group", "topk_group"):
        if not getattr(c, name):
            raise ConfigError(f"{name} is missing; topk_method {c.topk_method!r} needs it (1: no groups)")
    if experts % c.n_group:
        raise ConfigError(f"n_routed_experts {experts} is not a multiple of n_group {c.n_group}")
    if c.topk_group > c.n_group:
        raise ConfigError(f"topk_group {c.topk_group} exceeds n_group {c.n_group}")
    reach = experts // c.n_group * c.topk_group
    if top_k > reach:
        raise ConfigError(f"num_experts_per_tok {top_k} exceeds the {reach} experts of topk_group {c.topk_group} groups")
    if c.topk_method == "noaux_tc" and experts // c.n_group < 2:
        raise ConfigError(f"n_group {c.n_group} leaves {experts // c.n_group} expert a group; a group's score is its best two")
