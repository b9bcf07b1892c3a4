"""The released tensor names, shapes and storage formats of a V4 checkpoint: the one table that loader and writer share.

Storage formats are those of V4.1 (`v41.schema`), FP8 with a scale per 128x128 weights; "i64" is plain. A quantised checkpoint
may leave a projection plain, or have its experts in FP8 (base models): each tensor says for itself. transformers writes some
tensors under names of its own, and they are read too; draft layers (`mtp.*`) are not.
"""

from __future__ import annotations

import re

from ...checkpoint import Checkpoint
from ..v41.schema import BLOCK, Schema, TensorSpec, scale_name
from .config import CSA, FP8_BLOCK, HASH, ModelConfig

PLAIN = {"i64": ("I64", "I32"), "f32": ("F32", "BF16")}
OTHER_NAMES = {  # transformers' -> released
    r"^embed_tokens\.": "embed.",
    r"^lm_head\.": "head.",
    r"^hc_head\.hc_": "hc_head_",
    r"\.attn\.norm\.": ".attn.kv_norm.",
}
IGNORED = "mtp."


def released_name(name: str) -> str:
    for pattern, released in OTHER_NAMES.items():
        name = re.sub(pattern, released, name)
    return name


def checkpoint_schema(c: ModelConfig) -> Schema:
    d, hc = c.hidden_size, c.hc_mult
    schema = {
        "embed.weight": TensorSpec("bf16", (c.vocab_size, d)),
        "norm.weight": TensorSpec("bf16", (d,)),
        "head.weight": TensorSpec("bf16", (c.vocab_size, d)),
        "hc_head_fn": TensorSpec("f32", (hc, hc * d)),
        "hc_head_base": TensorSpec("f32", (hc,)),
        "hc_head_scale": TensorSpec("f32", (1,)),
    }
    for layer in range(c.num_hidden_layers):
        block = _attention(c, layer) | _experts(c, layer) | _streams(c)
        schema |= {f"layers.{layer}.{name}": spec for name, spec in block.items()}
    return schema


def stored(schema: Schema, checkpoint: Checkpoint, quantized: bool) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """What must lie in the files: name -> (accepted safetensors dtypes, shape), scales included."""
    expected = {}
    for name, spec in schema.items():
        found = checkpoint.entries[name].dtype if name in checkpoint.entries else ""
        plain = PLAIN.get(spec.kind, ("BF16", "F32"))
        packable = quantized and spec.kind in ("fp8", "fp4")
        if packable and spec.kind == "fp4" and found == "I8":
            out, columns = spec.shape
            expected[name] = ("I8",), (out, columns // 2)
            expected[scale_name(name)] = ("F8_E8M0",), (out, columns // BLOCK)
            continue
        expected[name] = ((*plain, "F8_E4M3") if packable else plain), spec.shape
        if packable and found == "F8_E4M3":
            expected[scale_name(name)] = ("F8_E8M0", "F32"), tuple(-(-n // FP8_BLOCK) for n in spec.shape)
    return expected


def _fp8(*shape: int) -> TensorSpec:
    return TensorSpec("fp8", shape, FP8_BLOCK)


def _attention(c: ModelConfig, layer: int) -> Schema:
    d, heads, dim = c.hidden_size, c.num_attention_heads, c.head_dim
    block = {
        "attn_norm.weight": TensorSpec("bf16", (d,)),
        "attn.attn_sink": TensorSpec("f32", (heads,)),
        "attn.wq_a.weight": _fp8(c.q_lora_rank, d),
        "attn.q_norm.weight": TensorSpec("bf16", (c.q_lora_rank,)),
        "attn.wq_b.weight": _fp8(heads * dim, c.q_lora_rank),
        "attn.wkv.weight": _fp8(dim, d),
        "attn.kv_norm.weight": TensorSpec("bf16", (dim,)),
        "attn.wo_a.weight": _fp8(c.o_groups * c.o_lora_rank, heads // c.o_groups * dim),
        "attn.wo_b.weight": _fp8(d, c.o_groups * c.o_lora_rank),
    }
    ratio = c.compress_ratios[layer]
    if ratio:
        block |= _compressor("attn.compressor.", c, ratio, dim, c.layer_types[layer] == CSA)
    if c.selects(layer):
        block |= _compressor("attn.indexer.compressor.", c, ratio, c.index_head_dim, True)
        block["attn.indexer.wq_b.weight"] = _fp8(c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        block["attn.indexer.weights_proj.weight"] = TensorSpec("bf16", (c.index_n_heads, d))
    return block


def _compressor(prefix: str, c: ModelConfig, ratio: int, dim: int, overlaps: bool) -> Schema:
    width = 2 * dim if overlaps else dim
    return {
        f"{prefix}wkv.weight": TensorSpec("bf16", (width, c.hidden_size)),
        f"{prefix}wgate.weight": TensorSpec("bf16", (width, c.hidden_size)),
        f"{prefix}ape": TensorSpec("f32", (ratio, width)),
        f"{prefix}norm.weight": TensorSpec("bf16", (dim,)),
    }


def _experts(c: ModelConfig, layer: int) -> Schema:
    d, inter, experts = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts
    block = {"ffn_norm.weight": TensorSpec("bf16", (d,)), "ffn.gate.weight": TensorSpec("bf16", (experts, d))}
    if c.mlp_layer_types[layer] == HASH:
        block["ffn.gate.tid2eid"] = TensorSpec("i64", (c.vocab_size, c.num_experts_per_tok))
    else:
        block["ffn.gate.bias"] = TensorSpec("f32", (experts,))
    for expert, kind in [(f"experts.{e}", "fp4") for e in range(experts)] + [("shared_experts", "fp8")]:
        block |= {
            f"ffn.{expert}.w1.weight": TensorSpec(kind, (inter, d), FP8_BLOCK),
            f"ffn.{expert}.w2.weight": TensorSpec(kind, (d, inter), FP8_BLOCK),
            f"ffn.{expert}.w3.weight": TensorSpec(kind, (inter, d), FP8_BLOCK),
        }
    return block


def _streams(c: ModelConfig) -> Schema:
    mixes, wide = 2 * c.hc_mult + c.hc_mult**2, c.hc_mult * c.hidden_size
    schema = {}
    for sublayer in ("attn", "ffn"):
        schema |= {
            f"hc_{sublayer}_fn": TensorSpec("f32", (mixes, wide)),
            f"hc_{sublayer}_base": TensorSpec("f32", (mixes,)),
            f"hc_{sublayer}_scale": TensorSpec("f32", (3,)),
        }
    return schema
