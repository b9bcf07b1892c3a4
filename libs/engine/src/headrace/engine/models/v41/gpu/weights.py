"""Weights of a V4.1 checkpoint as the kernels read them: FP8 and FP4 packed into words, in as many bytes as they are stored in.

Knows which tensors belong together in one product and which format each has. Nothing is decoded: a weight of 0.56 bytes an
element stays one; packed at load, it is cheap to decode in a product. Does not know rows, caches or layers' arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.kernels.gemm_upcast import FIELD, gemm_upcast, held
from headrace.kernels.mhc import split_projection
from headrace.kernels.swiglu import TURN, interleave

from ....checkpoint import Checkpoint
from ..config import ModelConfig
from ..schema import TensorSpec, language_schema, scale_name

FORMATS = {"fp8": "fp8", "fp4": "mxfp4", "bf16": "bf16"}  # schema kind -> `gemm_upcast` format


@dataclass(slots=True)
class Weight:
    """One product's weight: [n, k], or [G, n, k] for groups, with its scales (None: bf16)."""

    data: torch.Tensor
    scale: torch.Tensor | None
    name: str  # format of `gemm_upcast`

    def __call__(
        self, x: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16, invariant: bool = False, **options: Any
    ) -> torch.Tensor:
        """x bf16 [T, k] -> [T, n]; other options of `gemm_upcast`."""
        return gemm_upcast(x, self.data, self.scale, self.name, out_dtype=out_dtype, batch_invariant=invariant, **options)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)


class Weights:
    """Reads tensors of a checked checkpoint onto a device."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, device: torch.device) -> None:
        self.checkpoint, self.config, self.device = checkpoint, config, device
        self.schema = language_schema(config)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A plain tensor, in its own dtype or another."""
        value = self.checkpoint.tensor(name).to(self.device, dtype)
        return value.clone() if value.device.type == "cpu" else value  # never a view of the file

    def norm(self, name: str) -> torch.Tensor:
        return self.tensor(name, torch.bfloat16)

    def linear(self, *names: str, in_turns: bool = False) -> Weight:
        """One product; several names are stacked over their rows, in order or `in_turns` (`swiglu.interleave`). Their formats
        are the same."""
        kinds = {self._format(self.schema[name]) for name in names}
        if len(kinds) != 1:
            raise ValueError(f"{', '.join(names)} have different formats: {', '.join(sorted(kinds))}")
        return self._weight([[name] for name in names], kinds.pop(), grouped=False, in_turns=in_turns)

    def experts(self, prefix: str, count: int, *parts: str) -> Weight:
        """Experts 0..count-1 as groups; of two parts of one expert (w1, w3) rows come in turns."""
        names = [[f"{prefix}.experts.{e}.{part}.weight" for e in range(count)] for part in parts]
        return self._weight(names, self._format(self.schema[names[0][0]]), grouped=True, in_turns=len(parts) > 1)

    def groups(self, name: str, count: int) -> Weight:
        """A weight whose rows are `count` products of their own."""
        weight, scale = self.linear(name), None
        if weight.name in FIELD:  # [k / 128, rows of scales]
            scale = weight.scale.unflatten(-1, (count, -1)).movedim(-2, 0).contiguous()
        elif weight.scale is not None:
            scale = weight.scale.unflatten(0, (count, -1))
        return Weight(weight.data.unflatten(0, (count, -1)), scale, weight.name)

    def _format(self, spec: TensorSpec) -> str:
        return FORMATS[spec.kind] if self.config.quantized else "bf16"

    def _weight(self, names: list[list[str]], kind: str, grouped: bool, in_turns: bool = False) -> Weight:
        """names[part][group]; parts are stacked over rows, groups get a dimension of their own."""
        dtype = torch.bfloat16 if kind == "bf16" else None
        data = self._stack(names, dtype, grouped, TURN * in_turns)
        if kind == "bf16":
            return Weight(data, None, kind)
        turn = TURN * in_turns if kind == "mxfp4" else int(in_turns)  # an FP8 scale is for as many rows as a turn has
        scale = self._stack([[scale_name(name) for name in part] for part in names], None, grouped, turn)
        return Weight(*held(data.view(torch.uint8) if kind == "mxfp4" else data, scale.view(torch.uint8), kind))

    def _stack(self, names: list[list[str]], dtype: torch.dtype | None, grouped: bool, turn: int) -> torch.Tensor:
        """Bytes are joined as bytes: not every dtype here can be concatenated. turn: of how many rows; 0: in order."""

        def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            return interleave(*parts, turn) if turn else torch.cat(list(parts))

        parts = [[self.checkpoint.tensor(name) for name in part] for part in names]
        kind = dtype or parts[0][0].dtype
        parts = [[(t.to(dtype) if dtype else t.view(torch.uint8)) for t in part] for part in parts]
        if grouped:
            whole = torch.stack([join(group) for group in zip(*parts, strict=True)])
        else:
            whole = join([t for part in parts for t in part])
        whole = whole.to(self.device)
        return (whole if dtype else whole.view(kind)).contiguous()


@dataclass(slots=True)
class Mix:
    """Coefficients' weights of one sublayer's hyper-connection."""

    fn: torch.Tensor  # bf16 [48, 4 D] (`split_projection`)
    base: torch.Tensor
    scale: torch.Tensor


@dataclass(slots=True)
class Source:
    """What a layer that owns compressed KV has: compressor and index keys."""

    wkv: Weight  # values of entries, and behind them their gates when `gated`
    gated: bool
    norm: torch.Tensor
    wk: Weight
    k_norm: torch.Tensor


@dataclass(slots=True)
class Selector:
    """What a layer that selects entries has."""

    wq: Weight
    weights: Weight


@dataclass(slots=True)
class Attention:
    first: Weight  # query latent, then window KV
    q_norm: torch.Tensor
    wq: Weight
    kv_norm: torch.Tensor
    sink: torch.Tensor
    wo_a: Weight
    wo_b: Weight
    source: Source | None = None
    selector: Selector | None = None


@dataclass(slots=True)
class Experts:
    gate: Weight
    bias: torch.Tensor
    bias_vl: torch.Tensor
    w_in: Weight
    w_out: Weight
    shared_in: Weight
    shared_out: Weight
    count: int
    top_k: int


@dataclass(slots=True)
class Engram:
    wkv: Weight
    q_weight: torch.Tensor
    k_weight: torch.Tensor


@dataclass(slots=True)
class Layer:
    attn_norm: torch.Tensor
    ffn_norm: torch.Tensor
    attn_mix: Mix
    ffn_mix: Mix
    attn: Attention
    ffn: Experts
    engram: Engram | None = None


def layer(w: Weights, index: int) -> Layer:
    """Layer `index` of the backbone."""
    c, prefix = w.config, f"layers.{index}"
    result = block(w, prefix, c.n_routed_experts, c.num_experts_per_tok)
    attn = f"{prefix}.attn"
    if index in c.kv_source_layer_ids:
        gated = c.compress_ratios[index] > 1
        result.attn.source = Source(
            wkv=w.linear(*(f"{attn}.compressor.{part}.weight" for part in (("wkv", "wgate") if gated else ("wkv",)))),
            gated=gated,
            norm=w.norm(f"{attn}.compressor.norm.weight"),
            wk=w.linear(f"{attn}.indexer.wk.weight"),
            k_norm=w.norm(f"{attn}.indexer.k_norm.weight"),
        )
    if index in c.index_source_layer_ids:
        result.attn.selector = Selector(
            w.linear(f"{attn}.indexer.wq_b.weight"), w.linear(f"{attn}.indexer.weights_proj.weight")
        )
    if index in c.engram_layer_ids:
        engram = f"{prefix}.engram"
        result.engram = Engram(w.linear(f"{engram}.wkv.weight"), w.norm(f"{engram}.q_weight"), w.norm(f"{engram}.k_weight"))
    return result


def block(w: Weights, prefix: str, experts: int, top_k: int) -> Layer:
    """What every layer and every draft stage has."""
    c, attn, ffn = w.config, f"{prefix}.attn", f"{prefix}.ffn"
    return Layer(
        attn_norm=w.norm(f"{prefix}.attn_norm.weight"),
        ffn_norm=w.norm(f"{prefix}.ffn_norm.weight"),
        attn_mix=_mix(w, f"{prefix}.hc_attn"),
        ffn_mix=_mix(w, f"{prefix}.hc_ffn"),
        attn=Attention(
            first=w.linear(f"{attn}.wq_a.weight", f"{attn}.wkv.weight"),
            q_norm=w.norm(f"{attn}.q_norm.weight"),
            wq=w.linear(f"{attn}.wq_b.weight"),
            kv_norm=w.norm(f"{attn}.kv_norm.weight"),
            sink=w.tensor(f"{attn}.attn_sink", torch.float32),
            wo_a=w.groups(f"{attn}.wo_a.weight", c.o_groups),
            wo_b=w.linear(f"{attn}.wo_b.weight"),
        ),
        ffn=Experts(
            gate=w.linear(f"{ffn}.gate.weight"),
            bias=w.tensor(f"{ffn}.gate.bias", torch.float32),
            bias_vl=w.tensor(f"{ffn}.gate.bias_vl", torch.float32),
            w_in=w.experts(ffn, experts, "w1", "w3"),
            w_out=w.experts(ffn, experts, "w2"),
            shared_in=w.linear(f"{ffn}.shared_experts.w1.weight", f"{ffn}.shared_experts.w3.weight", in_turns=True),
            shared_out=w.linear(f"{ffn}.shared_experts.w2.weight"),
            count=experts,
            top_k=top_k,
        ),
    )


def _mix(w: Weights, prefix: str) -> Mix:
    fn, base, scale = (w.tensor(f"{prefix}_{part}", torch.float32) for part in ("fn", "base", "scale"))
    return Mix(split_projection(fn), base, scale)
