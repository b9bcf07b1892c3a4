"""From a V4 checkpoint to a model: its tensors, decoded, where the modules keep them.

FP8 and FP4 weights are decoded once, at load; the token embedding stays in the file's memory map.
"""

from __future__ import annotations

import torch
from torch import nn

from headrace.kernels.quantize import dequantize_block_fp8, dequantize_mxfp4

from ...batch import Model
from ...checkpoint import Checkpoint, CheckpointError
from ...device import keys_are_independent, row_rule
from ...loader import LoadOptions
from ..v41.moe import MoE
from .config import FP8_BLOCK, ModelConfig
from .model import V4Model
from .schema import IGNORED, TensorSpec, checkpoint_schema, released_name, scale_name, stored


def load(checkpoint: Checkpoint, config: ModelConfig, options: LoadOptions) -> Model:
    if torch.device(options.device).type != "cpu":
        raise ValueError(f"device {options.device!r}: models of this family run on 'cpu' so far")
    if options.keep_rows is not None:
        raise ValueError(f"keep_rows is {options.keep_rows}, but every layer of a V4 model runs on every row: leave it out")
    check_tensors(checkpoint, config)
    with torch.device("meta"):
        model = V4Model(
            config,
            kv_store=options.kv_store,
            numerics=options.numerics,
            batch_invariant=options.batch_invariant,
            dtype=options.dtype or torch.float32,
        )
    model.eval().requires_grad_(False)
    _Placer(model, checkpoint, config).place()
    model.finish_loading()
    if options.batch_invariant:
        model.set_row_rule(*_row_rule(model))
    return model


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Missing, extra, mis-shaped and wrongly typed tensors are refused by name."""
    for name in [name for name in checkpoint.entries if released_name(name) != name]:
        checkpoint.entries[released_name(name)] = checkpoint.entries.pop(name)
    expected = stored(checkpoint_schema(config), checkpoint, config.quantized)
    extra = checkpoint.check(expected, lambda name: name.startswith(IGNORED))
    if extra:
        hint = ""
        if extra[0].endswith(".scale") and not config.quantized:
            hint = "; config.json has no quantization_config"
        raise CheckpointError(f"{checkpoint.path}: {extra[0]} is not part of this model ({len(extra)} extra tensors){hint}")


def _row_rule(model: V4Model) -> tuple[int, int]:
    """RuntimeError when no rule gives equal bits on this machine."""
    heads, dim = model.config.index_n_heads, model.config.index_head_dim
    if not keys_are_independent(heads, dim):
        raise RuntimeError(
            f"batch_invariant: on this machine index scores of {heads} heads get other bits when more rows or keys stand "
            "beside them; run without batch_invariant"
        )
    floats = [p for p in model.parameters() if p.is_floating_point()]
    shapes = {tuple(p.shape) for p in floats if p.dim() == 2 and p.shape[0] > 1}
    shapes |= {(p.shape[:3].numel(), p.shape[3]) for p in floats if p.dim() == 4}  # all experts as one matrix
    return row_rule(shapes)


class _Placer:
    """Decodes tensors and puts them where the modules keep them."""

    def __init__(self, model: V4Model, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self.model, self.checkpoint, self.config = model, checkpoint, config

    def place(self) -> None:
        for module in self.model.modules():
            if isinstance(module, MoE):
                for name in ("w_in", "w_out"):
                    empty = torch.empty(getattr(module, name).shape, dtype=self.model.dtype)
                    setattr(module, name, nn.Parameter(empty, requires_grad=False))
        for name, spec in checkpoint_schema(self.config).items():
            if ".ffn.experts." in name or ".ffn.shared_experts." in name:
                self._place_expert(name, spec)
            else:
                self._place_parameter(name, spec)
        left = [name for name, parameter in self.model.named_parameters() if parameter.is_meta]
        assert not left, f"parameters without a tensor: {left}"

    def _place_parameter(self, name: str, spec: TensorSpec) -> None:
        owner, leaf = self.model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        value = self.checkpoint.tensor(name) if name == "embed.weight" else self._decode(name, spec)
        if leaf == "tid2eid":
            self._check_table(name, value)
        setattr(owner, leaf, nn.Parameter(value, requires_grad=False))

    def _check_table(self, name: str, value: torch.Tensor) -> None:
        low, high, experts = int(value.min()), int(value.max()), self.config.n_routed_experts
        if low < 0 or high >= experts:
            raise CheckpointError(f"{self.checkpoint.path}: {name} names experts {low} to {high}; there are {experts}")

    def _place_expert(self, name: str, spec: TensorSpec) -> None:
        prefix, _, rest = name.partition(".ffn.")
        moe = self.model.get_submodule(f"{prefix}.ffn")
        parts = rest.split(".")  # experts.E.w1.weight or shared_experts.w1.weight
        expert = int(parts[1]) if parts[0] == "experts" else moe.experts
        value = self._decode(name, spec)
        match parts[-2]:
            case "w1":
                moe.w_in[0, expert] = value
            case "w3":
                moe.w_in[1, expert] = value
            case "w2":
                moe.w_out[:, expert] = value

    def _decode(self, name: str, spec: TensorSpec) -> torch.Tensor:
        tensor = self.checkpoint.tensor(name)
        if spec.kind == "i64":
            return tensor.to(torch.int64, copy=True)
        match self.checkpoint.entries[name].dtype:
            case "I8":
                value = dequantize_mxfp4(tensor, self.checkpoint.tensor(scale_name(name))).to(self.model.dtype)
            case "F8_E4M3":
                scale = self.checkpoint.tensor(scale_name(name))
                value = dequantize_block_fp8(tensor, scale, FP8_BLOCK).to(self.model.dtype)
            case _:
                value = tensor.to(torch.float32 if spec.kind == "f32" else self.model.dtype, copy=True)
        if not value.isfinite().all():
            raise CheckpointError(f"{self.checkpoint.path}: {name} holds values that are not finite; the file is damaged")
        return value
