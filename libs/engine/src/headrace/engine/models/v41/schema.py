"""The released tensor names, shapes and storage formats of a V4.1 checkpoint: the one table that loader and writer
share.

Storage formats (`kind`):
  bf16, f32   plain
  fp8         X.weight F8_E4M3 [out, in] + X.scale F8_E8M0 [ceil(out/32), ceil(in/32)]   (V4: of 128x128 weights)
  fp4         X.weight I8 [out, in/2], two E2M1 per byte + X.scale F8_E8M0 [out, in/32]
  fp8_rows    X.weight F8_E4M3 [rows, dim] + X.scale F8_E8M0 [rows, dim/32]   (Engram tables)
A checkpoint without quantization_config stores every tensor plainly, BF16 or F32, under the same names and without
scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .config import ModelConfig, VisionConfig

BLOCK = 32


@dataclass(frozen=True, slots=True)
class TensorSpec:
    kind: str  # "bf16" | "f32" | "fp8" | "fp4" | "fp8_rows"
    shape: tuple[int, ...]  # logical, before packing
    block: int = BLOCK  # fp8: weights per scale, in both directions

    def stored(self, name: str, quantized: bool) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...]]]:
        """What lies in the files: (name, accepted safetensors dtypes, shape) of the tensor and of its scale."""
        if not quantized:
            yield name, ("F32",) if self.kind == "f32" else ("BF16", "F32"), self.shape
        elif self.kind in ("bf16", "f32"):
            yield name, (self.kind.upper(),), self.shape
        else:
            out, columns = self.shape
            scale = {
                "fp8": (-(-out // self.block), -(-columns // self.block)),
                "fp4": (out, columns // BLOCK),
                "fp8_rows": (out, columns // BLOCK),
            }[self.kind]
            packed = (out, columns // 2) if self.kind == "fp4" else self.shape
            yield name, ("I8",) if self.kind == "fp4" else ("F8_E4M3",), packed
            yield scale_name(name), ("F8_E8M0",), scale


Schema = dict[str, TensorSpec]


def scale_name(weight_name: str) -> str:
    return weight_name.removesuffix(".weight") + ".scale"


def checkpoint_schema(config: ModelConfig) -> Schema:
    """Every tensor that a checkpoint with this config holds."""
    schema = language_schema(config)
    if config.vision is not None:
        schema |= vision_schema(config.vision, config.hidden_size)
    return schema


def language_schema(config: ModelConfig) -> Schema:
    """The text model and its draft, if any."""
    schema = text_schema(config)
    return schema | draft_schema(config) if config.num_nextn_predict_layers else schema


def text_schema(c: ModelConfig) -> Schema:
    schema = {
        "embed.weight": TensorSpec("bf16", (c.vocab_size, c.hidden_size)),
        "norm.weight": TensorSpec("bf16", (c.hidden_size,)),
        "head.weight": TensorSpec("bf16", (c.vocab_size, c.hidden_size)),
    }
    for layer in range(c.num_hidden_layers):
        prefix = f"layers.{layer}."
        schema |= _named(prefix, _block(c, c.n_routed_experts))
        schema |= _named(prefix, _sources(c, layer))
    for layer, rows in zip(c.engram_layer_ids, c.engram_num_embeddings, strict=True):
        schema |= _named(f"layers.{layer}.engram.", _engram(c, rows))
    return schema


def _block(c: ModelConfig, experts: int) -> Schema:
    """What every layer and every draft stage has."""
    d, hc, inter = c.hidden_size, c.hc_mult, c.moe_intermediate_size
    heads, dim = c.num_attention_heads, c.head_dim
    mixes = 2 * hc + hc * hc
    block = {
        "attn_norm.weight": TensorSpec("bf16", (d,)),
        "ffn_norm.weight": TensorSpec("bf16", (d,)),
        "attn.attn_sink": TensorSpec("f32", (heads,)),
        "attn.wq_a.weight": TensorSpec("fp8", (c.q_lora_rank, d)),
        "attn.q_norm.weight": TensorSpec("bf16", (c.q_lora_rank,)),
        "attn.wq_b.weight": TensorSpec("fp8", (heads * dim, c.q_lora_rank)),
        "attn.wkv.weight": TensorSpec("fp8", (dim, d)),
        "attn.kv_norm.weight": TensorSpec("bf16", (dim,)),
        "attn.wo_a.weight": TensorSpec("fp8", (c.o_groups * c.o_lora_rank, heads // c.o_groups * dim)),
        "attn.wo_b.weight": TensorSpec("fp8", (d, c.o_groups * c.o_lora_rank)),
        "ffn.gate.weight": TensorSpec("bf16", (experts, d)),
        "ffn.gate.bias": TensorSpec("f32", (experts,)),
        "ffn.gate.bias_vl": TensorSpec("f32", (experts,)),
    }
    for sublayer in ("attn", "ffn"):
        block |= {
            f"hc_{sublayer}_fn": TensorSpec("f32", (mixes, hc * d)),
            f"hc_{sublayer}_base": TensorSpec("f32", (mixes,)),
            f"hc_{sublayer}_scale": TensorSpec("f32", (3,)),
        }
    for expert, kind in [(f"experts.{e}", "fp4") for e in range(experts)] + [("shared_experts", "fp8")]:
        block |= {
            f"ffn.{expert}.w1.weight": TensorSpec(kind, (inter, d)),
            f"ffn.{expert}.w2.weight": TensorSpec(kind, (d, inter)),
            f"ffn.{expert}.w3.weight": TensorSpec(kind, (inter, d)),
        }
    return block


def _sources(c: ModelConfig, layer: int) -> Schema:
    """Compressor and indexer of the layers that own compressed KV or a selection."""
    tensors: Schema = {}
    if layer in c.kv_source_layer_ids:
        tensors["attn.compressor.wkv.weight"] = TensorSpec("bf16", (c.head_dim, c.hidden_size))
        tensors["attn.compressor.norm.weight"] = TensorSpec("bf16", (c.head_dim,))
        if c.compress_ratios[layer] > 1:
            tensors["attn.compressor.wgate.weight"] = TensorSpec("bf16", (c.head_dim, c.hidden_size))
        tensors["attn.indexer.wk.weight"] = TensorSpec("bf16", (c.index_head_dim, c.head_dim))
        tensors["attn.indexer.k_norm.weight"] = TensorSpec("bf16", (c.index_head_dim,))
    if layer in c.index_source_layer_ids:
        tensors["attn.indexer.wq_b.weight"] = TensorSpec("fp8", (c.index_n_heads * c.index_head_dim, c.q_lora_rank))
        tensors["attn.indexer.weights_proj.weight"] = TensorSpec("bf16", (c.index_n_heads, c.hidden_size))
    return tensors


def _engram(c: ModelConfig, rows: int) -> Schema:
    d, hc = c.hidden_size, c.hc_mult
    hashes = (c.engram_max_ngram_size - 1) * c.engram_n_heads
    return {
        "embed.weight": TensorSpec("fp8_rows", (rows, c.engram_head_dim)),
        "wkv.weight": TensorSpec("fp8", ((hc + 1) * d, hashes * c.engram_head_dim)),
        "q_weight": TensorSpec("bf16", (hc, d)),
        "k_weight": TensorSpec("bf16", (hc, d)),
    }


def draft_schema(c: ModelConfig) -> Schema:
    """DSpark stages under mtp.*; embedding and head are the backbone's."""
    schema: Schema = {}
    last = c.num_nextn_predict_layers - 1
    for stage in range(c.num_nextn_predict_layers):
        schema |= _named(f"mtp.{stage}.", _block(c, c.dspark_n_routed_experts))
    schema["mtp.0.main_proj.weight"] = TensorSpec(
        "fp8", (c.hidden_size, len(c.dspark_target_layer_ids) * c.hidden_size)
    )
    schema["mtp.0.main_norm.weight"] = TensorSpec("bf16", (c.hidden_size,))
    schema[f"mtp.{last}.norm.weight"] = TensorSpec("bf16", (c.hidden_size,))
    schema[f"mtp.{last}.markov_head.embed.weight"] = TensorSpec("bf16", (c.vocab_size, c.dspark_markov_rank))
    schema[f"mtp.{last}.markov_head.head.weight"] = TensorSpec("bf16", (c.vocab_size, c.dspark_markov_rank))
    schema[f"mtp.{last}.confidence_head.proj.weight"] = TensorSpec("bf16", (1, c.hidden_size + c.dspark_markov_rank))
    return schema


def vision_schema(v: VisionConfig, hidden_size: int) -> Schema:
    d, unfolded = v.hidden_size, v.hidden_size * v.downsample_ratio**2
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (d, 3 * v.patch_size**2),
        "vision.patch_embed.proj.bias": (d,),
        "vision.norm.weight": (d,),
        "aligner.w1.weight": (hidden_size, unfolded),
        "aligner.w1.bias": (hidden_size,),
        "aligner.w2.weight": (hidden_size, hidden_size),
        "aligner.w2.bias": (hidden_size,),
        "image_start": (hidden_size,),
        "image_end": (hidden_size,),
        "image_newline": (hidden_size,),
    }
    for block in range(v.num_hidden_layers):
        prefix = f"vision.blocks.{block}."
        shapes |= {
            prefix + "norm1.weight": (d,),
            prefix + "norm2.weight": (d,),
            prefix + "attn.wqkv.weight": (3 * d, d),
            prefix + "attn.wqkv.bias": (3 * d,),
            prefix + "attn.wo.weight": (d, d),
            prefix + "attn.wo.bias": (d,),
            prefix + "mlp.w1.weight": (2 * v.intermediate_size, d),
            prefix + "mlp.w2.weight": (d, v.intermediate_size),
        }
    return {name: TensorSpec("bf16", shape) for name, shape in shapes.items()}


def _named(prefix: str, schema: Schema) -> Schema:
    return {prefix + name: spec for name, spec in schema.items()}
