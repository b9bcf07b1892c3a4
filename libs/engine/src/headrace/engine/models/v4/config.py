"""config.json of `DeepseekV4ForCausalLM` (V4-Flash), typed and checked once.

Knows the released spelling (`compress_ratios`, `num_hash_layers`, flat `rope_scaling`) and that of transformers 5
(`layer_types`, `compress_rates`, `mlp_layer_types`, `rope_parameters` of two kinds), and which values contradict each other.
Every error names the key, the value and what would be right. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...config import ConfigError, build, child, names, token_ids
from ..v41.config import RopeScaling

BLOCK_TOKENS = 128
WINDOW, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
HASH, ROUTED = "hash_moe", "moe"
RATES = {CSA: 4, HCA: 128}  # tokens of a compressed entry, where config.json does not say
FP8_BLOCK = 128  # weights per scale, in both directions


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One V4 model. Names are those of config.json; `layer_types` and `mlp_layer_types` have one entry a layer."""

    family: ClassVar[str] = "v4"

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
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    csa_ratio: int = RATES[CSA]
    hca_ratio: int = RATES[HCA]
    num_key_value_heads: int = 1
    n_shared_experts: int = 1
    hidden_act: str = "silu"
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling = RopeScaling(factor=1.0)  # of layers with compressed KV; factor 1: none
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    eos_token_id: tuple[int, ...] = (1,)
    quantized: bool = False  # FP8 weights with 128x128 scales, packed FP4 experts

    # ---------------------------------------------------------------- derived

    @property
    def compress_ratios(self) -> tuple[int, ...]:
        """Tokens of a compressed entry, of each layer; 0: window only."""
        return tuple({CSA: self.csa_ratio, HCA: self.hca_ratio}.get(kind, 0) for kind in self.layer_types)

    def selects(self, layer: int) -> bool:
        """Whether the layer has an indexer that picks entries; a layer without one attends to all."""
        return self.layer_types[layer] == CSA

    # What V4.1's attention, which this family shares, asks for: there a layer may read another one's entries.

    kv_source_layer_ids: ClassVar[tuple[int, ...]] = ()
    index_source_layer_ids: ClassVar[tuple[int, ...]] = ()
    candidate_source_layer_id: ClassVar[None] = None
    candidate_block_size: ClassVar[int] = 1

    def kv_owner(self, layer: int) -> int:
        return layer

    def index_owner(self, layer: int) -> int:
        return layer

    def uses_candidates(self, layer: int) -> bool:
        return False


def parse_config(data: dict[str, Any]) -> ModelConfig:
    """A decoded config.json -> checked ModelConfig. Raises ConfigError."""
    values = {key: data[key] for key in names(ModelConfig) if data.get(key) is not None}
    layers = data.get("num_hidden_layers")
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise ConfigError(f"num_hidden_layers is {layers!r}, not a positive integer")
    values |= _rates(data)
    values["layer_types"] = _layer_types(data, layers, values["csa_ratio"], values["hca_ratio"])
    values["mlp_layer_types"] = _mlp_layer_types(data, layers)
    values["qk_rope_head_dim"] = _rope_dim(data)
    values |= _rope(data)
    values["eos_token_id"] = token_ids(values.get("eos_token_id", 1))
    values["quantized"] = _quantized(data)
    config = build(ModelConfig, values)
    _check(config)
    return config


def _rates(data: dict[str, Any]) -> dict[str, int]:
    given = child(data, "compress_rates") if data.get("compress_rates") is not None else {}
    csa, hca = (given.get(kind, RATES[kind]) for kind in (CSA, HCA))
    return {"csa_ratio": data.get("compress_rate_csa", csa), "hca_ratio": data.get("compress_rate_hca", hca)}


def _layer_types(data: dict[str, Any], layers: int, csa: int, hca: int) -> tuple[str, ...]:
    if data.get("layer_types") is not None:
        return _of_each_layer(data, "layer_types", layers, {kind: kind for kind in (WINDOW, CSA, HCA)})
    if data.get("compress_ratios") is not None:
        if csa == hca:
            raise ConfigError(f"compress_ratios can't say which layers have an indexer: both kinds have ratio {csa}")
        return _of_each_layer(data, "compress_ratios", layers, {0: WINDOW, csa: CSA, hca: HCA})
    raise ConfigError("neither layer_types nor compress_ratios says what attention each layer has")


def _mlp_layer_types(data: dict[str, Any], layers: int) -> tuple[str, ...]:
    if data.get("mlp_layer_types") is not None:
        return _of_each_layer(data, "mlp_layer_types", layers, {HASH: HASH, ROUTED: ROUTED})
    hashed = data.get("num_hash_layers", 3)
    if not isinstance(hashed, int) or hashed < 0:
        raise ConfigError(f"num_hash_layers is {hashed!r}, not a number of layers")
    return tuple(HASH if layer < hashed else ROUTED for layer in range(layers))


def _of_each_layer(data: dict[str, Any], key: str, layers: int, meaning: dict[Any, str]) -> tuple[str, ...]:
    """The list under `key`, of which entries behind the last layer belong to a draft."""
    given = data[key]
    if not isinstance(given, (list, tuple)) or len(given) < layers:
        raise ConfigError(f"{key} is {given!r}; it needs an entry for each of {layers} layers")
    for layer, entry in enumerate(given[:layers]):
        if isinstance(entry, bool) or not isinstance(entry, (int, str)) or entry not in meaning:
            raise ConfigError(f"{key}[{layer}] is {entry!r}; V4 has {', '.join(map(str, meaning))}")
    return tuple(meaning[entry] for entry in given[:layers])


def _rope_dim(data: dict[str, Any]) -> Any:
    if data.get("qk_rope_head_dim") is not None:
        return data["qk_rope_head_dim"]
    share, dim = data.get("partial_rotary_factor"), data.get("head_dim")
    if not isinstance(share, (int, float)) or not isinstance(dim, int):
        raise ConfigError("qk_rope_head_dim is missing, and so is partial_rotary_factor with head_dim")
    return int(dim * share)


def _rope(data: dict[str, Any]) -> dict[str, Any]:
    """rope_theta, compress_rope_theta and rope_scaling as far as config.json says them."""
    key = "rope_parameters" if data.get("rope_parameters") is not None else "rope_scaling"
    given = child(data, key) if data.get(key) is not None else {}
    out: dict[str, Any] = {}
    if "main" in given and "compress" in given:
        main, scaling = child(given, "main"), child(given, "compress")
        if main.get("rope_type", "default") != "default":
            raise ConfigError(f"{key}.main.rope_type is {main['rope_type']!r}; layers without compressed KV have 'default'")
        for kind, name in ((main, "rope_theta"), (scaling, "compress_rope_theta")):
            if kind.get("rope_theta") is not None:
                out[name] = kind["rope_theta"]
    else:
        scaling = given
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise ConfigError(f"{key}.rope_type is {kind!r}; layers with compressed KV have 'default' and 'yarn'")
    if kind == "yarn":
        if scaling.get("attention_factor", 1.0) != 1.0:
            raise ConfigError(f"{key}.attention_factor is {scaling['attention_factor']!r}; V4 has 1.0")
        out["rope_scaling"] = build(RopeScaling, {name: scaling[name] for name in names(RopeScaling) if name in scaling})
    else:
        out["rope_scaling"] = RopeScaling(factor=1.0)
    return out


def _quantized(data: dict[str, Any]) -> bool:
    if data.get("quantization_config") is None:
        return False
    quantization = child(data, "quantization_config")
    for key, want in {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}.items():
        if quantization.get(key) != want:
            raise ConfigError(f"quantization_config.{key} is {quantization.get(key)!r}; this engine reads {want!r}")
    return True


# ------------------------------------------------------------------ checks

_POSITIVE = [
    "vocab_size", "hidden_size", "moe_intermediate_size", "num_attention_heads", "head_dim", "qk_rope_head_dim",
    "q_lora_rank", "o_lora_rank", "o_groups", "n_routed_experts", "num_experts_per_tok", "sliding_window", "csa_ratio",
    "hca_ratio", "index_n_heads", "index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters", "hc_eps",
    "max_position_embeddings", "rms_norm_eps", "rope_theta", "compress_rope_theta", "routed_scaling_factor", "swiglu_limit",
]  # fmt: skip
_FIXED = {
    "num_key_value_heads": 1, "n_shared_experts": 1, "hidden_act": "silu", "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False,
}  # fmt: skip


def _check(c: ModelConfig) -> None:
    for name in _POSITIVE:
        if getattr(c, name) <= 0:
            raise ConfigError(f"{name} is {getattr(c, name)}; it must be positive")
    for name in names(RopeScaling):
        if getattr(c.rope_scaling, name) <= 0:
            raise ConfigError(f"{name} of the rotary embedding is {getattr(c.rope_scaling, name)}; it must be positive")
    for name, want in _FIXED.items():
        if getattr(c, name) != want:
            raise ConfigError(f"{name} is {getattr(c, name)!r}; V4 has {want!r}")
    for name in ("csa_ratio", "hca_ratio"):
        if BLOCK_TOKENS % getattr(c, name):
            raise ConfigError(f"{name} is {getattr(c, name)}; a block of {BLOCK_TOKENS} tokens must hold whole entries")
    if c.num_attention_heads % c.o_groups:
        raise ConfigError(f"num_attention_heads {c.num_attention_heads} is not a multiple of o_groups {c.o_groups}")
    limit = min(c.head_dim, c.index_head_dim)
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > limit:
        raise ConfigError(
            f"qk_rope_head_dim {c.qk_rope_head_dim} must be even and at most {limit} "
            f"(head_dim {c.head_dim}, index_head_dim {c.index_head_dim})"
        )
    if c.num_experts_per_tok > c.n_routed_experts:
        raise ConfigError(f"num_experts_per_tok {c.num_experts_per_tok} exceeds n_routed_experts {c.n_routed_experts}")
    for token in c.eos_token_id:
        if not isinstance(token, int) or not 0 <= token < c.vocab_size:
            raise ConfigError(f"eos_token_id {token!r} is not an id below vocab_size {c.vocab_size}")
