"""From a V4.1 checkpoint to a model: its tensors, decoded, where the modules keep them.

FP8 and FP4 weights are decoded once, at load; Engram tables and the token embedding stay in the file's memory map.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from headrace.kernels.quantize import dequantize_block_fp8, dequantize_fp8_ue8m0, dequantize_mxfp4

from ...batch import Model
from ...checkpoint import Checkpoint, CheckpointError
from ...device import keys_are_independent, row_rule
from ...loader import LoadOptions
from .config import ModelConfig
from .engram import Engram, NgramHash, RowReader, cached_compressed_ids
from .model import V41Model
from .moe import MoE
from .schema import BLOCK, TensorSpec, checkpoint_schema, language_schema, scale_name


def load(checkpoint: Checkpoint, config: ModelConfig, options: LoadOptions) -> Model:
    if torch.device(options.device).type != "cpu":
        from .gpu import loader as gpu  # imports kernels, which a CPU never needs

        return gpu.load(checkpoint, config, options)
    check_tensors(checkpoint, config)
    with torch.device("meta"):
        model = V41Model(
            config,
            kv_store=options.kv_store,
            numerics=options.numerics,
            batch_invariant=options.batch_invariant,
            keep_rows=options.keep_rows,
            dtype=options.dtype or torch.float32,
        )
    model.eval().requires_grad_(False)
    _Placer(model, checkpoint, config).place()
    model.finish_loading()
    if options.batch_invariant:
        model.set_row_rule(*_row_rule(model))
    if config.engram_layer_ids:
        model.ngrams = NgramHash(config, token_map(checkpoint))
    return model


def _row_rule(model: V41Model) -> tuple[int, int]:
    """RuntimeError when no rule gives equal bits on this machine."""
    heads, dim = model.config.index_n_heads, model.config.index_head_dim
    if not keys_are_independent(heads, dim):
        raise RuntimeError(
            f"batch_invariant: on this machine index scores of {heads} heads get other bits when more rows or keys stand "
            "beside them; run without batch_invariant"
        )
    shapes = {tuple(p.shape) for p in model.parameters() if p.dim() == 2 and p.shape[0] > 1}
    shapes |= {(p.shape[:3].numel(), p.shape[3]) for p in model.parameters() if p.dim() == 4}  # all experts as one matrix
    return row_rule(shapes)


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Missing, extra, mis-shaped and wrongly typed tensors are refused by name."""
    expected = {
        name: (dtypes, shape)
        for tensor, spec in checkpoint_schema(config).items()
        for name, dtypes, shape in spec.stored(tensor, config.quantized)
    }
    extra = checkpoint.check(expected, _ignored)
    if extra:
        hint = ""
        if extra[0].startswith("mtp.") and not config.num_nextn_predict_layers:
            hint = "; config.json declares no draft (num_nextn_predict_layers 0)"
        if extra[0].startswith(("vision.", "aligner.", "image_")) and config.vision is None:
            hint = "; config.json has no vision_config"
        raise CheckpointError(
            f"{checkpoint.path}: {extra[0]} is not part of this model ({len(extra)} extra tensors){hint}"
        )


def _ignored(name: str) -> bool:
    """Copies of the backbone's embedding and head that some exports keep under a draft stage."""
    return name.startswith("mtp.") and name.endswith((".embed.weight", ".head.weight")) and "markov_head" not in name


def token_map(checkpoint: Checkpoint) -> np.ndarray:
    file = checkpoint.path / "tokenizer.json"
    if not file.exists():
        raise CheckpointError(f"{file} does not exist; Engram hashes need the checkpoint's own tokenizer")
    try:
        return cached_compressed_ids(file)
    except Exception as error:  # the tokenizers package raises bare Exception
        raise CheckpointError(f"{file} is not a tokenizer: {error}") from None


# ------------------------------------------------------------------ placing


class _Placer:
    """Decodes text tensors and puts them where the modules keep them."""

    def __init__(self, model: V41Model, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self.model, self.checkpoint, self.config = model, checkpoint, config

    def place(self) -> None:
        for module in self.model.modules():
            if isinstance(module, MoE):
                for name in ("w_in", "w_out"):
                    empty = torch.empty(getattr(module, name).shape, dtype=self.model.dtype)
                    setattr(module, name, nn.Parameter(empty, requires_grad=False))
        for name, spec in language_schema(self.config).items():
            if ".ffn.experts." in name or ".ffn.shared_experts." in name:
                self._place_expert(name, spec)
            elif name.endswith("engram.embed.weight"):
                self._module(name, depth=2, kind=Engram).read_rows = row_reader(self.checkpoint, self.config, name)
            else:
                self._place_parameter(name, spec)
        left = [name for name, parameter in self.model.named_parameters() if parameter.is_meta]
        assert not left, f"parameters without a tensor: {left}"

    def _place_parameter(self, name: str, spec: TensorSpec) -> None:
        owner = self.model.get_submodule(name.rpartition(".")[0])
        leaf = name.rpartition(".")[2]
        assert getattr(owner, leaf).shape == spec.shape, name
        value = self.checkpoint.tensor(name) if name == "embed.weight" else self._decode(name, spec)
        setattr(owner, leaf, nn.Parameter(value, requires_grad=False))

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
        stored = self.checkpoint.tensor(name)
        if not self.config.quantized or spec.kind in ("bf16", "f32"):
            value = stored.to(torch.float32 if spec.kind == "f32" else self.model.dtype)
            value = value.clone() if value.data_ptr() == stored.data_ptr() else value
        else:
            scale = self.checkpoint.tensor(scale_name(name))
            decode = dequantize_mxfp4 if spec.kind == "fp4" else dequantize_block_fp8
            value = decode(stored, scale).to(self.model.dtype)
        if not value.isfinite().all():
            raise CheckpointError(
                f"{self.checkpoint.path}: {name} holds values that are not finite; the file is damaged"
            )
        return value

    def _module(self, name: str, depth: int, kind: type) -> nn.Module:
        module = self.model.get_submodule(".".join(name.split(".")[:-depth]))
        assert isinstance(module, kind), name
        return module


def row_reader(checkpoint: Checkpoint, config: ModelConfig, name: str) -> RowReader:
    """Reads rows of an Engram table from the file's memory map: only what is asked for is ever loaded."""
    if not config.quantized:
        table = checkpoint.tensor(name)
        return lambda rows: table.index_select(0, torch.from_numpy(rows)).float()
    data, scale = checkpoint.bytes_of(name), checkpoint.bytes_of(scale_name(name))

    def read(rows: np.ndarray) -> torch.Tensor:
        picked = torch.from_numpy(np.ascontiguousarray(data[rows])).view(torch.float8_e4m3fn)
        return dequantize_fp8_ue8m0(picked, torch.from_numpy(np.ascontiguousarray(scale[rows])), BLOCK)

    return read
