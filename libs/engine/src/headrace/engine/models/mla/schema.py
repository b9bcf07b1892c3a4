"""Tensor names and shapes of an MLA checkpoint in Hugging Face's layout (an optional `model.` prefix removed).

Storage: plain BF16, F16 or F32. With quantization_config a projection may be F8_E4M3 instead, with fp32 scales per
128x128 weights under `X.weight_scale_inv`; exporters leave some projections plain, so each tensor says for itself.
Experts lie one by one, or (some exports of transformers 5) all of a layer in two tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...checkpoint import Checkpoint
from .config import FP8_BLOCK, ModelConfig

PLAIN = ("BF16", "F32", "F16")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: tuple[int, ...]
    projection: bool = False  # may be FP8


Schema = dict[str, TensorSpec]


def scale_name(weight_name: str) -> str:
    return f"{weight_name}_scale_inv"


def fused_names(layer: int) -> tuple[str, str]:
    """A layer's experts in two tensors: [experts, 2 inter, d] (gate above up) and [experts, d, inter]."""
    return f"layers.{layer}.mlp.experts.gate_up_proj", f"layers.{layer}.mlp.experts.down_proj"


def checkpoint_schema(c: ModelConfig, fused: bool = False) -> Schema:
    d = c.hidden_size
    schema = {"embed_tokens.weight": TensorSpec((c.vocab_size, d)), "norm.weight": TensorSpec((d,))}
    if not c.tie_word_embeddings:
        schema["lm_head.weight"] = TensorSpec((c.vocab_size, d))
    for layer in range(c.num_hidden_layers):
        block = _attention(c) | (_experts(c, layer, fused) if c.has_experts(layer) else _mlp("mlp.", d, c.intermediate_size))
        schema |= {f"layers.{layer}.{name}": spec for name, spec in block.items()}
    return schema


def stored(schema: Schema, checkpoint: Checkpoint, quantized: bool) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """What must lie in the files: name -> (accepted safetensors dtypes, shape), scales included."""
    expected = {}
    for name, spec in schema.items():
        may_be_fp8 = quantized and spec.projection
        expected[name] = ((*PLAIN, "F8_E4M3") if may_be_fp8 else PLAIN, spec.shape)
        entry = checkpoint.entries.get(name)
        if may_be_fp8 and entry is not None and entry.dtype == "F8_E4M3":
            expected[scale_name(name)] = (("F32",), tuple(-(-n // FP8_BLOCK) for n in spec.shape))
    return expected


def _attention(c: ModelConfig) -> Schema:
    d, heads = c.hidden_size, c.num_attention_heads
    queries = heads * c.qk_head_dim
    block = {
        "input_layernorm.weight": TensorSpec((d,)),
        "post_attention_layernorm.weight": TensorSpec((d,)),
        "self_attn.kv_a_proj_with_mqa.weight": TensorSpec((c.latent_dim, d), True),
        "self_attn.kv_a_layernorm.weight": TensorSpec((c.kv_lora_rank,)),
        "self_attn.kv_b_proj.weight": TensorSpec((heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank), True),
        "self_attn.o_proj.weight": TensorSpec((d, heads * c.v_head_dim), True),
    }
    if c.q_lora_rank is None:
        return block | {"self_attn.q_proj.weight": TensorSpec((queries, d), True)}
    return block | {
        "self_attn.q_a_proj.weight": TensorSpec((c.q_lora_rank, d), True),
        "self_attn.q_a_layernorm.weight": TensorSpec((c.q_lora_rank,)),
        "self_attn.q_b_proj.weight": TensorSpec((queries, c.q_lora_rank), True),
    }


def _mlp(prefix: str, d: int, inter: int) -> Schema:
    return {
        f"{prefix}gate_proj.weight": TensorSpec((inter, d), True),
        f"{prefix}up_proj.weight": TensorSpec((inter, d), True),
        f"{prefix}down_proj.weight": TensorSpec((d, inter), True),
    }


def _experts(c: ModelConfig, layer: int, fused: bool) -> Schema:
    d, inter, experts = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts
    block = {"mlp.gate.weight": TensorSpec((experts, d))}
    if c.topk_method == "noaux_tc":
        block["mlp.gate.e_score_correction_bias"] = TensorSpec((experts,))
    if c.n_shared_experts:
        block |= _mlp("mlp.shared_experts.", d, inter * c.n_shared_experts)
    if fused:
        wide, down = (name.removeprefix(f"layers.{layer}.") for name in fused_names(layer))
        return block | {wide: TensorSpec((experts, 2 * inter, d)), down: TensorSpec((experts, d, inter))}
    for expert in range(experts):
        block |= _mlp(f"mlp.experts.{expert}.", d, inter)
    return block
