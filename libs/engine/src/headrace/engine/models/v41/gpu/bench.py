"""Decode steps and prefill of a V4.1-shaped model on a GPU, beside the time that its bytes alone would take.

    python -m headrace.engine.models.v41.gpu.bench [--layers 8] [--experts 96] [--batch 1,8,64,256] [--context 4096,32768]

Layers have the released dimensions and every kind of source; weights and cache are random bytes, made on the device. A step
reads every weight of the experts that some row chose, every row's window, its selected entries and the index keys it
scores: that sum over the device's copy rate (measured in the same run, or --tbs) is the roofline. Reported per batch and
context: milliseconds of a step as a caller sees it and on the device alone, the fraction of the roofline, what of the step the
host does not hide, and the bytes per component. Nothing is loaded from a checkpoint, and no text comes out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

from ....batch import Segment
from ....cache import KVPool
from ....config import parse_config
from ..config import ModelConfig
from ..engram import NgramHash
from ..schema import BLOCK, TensorSpec
from . import weights
from .graph import Graph
from .model import V41Gpu
from .weights import Weight, Weights

RELEASED: dict[str, Any] = {
    "vocab_size": 129280, "hidden_size": 5120, "moe_intermediate_size": 2304, "num_attention_heads": 64, "head_dim": 512,
    "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8, "num_experts_per_tok": 6,
    "sliding_window": 128, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512, "candidate_topk_blocks": 2048,
    "candidate_block_size": 8, "engram_n_heads": 8, "engram_head_dim": 256, "engram_vocab_size": 20000,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
}  # fmt: skip
# What the kernels allow at the least, to try this command under Triton's interpreter.
SMALL = RELEASED | {
    "vocab_size": 512, "hidden_size": 128, "moe_intermediate_size": 128, "num_attention_heads": 4, "q_lora_rank": 128,
    "o_lora_rank": 64, "o_groups": 2, "num_experts_per_tok": 2, "sliding_window": 8, "index_n_heads": 16, "index_topk": 8,
    "candidate_topk_blocks": 2, "engram_n_heads": 4, "engram_head_dim": 32, "engram_vocab_size": 400,
}  # fmt: skip


def schedule(layers: int) -> dict[str, Any]:
    """Two window layers, a quarter of ratio 2 (one source), the rest of ratio 1: source, reuse, reindex, reuse, reindex ..."""
    if layers < 6:
        raise ValueError(f"--layers {layers}: at least 6 are needed for every kind of layer")
    cut = 2 + max(1, layers // 4)
    ratios = [0] * 2 + [2] * (cut - 2) + [1] * (layers - cut)
    return {
        "num_hidden_layers": layers, "compress_ratios": ratios, "kv_source_layer_ids": [2, cut],
        "index_source_layer_ids": [2, cut, *range(cut + 2, layers, 2)], "candidate_source_layer_id": cut,
        "engram_layer_ids": [1],
    }  # fmt: skip


def configure(shape: dict[str, Any], layers: int, experts: int) -> ModelConfig:
    compressed = min(1000, shape["vocab_size"])
    data = shape | schedule(layers) | {"n_routed_experts": experts, "engram_compressed_vocab_size": compressed}
    heads = (4 - 1) * shape["engram_n_heads"]
    return parse_config(data | {"engram_num_embeddings": [heads * (shape["engram_vocab_size"] + 2000)]})


class RandomWeights(Weights):
    """Weights of the right formats from nowhere: codes of any value, scales near the inverse root of the width."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__(None, config, device)
        self.draw = torch.Generator(device).manual_seed(0)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        spec = self.schema[name]
        values = torch.randn(spec.shape, generator=self.draw, device=self.device) * spec.shape[-1] ** -0.5
        return (values + (1.0 if name.endswith("norm.weight") else 0.0)).to(dtype or torch.bfloat16)

    def _weight(self, names: list[list[str]], kind: str, grouped: bool) -> Weight:
        specs: list[TensorSpec] = [self.schema[part[0]] for part in names]
        rows, columns = sum(spec.shape[0] for spec in specs), specs[0].shape[1]
        lead = (len(names[0]),) if grouped else ()
        if kind == "bf16":
            values = torch.randn(*lead, rows, columns, generator=self.draw, device=self.device) * columns**-0.5
            return Weight(values.bfloat16(), None, kind)
        exponent = 127 - int(np.log2(columns) / 2) - (1 if kind == "mxfp4" else 0)
        if kind == "mxfp4":
            codes, grid = self._bytes(*lead, rows, columns // 2, most=256), (rows, columns // BLOCK)
        else:
            codes, grid = self._bytes(*lead, rows, columns, most=0x38), (rows // BLOCK, columns // BLOCK)
            codes = codes.view(torch.float8_e4m3fn)
        return Weight(codes, torch.full((*lead, *grid), exponent, dtype=torch.uint8, device=self.device), kind)

    def _bytes(self, *shape: int, most: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=self.draw, device=self.device, dtype=torch.uint8)


def build(config: ModelConfig, device: torch.device, graphs: bool = True) -> V41Gpu:
    w = RandomWeights(config, device)
    dim = config.engram_head_dim
    table = torch.randn(config.engram_num_embeddings[0], dim, generator=w.draw, device=device).bfloat16()
    hashes = NgramHash(config, np.arange(config.vocab_size) % config.engram_compressed_vocab_size)
    return V41Gpu(
        config,
        device,
        [weights.layer(w, index) for index in range(config.num_hidden_layers)],
        w.tensor("embed.weight"),
        w.tensor("norm.weight"),
        w.linear("head.weight"),
        hashes,
        {1: lambda rows: table.index_select(0, torch.from_numpy(rows).to(device))},
        numerics="exact",
        batch_invariant=False,
        keep_rows=None,
        graphs=graphs,
    )


# ------------------------------------------------------------------ bytes


def step_bytes(model: V41Gpu, batch: int, context: int) -> dict[str, float]:
    """What one decode step has to read, per component. Experts: those that at least one of `batch` rows chose, expected."""
    c = model.config
    total = dict.fromkeys(("linears", "experts", "head", "mHC", "window", "selected", "index keys", "Engram"), 0.0)
    share = 1 - (1 - c.num_experts_per_tok / c.n_routed_experts) ** batch
    for index, layer in enumerate(model.layers):
        attn, ffn = layer.attn, layer.ffn
        linears = [attn.first, attn.wq, attn.wo_a, attn.wo_b, ffn.gate, ffn.shared_in, ffn.shared_out]
        if attn.source is not None:
            linears += [w for w in (attn.source.wkv, attn.source.wgate, attn.source.wk) if w is not None]
        if attn.selector is not None:
            linears += [attn.selector.wq, attn.selector.weights]
        if layer.engram is not None:
            total["Engram"] += layer.engram.wkv.nbytes
        total["linears"] += sum(w.nbytes for w in linears)
        total["experts"] += share * (ffn.w_in.nbytes + ffn.w_out.nbytes)
        total["mHC"] += layer.attn_mix.fn.nbytes + layer.ffn_mix.fn.nbytes
        total["window"] += batch * min(context, c.sliding_window) * 528
        ratio = c.compress_ratios[index]
        if ratio:
            total["selected"] += batch * min(context // ratio, c.index_topk) * 288
        if attn.selector is not None and context // ratio > c.index_topk:
            scored = context // ratio
            if c.uses_candidates(index):
                scored = min(scored, c.candidate_topk_blocks * c.candidate_block_size)
            total["index keys"] += batch * scored * 68
    total["head"] = model.head.nbytes
    return total


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a large device copy reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _device_seconds(lambda: target.copy_(source), 10)
    return 2 * source.nbytes / seconds


def _device_seconds(run: Any, times: int) -> float:
    """Median seconds of a launch on the device; wall time without one."""
    spans = []
    for _ in range(times):
        if torch.cuda.is_available():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            spans.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            run()
            spans.append(time.perf_counter() - start)
    return statistics.median(spans)


# ------------------------------------------------------------------ runs


def decode(model: V41Gpu, batch: int, context: int, rate: float, times: int) -> dict[str, Any]:
    """One row: batch sequences of `context` tokens, one new row each."""
    blocks = -(-context // model.spec.block_tokens)
    kv = KVPool(model.spec, batch * blocks, device=str(model.device))
    kv.data.random_(0x30, 0x40)  # every byte is a valid code, and a scale that is neither zero nor NaN
    states = model.new_states(batch)
    states.windows.random_(0x30, 0x40)
    segments = []
    for slot in range(batch):
        for phase in range(len(states.next)):
            states.first[phase][slot], states.next[phase][slot] = 0, context - 1
        table = range(slot * blocks, (slot + 1) * blocks)
        segments.append(Segment(slot, context - 1, [5 + slot % 100], [3, 4, 5], table, outputs=[context - 1]))

    def step() -> None:
        for slot in range(batch):
            for phase in range(len(states.next)):
                states.next[phase][slot] = context - 1
        model.logits(model.forward(segments, kv, states))
        _wait(model.device)

    step()
    walls = []
    for _ in range(times):
        start = time.perf_counter()
        step()
        walls.append(time.perf_counter() - start)
    device = _device_of_step(model, batch, times)
    parts = step_bytes(model, batch, context)
    wall, ideal = statistics.median(walls), sum(parts.values()) / rate
    return {
        "batch": batch, "context": context, "wall_ms": wall * 1e3, "device_ms": device * 1e3,
        "roofline_ms": ideal * 1e3, "of_roofline": ideal / device, "host_share": 1 - device / wall,
        "tokens_per_s": batch / wall, "bytes": parts,
    }  # fmt: skip


def _device_of_step(model: V41Gpu, batch: int, times: int) -> float:
    """The captured forward and the logits, replayed back to back."""
    graph: Graph = list(model.captured.values())[-1]
    hidden = graph.run() if graph.graph is None else graph.out
    return _device_seconds(graph.replay, times) + _device_seconds(lambda: model.logits(hidden[:batch]), times)


def prefill(model: V41Gpu, tokens: int, chunk: int) -> dict[str, Any]:
    """One prompt of `tokens` in chunks."""
    blocks = -(-tokens // model.spec.block_tokens)
    kv, states = KVPool(model.spec, blocks, device=str(model.device)), model.new_states(1)
    draw = np.random.default_rng(0).integers(3, model.vocab_size, tokens).tolist()

    def run() -> float:
        states.reset(0)
        start = time.perf_counter()
        for begin in range(0, tokens, chunk):
            stop = min(begin + chunk, tokens)
            piece = Segment(0, begin, draw[begin:stop], draw[max(0, begin - 3) : begin], range(blocks), outputs=[stop - 1])
            model.forward([piece], kv, states)
        _wait(model.device)
        return time.perf_counter() - start

    run()
    seconds = statistics.median(run() for _ in range(3))
    active = sum(_active(layer, model.config) for layer in model.layers)
    return {
        "tokens": tokens, "chunk": chunk, "seconds": seconds, "tokens_per_s": tokens / seconds,
        "weight_tflops": 2 * active * tokens / seconds / 1e12,
    }  # fmt: skip


def _active(layer: weights.Layer, c: ModelConfig) -> float:
    """Weights that one row multiplies with, attention's own products not counted."""
    width = {"mxfp4": 2, "fp8": 1, "bf16": 1}
    attn, ffn = layer.attn, layer.ffn
    dense = [attn.first, attn.wq, attn.wo_a, attn.wo_b, ffn.shared_in, ffn.shared_out]
    share = c.num_experts_per_tok / c.n_routed_experts
    return sum(w.data.numel() * width[w.name] for w in dense) + share * sum(
        w.data.numel() * width[w.name] for w in (ffn.w_in, ffn.w_out)
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="headrace.engine.models.v41.gpu.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=96)
    parser.add_argument("--batch", type=_numbers, default=[1, 8, 64, 256], help="sequences of a step (default: 1,8,64,256)")
    parser.add_argument("--context", type=_numbers, default=[4096, 32768, 131072], help="tokens of each (default: 4k,32k,128k)")
    parser.add_argument("--prefill", type=_numbers, default=[4096, 32768], help="prompt lengths; 0: none")
    parser.add_argument("--chunk", type=int, default=4096, help="rows of a prefill step (default: 4096)")
    parser.add_argument("--times", type=int, default=10, help="repetitions; the median counts (default: 10)")
    parser.add_argument("--tbs", type=float, default=0.0, help="TB/s of the roofline (default: a copy, measured)")
    parser.add_argument("--small", action="store_true", help="the smallest dimensions: only to try the command")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is visible; --device cpu --small under TRITON_INTERPRET=1 only tries the command")
    config = configure(SMALL if options.small else RELEASED, options.layers, options.experts)
    rate = options.tbs * 1e12 or (copy_rate(device) if device.type == "cuda" else 1e10)
    model = build(config, device)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    _say(options, {"card": card, "tb_per_s": rate / 1e12, "layers": options.layers, "experts": options.experts})
    for context in options.context:
        for batch in options.batch:
            _say(options, decode(model, batch, context, rate, options.times))
            model.captured.clear()
    for tokens in filter(None, options.prefill):
        _say(options, prefill(model, tokens, options.chunk))
    return 0


def _say(options: argparse.Namespace, row: dict[str, Any]) -> None:
    if options.json:
        print(json.dumps(row), flush=True)
        return
    parts = row.pop("bytes", {})
    print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    if parts:
        print("    MB: " + ", ".join(f"{k} {v / 1e6:.1f}" for k, v in parts.items()), flush=True)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
