"""From an MLA checkpoint to a model: its tensors, decoded from FP8 where they are, in the shapes that the products want.

First projections of query and KV are joined, kv_b_proj is cut into its key and value halves per head (absorbed
attention), experts of a layer lie in one tensor. The token embedding stays in the file's memory map.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headrace.kernels.quantize import dequantize_block_fp8

from ...checkpoint import Checkpoint, CheckpointError
from ...device import row_rule
from ...loader import LoadOptions
from .attention import Attention, rows_are_independent
from .cache import cache_spec, store_of
from .config import FP8_BLOCK, ModelConfig
from .fused import LARGEST, FusedRows, Weights, usable
from .layers import MLP, Gate, Linear, MoE, attention_scale
from .model import Layer, MlaModel
from .schema import checkpoint_schema, fused_names, scale_name, stored


def load(checkpoint: Checkpoint, config: ModelConfig, options: LoadOptions) -> MlaModel:
    """numerics "bounded" is a licence to approximate that this family has no use for: the class is always `exact`."""
    if options.numerics not in ("bounded", "exact"):
        raise ValueError(f"numerics is {options.numerics!r}; choose 'bounded' or 'exact'")
    if torch.device(options.device).type != "cpu":
        raise ValueError(f"device {options.device!r}: models of this family run on 'cpu' so far")
    if options.keep_rows is not None:
        raise ValueError(f"keep_rows is {options.keep_rows}, but every layer of an MLA model runs on every row: leave it out")
    store = store_of(config, options.kv_store)
    dtype = options.dtype or _preferred_dtype(store)
    fused = bool(config.n_routed_experts) and any(
        fused_names(layer)[0] in checkpoint.entries for layer in range(config.num_hidden_layers)
    )
    check_tensors(checkpoint, config, fused)
    rule = (1, 0)
    if options.batch_invariant:
        if not rows_are_independent(config, dtype):
            raise RuntimeError(
                f"batch_invariant: on this machine a row's attention in {dtype} gets other bits when more rows stand beside "
                "it; run without batch_invariant"
            )
        rule = row_rule(_product_shapes(config), dtype)
    rows = Weights() if usable(store, dtype) and not options.batch_invariant else None
    make = _Maker(checkpoint, config, dtype, fused, rows, *rule)
    layers = [make.layer(layer, options.batch_invariant) for layer in range(config.num_hidden_layers)]
    return MlaModel(
        config,
        cache_spec(config, store, options.batch_invariant, dtype),
        store,
        layers,
        checkpoint.tensor("embed_tokens.weight"),
        make.weight("norm.weight"),
        make.head("embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"),
        row_multiple=rule[0],
        fused=FusedRows(config, make.rows) if make.rows is not None else None,
    )


def _preferred_dtype(store: str) -> torch.dtype:
    """bf16 where the CPU multiplies it itself (half the bytes of every weight), and not for parity."""
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast and store != "fp32" else torch.float32


def check_tensors(checkpoint: Checkpoint, config: ModelConfig, fused: bool) -> None:
    """Missing, extra, mis-shaped and wrongly typed tensors are refused by name."""

    def ignored(name: str) -> bool:
        """Draft layers behind the last, a tied head's copy, and tables that old exports carry along."""
        parts = name.split(".")
        if parts[0] == "layers" and parts[1].isdigit() and int(parts[1]) >= config.num_hidden_layers:
            return int(parts[1]) < config.num_hidden_layers + config.num_nextn_predict_layers
        return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)

    extra = checkpoint.check(stored(checkpoint_schema(config, fused), checkpoint, config.quantized), ignored)
    if extra:
        hint = ""
        if extra[0].endswith("_scale_inv") and not config.quantized:
            hint = "; config.json has no quantization_config"
        raise CheckpointError(f"{checkpoint.path}: {extra[0]} is not part of this model ({len(extra)} extra tensors){hint}")


def _product_shapes(c: ModelConfig) -> set[tuple[int, int]]:
    """(out, in) of every product with rows on one side."""
    d, heads, queries = c.hidden_size, c.num_attention_heads, c.num_attention_heads * c.qk_head_dim
    shapes = {(c.vocab_size, d), (d, heads * c.v_head_dim), (2 * c.intermediate_size, d), (d, c.intermediate_size)}
    if c.q_lora_rank is None:
        shapes |= {(queries + c.latent_dim, d)}
    else:
        shapes |= {(c.q_lora_rank + c.latent_dim, d), (queries, c.q_lora_rank)}
    for inter in (c.moe_intermediate_size, c.moe_intermediate_size * (c.n_shared_experts or 0)):
        shapes |= {(2 * inter, d), (d, inter)} if inter else set()
    return shapes


class _Maker:
    """Makes layers from tensors; `rows` gets the weights for the compiled path of single rows, unless there are too many."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        dtype: torch.dtype,
        fused: bool,
        rows: Weights | None,
        row_multiple: int,
        tile: int,
    ) -> None:
        self.checkpoint, self.config, self.dtype, self.fused = checkpoint, config, dtype, fused
        self.rows, self.row_multiple, self.tile = rows, row_multiple, tile

    def layer(self, layer: int, split: bool) -> Layer:
        prefix = f"layers.{layer}."
        if self.rows is not None:
            self.rows.layer()
        made = Layer(
            input_norm=self.weight(f"{prefix}input_layernorm.weight"),
            attention=self._attention(f"{prefix}self_attn.", split),
            post_norm=self.weight(f"{prefix}post_attention_layernorm.weight"),
            feed_forward=self._experts(layer) if self.config.has_experts(layer) else self._mlp(f"{prefix}mlp."),
        )
        self._keep("norm_in", made.input_norm, wide=True)
        self._keep("norm_post", made.post_norm, wide=True)
        return made

    def _keep(self, name: str, *tensors: torch.Tensor, wide: bool = False) -> None:
        if self.rows is not None:
            self.rows.add(name, *tensors, wide=wide)
            if self.rows.nbytes > LARGEST:
                self.rows = None

    def weight(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor as values, in memory of its own."""
        tensor = self.checkpoint.tensor(name)
        if tensor.dtype == torch.float8_e4m3fn:
            value = dequantize_block_fp8(tensor, self.checkpoint.tensor(scale_name(name)), FP8_BLOCK).to(dtype or self.dtype)
        else:
            value = tensor.to(dtype or self.dtype, copy=True)
        if not value.isfinite().all():
            raise CheckpointError(f"{self.checkpoint.path}: {name} holds values that are not finite; the file is damaged")
        return value

    def linear(self, weight: torch.Tensor) -> Linear:
        """Batch invariance is checked for plain weights (`device.row_rule`), so it has them."""
        return Linear(weight, self.tile, pack=self.row_multiple == 1)

    def head(self, name: str) -> list[Linear]:
        """The head in as many parts as there are threads; with batch invariance in one, as it was checked."""
        weight = self.weight(name)
        return [self.linear(part) for part in weight.chunk(torch.get_num_threads() if self.row_multiple == 1 else 1)]

    def _attention(self, prefix: str, split: bool) -> Attention:
        c = self.config
        heads, nope = c.num_attention_heads, c.qk_nope_head_dim
        kv = self.weight(f"{prefix}kv_a_proj_with_mqa.weight")
        kv[c.kv_lora_rank :] = self._adjacent(kv[c.kv_lora_rank :])
        q_name = f"{prefix}{'q_proj' if c.q_lora_rank is None else 'q_b_proj'}.weight"
        w_q = self.weight(q_name).unflatten(0, (heads, -1))
        w_q[:, nope:] = self._adjacent(w_q[:, nope:])
        w_q = w_q.flatten(0, 1)
        first = w_q if c.q_lora_rank is None else self.weight(f"{prefix}q_a_proj.weight")
        both = self.weight(f"{prefix}kv_b_proj.weight").unflatten(0, (heads, -1))  # [H, nope + v, rank]
        w_a, w_o = torch.cat([first, kv]), self.weight(f"{prefix}o_proj.weight")
        q_norm = None if c.q_lora_rank is None else self.weight(f"{prefix}q_a_layernorm.weight")
        made = Attention(
            config=c,
            scale=attention_scale(c),
            w_a=self.linear(w_a),
            q_norm=q_norm,
            w_q=None if c.q_lora_rank is None else self.linear(w_q),
            kv_norm=self.weight(f"{prefix}kv_a_layernorm.weight"),
            w_uk=both[:, :nope].contiguous(),
            w_uv=both[:, nope:].contiguous(),
            w_o=self.linear(w_o),
            split=split,
            tile=self.tile,
        )
        self._keep("w_a", w_a)
        if q_norm is not None:
            self._keep("w_q", w_q)
            self._keep("norm_q", q_norm, wide=True)
        self._keep("norm_kv", made.kv_norm, wide=True)
        self._keep("w_uk", made.w_uk.transpose(1, 2))
        self._keep("w_uv", made.w_uv)
        self._keep("w_o", w_o)
        return made

    def _adjacent(self, rows: torch.Tensor) -> torch.Tensor:
        """Output rows [..., rope, in] of rotary channels, so that a pair is two adjacent ones. Queries and keys are
        reordered alike, which no score sees."""
        return rows if self.config.rope_interleave else rows.unflatten(-2, (2, -1)).transpose(-3, -2).flatten(-3, -2)

    def _mlp(self, prefix: str, expert: bool = False) -> MLP:
        gate, up, down = (self.weight(f"{prefix}{part}_proj.weight") for part in ("gate", "up", "down"))
        return self._feed_forward(torch.cat([gate, up]), down, expert)

    def _feed_forward(self, w_in: torch.Tensor, w_out: torch.Tensor, expert: bool) -> MLP:
        if expert:
            self._keep("experts", w_in, w_out)
        else:
            self._keep("w_in", w_in)
            self._keep("w_out", w_out)
        return MLP(self.linear(w_in), self.linear(w_out))

    def _experts(self, layer: int) -> MoE:
        c, prefix = self.config, f"layers.{layer}.mlp."
        weight = self.weight(f"{prefix}gate.weight", torch.float32)
        bias = self.weight(f"{prefix}gate.e_score_correction_bias", torch.float32) if c.topk_method == "noaux_tc" else None
        self._keep("gate", weight, wide=True)
        if bias is not None:
            self._keep("bias", bias, wide=True)
        return MoE(
            gate=Gate(c, Linear(weight, self.tile), bias),
            experts=list(self._fused(layer) if self.fused else self._one_by_one(layer)),
            shared=self._mlp(f"{prefix}shared_experts.") if c.n_shared_experts else None,
            row_multiple=self.row_multiple,
        )

    def _fused(self, layer: int) -> Iterator[MLP]:
        wide, down = (self.weight(name) for name in fused_names(layer))
        for w_in, w_out in zip(wide, down, strict=True):
            yield self._feed_forward(w_in, w_out, expert=True)

    def _one_by_one(self, layer: int) -> Iterator[MLP]:
        for expert in range(self.config.n_routed_experts):
            yield self._mlp(f"layers.{layer}.mlp.experts.{expert}.", expert=True)
