"""Decode steps and prefill of a V4.1-shaped model on a GPU, beside the time that its bytes alone would take.

    python -m headrace.engine.models.v41.gpu.bench [--layers 8] [--experts 96] [--batch 64,256,8,1] [--context 4096,32768]

Layers have the released dimensions and every kind of source. Weights are random, of both signs; rows have tokens of their own
and caches of records that hold normal values, so that rows differ. Gate biases are balanced first, on other rows, as training
balances them: then rows choose about as many experts as an even draw (`chosen` by layer and `even`). A step reads every weight
of the experts that some row chose, every row's window, its selected entries and the index keys it scores: that sum over the
device's copy rate (measured in the same run, or --tbs) is the roofline. Beside it stands the `bound`: of each component its
bytes or its products at the framework's own bf16 rate, whichever takes longer, for many rows have more products than bytes.
Reported per batch and context: milliseconds of a step as a caller sees it who waits for each, in a row of steps that the host
prepares while the device is busy, and on the device alone; the fractions of roofline and bound; how much longer than the device
alone the row of steps takes; the bytes per component. With --parts also the device's time when nothing runs beside anything
else (`one_stream_ms`), and of that the time per component. With --engine the whole engine decodes too (scheduling, sampling and
what becomes of tokens), steps planned ahead, and is held against the device alone at the same length. With
--apart, a step's rows come once for each set of what is launched by itself there, one after another. A row that fails says so
and the others go on. Nothing is loaded from a checkpoint, and no text comes out.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from headrace.kernels import tuning
from headrace.kernels.gemm_upcast import PACKED, STEP, VALUES, pack_words
from headrace.kernels.quantize import pack_window_record

from .... import bench as engine_bench
from .... import bench_overlap
from ....batch import Segment
from ....cache import KVPool
from ....config import parse_config
from ..config import ModelConfig
from ..engram import NgramHash
from ..schema import BLOCK, TensorSpec
from . import model as passes
from . import weights
from .draft import Draft
from .graph import staged
from .model import APART, V41Gpu
from .parts import by_kernel, by_part
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


STAGES = 3  # of the draft


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


def configure(shape: dict[str, Any], layers: int, experts: int, draft: bool = False) -> ModelConfig:
    """`draft`: with DSpark's stages, which have the released number of experts (no more than the layers)."""
    compressed = min(1000, shape["vocab_size"])
    data = shape | schedule(layers) | {"n_routed_experts": experts, "engram_compressed_vocab_size": compressed}
    if draft:
        data |= {
            "num_nextn_predict_layers": STAGES, "compress_ratios": data["compress_ratios"] + [0] * STAGES,
            "dspark_target_layer_ids": list(range(layers - STAGES, layers)), "dspark_noise_token_id": shape["vocab_size"] - 1,
            "dspark_n_routed_experts": min(128, experts), "dspark_num_experts_per_tok": min(3, experts),
        }  # fmt: skip
    heads = (4 - 1) * shape["engram_n_heads"]
    return parse_config(data | {"engram_num_embeddings": [heads * (shape["engram_vocab_size"] + 2000)]})


class RandomWeights(Weights):
    """Weights of the right formats from nowhere: codes of any value, scales near the inverse root of the width; gates without
    a bias."""

    def __init__(self, config: ModelConfig, device: torch.device, packed: bool = True) -> None:
        super().__init__(None, config, device)
        self.draw, self.packed = torch.Generator(device).manual_seed(0), packed

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        spec = self.schema[name]
        if ".gate.bias" in name:
            return torch.zeros(spec.shape, device=self.device)
        values = torch.randn(spec.shape, generator=self.draw, device=self.device) * spec.shape[-1] ** -0.5
        return (values + (1.0 if name.endswith("norm.weight") else 0.0)).to(dtype or torch.bfloat16)

    def _weight(self, names: list[list[str]], kind: str, grouped: bool, in_turns: bool = False) -> Weight:
        specs: list[TensorSpec] = [self.schema[part[0]] for part in names]
        rows, columns = sum(spec.shape[0] for spec in specs), specs[0].shape[1]
        lead = (len(names[0]),) if grouped else ()
        if kind == "bf16":
            values = torch.randn(*lead, rows, columns, generator=self.draw, device=self.device) * columns**-0.5
            return Weight(values.bfloat16(), None, kind)
        exponent = 127 - int(np.log2(columns) / 2) - (1 if kind == "mxfp4" else 0)
        if self.packed:  # any word is four or eight values; a scale word is what packing makes of four equal scales
            name = PACKED[kind]
            words = self._codes(kind, *lead, rows, columns // VALUES[name] * 4).view(torch.int32)
            like = torch.full((rows if kind == "mxfp4" else rows // BLOCK, 4), exponent, dtype=torch.uint8)
            _, scale, _ = pack_words(torch.zeros(rows, STEP // VALUES[kind], dtype=torch.uint8), like, kind)
            scale = scale.to(self.device).expand(*lead, columns // STEP, -1).contiguous()
            return Weight(words, scale, name)
        if kind == "mxfp4":
            codes, grid = self._codes(kind, *lead, rows, columns // 2), (rows, columns // BLOCK)
        else:
            codes, grid = self._codes(kind, *lead, rows, columns), (rows // BLOCK, columns // BLOCK)
            codes = codes.view(torch.float8_e4m3fn)
        return Weight(codes, torch.full((*lead, *grid), exponent, dtype=torch.uint8, device=self.device), kind)

    def _codes(self, kind: str, *shape: int) -> torch.Tensor:
        """Any byte is two FP4 values. FP8 values are below 1, of both signs: weights of one sign make all rows alike."""
        codes = torch.randint(0, 256, shape, generator=self.draw, device=self.device, dtype=torch.uint8)
        return codes if kind == "mxfp4" else (codes & 0x80) | (codes & 0x7F).remainder_(0x38)


def build(config: ModelConfig, device: torch.device, graphs: bool = True, packed: bool = True) -> V41Gpu:
    """`packed`: FP8 and FP4 weights as the loader holds them, words that decode in registers (`gemm_upcast.pack_words`)."""
    w = RandomWeights(config, device, packed)
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
        {1: lambda rows: table.index_select(0, staged(rows, device).to(device, non_blocking=True))},
        Draft.read(w),
        numerics="exact",
        batch_invariant=False,
        keep_rows=None,
        graphs=graphs,
    )


# ------------------------------------------------------------------ bytes


def step_bytes(model: V41Gpu, batch: int, context: int, chosen: list[int]) -> dict[str, float]:
    """What one decode step has to read, per component. `chosen`: experts of each layer that at least one row takes."""
    c = model.config
    total = dict.fromkeys(("linears", "experts", "head", "mHC", "window", "selected", "index keys", "Engram"), 0.0)
    for index, layer in enumerate(model.layers):
        attn, ffn = layer.attn, layer.ffn
        linears = [attn.first, attn.wq, attn.wo_a, attn.wo_b, ffn.gate, ffn.shared_in, ffn.shared_out]
        if attn.source is not None:
            linears += [attn.source.wkv, attn.source.wk]
        if attn.selector is not None:
            linears += [attn.selector.wq, attn.selector.weights]
        if layer.engram is not None:
            total["Engram"] += layer.engram.wkv.nbytes
        total["linears"] += sum(w.nbytes for w in linears)
        total["experts"] += chosen[index] / ffn.count * (ffn.w_in.nbytes + ffn.w_out.nbytes)
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


def step_products(model: V41Gpu, batch: int, context: int) -> dict[str, float]:
    """Operations of one decode step (two a multiplication with its sum), by those components of `step_bytes` that multiply;
    attention goes with `selected`. Rows of padding are not counted."""
    c = model.config
    total = dict.fromkeys(("linears", "experts", "head", "Engram", "selected", "index keys"), 0.0)
    for index, layer in enumerate(model.layers):
        ratio, routed = c.compress_ratios[index], layer.ffn.w_in.data.numel() * VALUES[layer.ffn.w_in.name]
        routed += layer.ffn.w_out.data.numel() * VALUES[layer.ffn.w_out.name]
        share = c.num_experts_per_tok / c.n_routed_experts * routed
        total["experts"] += 2 * batch * share
        total["linears"] += 2 * batch * (_active(layer, c) - share)
        if layer.engram is not None:
            total["Engram"] += 2 * batch * layer.engram.wkv.data.numel() * VALUES[layer.engram.wkv.name]
        seen = min(context, c.sliding_window) + (min(context // ratio, c.index_topk) if ratio else 0)
        total["selected"] += 4.0 * batch * c.num_attention_heads * c.head_dim * seen
        if layer.attn.selector is not None:
            keys = context // ratio
            if c.uses_candidates(index):
                keys = min(keys, c.candidate_topk_blocks * c.candidate_block_size)
            total["index keys"] += 2.0 * batch * c.index_n_heads * c.index_head_dim * keys
    total["head"] = 2.0 * batch * model.head.data.numel()
    return total


def bound(needed: dict[str, float], products: dict[str, float], rate: float, product_rate: float) -> float:
    """Seconds of a step whose components each take the longer of their bytes' time and their products', one after another."""
    return sum(max(value / rate, products.get(name, 0.0) / product_rate) for name, value in needed.items())


@contextlib.contextmanager
def _routed(model: V41Gpu, look: Callable[[torch.Tensor, torch.Tensor], None]) -> Iterator[None]:
    """Uncaptured; every routing shows its experts [T, k] and the bias that helped to choose them."""
    route, graphs = passes.route, model.graphs

    def shown(logits: torch.Tensor, bias: torch.Tensor, *rest: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        experts, shares = route(logits, bias, *rest, **options)
        look(experts, bias)
        return experts, shares

    passes.route, model.graphs = shown, False
    try:
        yield
    finally:
        passes.route, model.graphs = route, graphs


def chosen_experts(model: V41Gpu, step: Callable[[], Any]) -> list[int]:
    """Distinct experts that the rows of a step take, by layer: counted, for rows of random weights are no even draw."""
    found: list[int] = []
    with _routed(model, lambda experts, _: found.append(experts.unique().numel())):
        step()
    return found


def even_draw(count: int, top_k: int, rows: int) -> float:
    """Distinct experts that `rows` rows take on average when each takes any `top_k` of `count`."""
    return count * (1 - (1 - top_k / count) ** rows)


def balance(model: V41Gpu, batch: int, rounds: int = 24) -> None:
    """Move gate biases as training does without an auxiliary loss (DeepSeek-V3, 2.1.2): up where fewer rows than the mean come
    to an expert, down where more do. On rows of its own, so that those that are timed are balanced only as text would be."""

    def move(experts: torch.Tensor, bias: torch.Tensor) -> None:
        load = torch.bincount(experts.flatten().long(), minlength=bias.numel()).float()
        bias.add_(torch.sign(load.mean() - load), alpha=rate)

    steps, rate = Steps(model, batch, min(256, model.max_model_len), seed=1), 0.05
    with _routed(model, move):
        for _ in range(rounds):
            steps.redraw()
            steps.issue()
            rate *= 0.85


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a large device copy reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(device, lambda: target.copy_(source), 10)


def matrix_rates(device: torch.device, size: int = 8192) -> dict[str, float]:
    """Operations a second of the framework's own square product, by format: what prefill is held against."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    one = torch.ones((), device=device)
    small = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    work = {
        "bf16": lambda: a @ b,
        "fp8": lambda: torch._scaled_mm(*small, scale_a=one, scale_b=one, out_dtype=torch.bfloat16),
    }
    rates = {}
    for name, run in work.items():
        try:
            rates[name] = 2 * size**3 / _seconds(device, run, 10)
        except RuntimeError as error:  # a framework without this product
            print(f"{name} product: {error}", file=sys.stderr)
    return rates


def _seconds(device: torch.device, run: Callable[[], Any], times: int) -> float:
    """Seconds of one of `times` launches in a row, behind two that are not counted."""
    for _ in range(2):
        run()
    wait(device)
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            run()
        end.record()
        wait(device)
        return begin.elapsed_time(end) / 1e3 / times
    start = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - start) / times


# ------------------------------------------------------------------ runs


class Steps:
    """`batch` sequences of `context` tokens and their next `rows` rows each, over and over. Tokens differ from row to row;
    cache blocks, window records and pending rows hold normal values, drawn from a bank."""

    BANK = 256  # blocks

    def __init__(self, model: V41Gpu, batch: int, context: int, rows: int = 1, seed: int = 0) -> None:
        self.model, self.batch, self.context, self.rows = model, batch, context, rows
        self.blocks = -(-(context + rows) // model.spec.block_tokens)
        self.draw, self.tokens = torch.Generator(model.device).manual_seed(seed), np.random.default_rng(seed)
        self.kv = KVPool(model.spec, batch * self.blocks, device=str(model.device))
        self.states = model.new_states(batch)
        self._fill_cache()
        self._fill_states()
        self.redraw()

    def redraw(self) -> None:
        """Other tokens."""
        self.segments = []
        for slot in range(self.batch):
            table = list(range(slot * self.blocks, (slot + 1) * self.blocks))
            ids = self.tokens.integers(3, self.model.vocab_size, 3 + self.rows).tolist()
            outputs = range(self.context - 1, self.context - 1 + self.rows)
            self.segments.append(Segment(slot, self.context - 1, ids[3:], ids[:3], table, outputs=outputs))

    def _fill_cache(self) -> None:
        bank = KVPool(self.kv.spec, min(self.BANK, self.kv.num_blocks), device=str(self.kv.data.device))
        for group in bank.spec.groups:
            kind, layer = group.name.split(".")
            paged = self.model._paged(bank, kind, int(layer))
            entries = bank.num_blocks * paged.page_size
            paged.write(torch.arange(entries, device=bank.data.device), self._normal(entries, paged.dim))
        for part in self.kv.data.split(4096):
            part.copy_(bank.data.index_select(0, self._any(bank.num_blocks, len(part))))

    def _fill_states(self) -> None:
        records = pack_window_record(self._normal(32 * self.BANK, self.model.config.head_dim))
        for ring in self.states.windows:
            ring.copy_(records.index_select(0, self._any(len(records), len(ring))))
        self.states.pending.normal_(generator=self.draw)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.draw, device=self.model.device)

    def _any(self, most: int, count: int) -> torch.Tensor:
        return torch.randint(0, most, (count,), generator=self.draw, device=self.model.device)

    def issue(self, batch: int | None = None) -> torch.Tensor:
        """One step of the first `batch` sequences; returns when the device has been told."""
        segments = self.segments[:batch]
        for phase in range(len(self.states.next)):
            for segment in segments:
                self.states.first[phase][segment.slot], self.states.next[phase][segment.slot] = 0, segment.start
        return self.model.logits(self.model.forward(segments, self.kv, self.states))


def decode(
    model: V41Gpu, batch: int, context: int, rate: float, times: int, parts: bool, products: float = 0.0
) -> dict[str, Any]:
    """One row: batch sequences of `context` tokens, one new row each. products: bf16 operations a second, 0: not known."""
    steps, device = Steps(model, batch, context), model.device
    began = time.perf_counter()
    steps.issue()
    wait(device)
    first = time.perf_counter() - began
    waited, told = [], []
    for _ in range(times):
        start = time.perf_counter()
        steps.issue()
        told.append(time.perf_counter() - start)
        wait(device)
        waited.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(times):
        steps.issue()
    wait(device)
    in_a_row = (time.perf_counter() - start) / times
    alone, graph = in_a_row, None
    if model.graphs:
        graph = list(model.captured.values())[-1]
        hidden = graph.replay()[:batch].clone()
        alone = _seconds(device, lambda: (graph.replay(), model.logits(hidden)), times)
    chosen = chosen_experts(model, steps.issue)
    needed = step_bytes(model, batch, context, chosen)
    ideal = sum(needed.values()) / rate
    row = {
        "batch": batch, "context": context, "device_ms": alone * 1e3, "roofline_ms": ideal * 1e3, "of_roofline": ideal / alone,
        "step_ms": in_a_row * 1e3, "not_hidden": 1 - alone / in_a_row, "host_ms": statistics.median(told) * 1e3,
        "waited_ms": statistics.median(waited) * 1e3, "tokens_per_s": batch / in_a_row, "first_s": first,
    }  # fmt: skip
    if device.type == "cuda":
        row["memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    config = model.config
    row["chosen"], row["even"] = chosen, even_draw(config.n_routed_experts, config.num_experts_per_tok, batch)
    row["bytes"] = needed
    if products:
        least = bound(needed, step_products(model, batch, context), rate, products)
        row |= {"bound_ms": least * 1e3, "of_bound": least / alone}
    if parts and graph is not None:
        for name, measure in (
            ("one_stream_ms", lambda: one_stream(model, steps, hidden, times)),
            ("kernels_ms", lambda: by_kernel(device, list(model.captured.values())[-1].replay)),
            ("parts_ms", lambda: by_part(model, steps.issue, times)),
        ):
            try:
                row[name] = measure()
            except Exception as error:  # the row itself stands
                traceback.print_exc()
                row[f"{name}_error"] = f"{type(error).__name__}: {str(error)[:300]}"
    return row


def one_stream(model: V41Gpu, steps: Steps, hidden: torch.Tensor, times: int) -> float:
    """Milliseconds of the same step, captured without streams beside the first."""
    overlap, model.overlap = model.overlap, False
    try:
        model.captured.clear()
        steps.issue()
        graph = list(model.captured.values())[-1]
        return _seconds(model.device, lambda: (graph.replay(), model.logits(hidden)), times) * 1e3
    finally:
        model.overlap = overlap


def engine(model: V41Gpu, batch: int, prompt: int, steps: int, temperature: float, rate: float, times: int) -> dict[str, Any]:
    """The whole engine's decode steps of `batch` sequences in one thread, `steps` at least, and what of them the device alone
    does not explain; beside them those of the model in a thread of its own."""
    given = engine_bench.arguments().parse_args([])
    before = -(-batch * prompt // 2048)  # steps that compute prompts: none may end meanwhile
    given.prompt, given.output, given.temperature = prompt, before + steps, temperature
    alone = decode(model, batch, prompt + before + steps // 2, rate, times, False)
    forget(model)
    for _ in range(2):  # the first captures
        spans = bench_overlap.one_thread(model, batch, given)
    threads = bench_overlap.one(model, batch, True, None, given)
    median = statistics.median(spans)
    return {
        "steps": len(spans), "step_ms": median, "device_ms": alone["device_ms"], "not_hidden": 1 - alone["device_ms"] / median,
        "tokens_per_s": 1e3 * batch / median, "threads_step_ms": threads["step_ms"], "model_step_ms": alone["step_ms"],
    }  # fmt: skip


def prefill(model: V41Gpu, tokens: int, chunk: int, rates: dict[str, float]) -> dict[str, Any]:
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
        wait(model.device)
        return time.perf_counter() - start

    run()
    seconds = min(run() for _ in range(2))
    work = sum(prefill_work(model, tokens).values())
    return {
        "prefill": tokens, "chunk": chunk, "seconds": seconds, "tokens_per_s": tokens / seconds,
        "tflops": work / seconds / 1e12,
        **{f"of_{name}": work / seconds / rate for name, rate in rates.items()},
    }  # fmt: skip


def prefill_work(model: V41Gpu, tokens: int) -> dict[str, float]:
    """Operations of a prompt: products with weights, attention (window and selected entries), scores of index keys."""
    c, work = model.config, {"weights": 0.0, "attention": 0.0, "index": 0.0}
    position = np.arange(1, tokens + 1)
    for index, layer in enumerate(model.layers):
        work["weights"] += 2 * _active(layer, c) * tokens
        ratio = c.compress_ratios[index]
        seen = np.minimum(position, c.sliding_window) + (np.minimum(position // ratio, c.index_topk) if ratio else 0)
        work["attention"] += 4.0 * c.num_attention_heads * c.head_dim * seen.sum()
        if layer.attn.selector is not None:
            keys = position // ratio
            if c.uses_candidates(index):
                keys = np.minimum(keys, c.candidate_topk_blocks * c.candidate_block_size)
            work["index"] += 2.0 * c.index_n_heads * c.index_head_dim * keys.sum()
    return work


def _active(layer: weights.Layer, c: ModelConfig) -> float:
    """Weights that one row multiplies with, attention's own products not counted."""
    attn, ffn = layer.attn, layer.ffn
    dense = [attn.first, attn.wq, attn.wo_a, attn.wo_b, ffn.shared_in, ffn.shared_out]
    share = c.num_experts_per_tok / c.n_routed_experts
    return sum(w.data.numel() * VALUES[w.name] for w in dense) + share * sum(
        w.data.numel() * VALUES[w.name] for w in (ffn.w_in, ffn.w_out)
    )


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Rows:
    """Prints rows one by one. One that fails says so; what comes behind `seconds` is left out and says so too."""

    def __init__(self, as_json: bool, seconds: float) -> None:
        self.as_json, self.end, self.failed = as_json, time.monotonic() + seconds, 0

    def add(self, names: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if time.monotonic() > self.end:
            row = {"left_out": "no time"}
        else:
            try:
                row = make()
            except Exception as error:
                traceback.print_exc()
                self.failed += 1
                row = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        self.say(names | row)
        return row

    def say(self, row: dict[str, Any]) -> None:
        if self.as_json:
            print(json.dumps(row), flush=True)
            return
        tables = {name: row[name] for name in row if isinstance(row[name], dict)}
        for name in [name for name, table in tables.items() if any(isinstance(value, dict) for value in table.values())]:
            tables |= {f"{name} {key}": inner for key, inner in tables.pop(name).items()}
        plain = {name: value for name, value in row.items() if not isinstance(value, dict)}
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in plain.items()), flush=True)
        for name, values in tables.items():
            scale, unit = (1e6, " MB") if name == "bytes" else (1, "")
            print(f"    {name}{unit}: " + ", ".join(f"{k} {v / scale:.3f}" for k, v in values.items()), flush=True)


def forget(model: V41Gpu) -> None:
    """Captured graphs and what the allocators keep of them: the next row is of another size."""
    model.captured.clear()
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(model.device)


def arguments_for(program: str, text: str | None) -> argparse.ArgumentParser:
    """What this command and `bench_drafts` share."""
    parser = argparse.ArgumentParser(prog=program, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=96)
    parser.add_argument("--times", type=int, default=10, help="repetitions (default: 10)")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no new row begins (default: no end)")
    parser.add_argument("--plain", action="store_true", help="weights as they are stored, not packed as the loader does")
    parser.add_argument("--eager", action="store_true", help="without captured graphs: to find out what fails")
    parser.add_argument("--one-stream", action="store_true", help="nothing runs beside a captured pass, as above")
    parser.add_argument("--small", action="store_true", help="the smallest dimensions: only to try the command")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser


def use_tuned(path: str) -> int:
    """Launch shapes of linears from a file of `headrace.kernels.tune_decode --json`: how many there are."""
    with open(path) as file:
        rows = [row for row in json.load(file)["rows"] if row["kind"] != "mxfp4" and row["found"]]
    best = {(PACKED.get(r["kind"], r["kind"]), r["batch"], r["n"], r["k"]): r["found"][0]["config"] for r in rows}
    table = tuning.gemm_upcast

    def chosen(name: str, m: int, n: int, k: int, invariant: bool) -> dict[str, int]:
        known = None if invariant else best.get((name, m, n, k))
        return known or table(name, m, n, k, invariant)

    tuning.gemm_upcast = chosen
    return len(best)


def device_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> torch.device:
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is visible; --device cpu --small under TRITON_INTERPRET=1 only tries the command")
    return device


def main(arguments: list[str] | None = None) -> int:
    parser = arguments_for("headrace.engine.models.v41.gpu.bench", __doc__)
    parser.add_argument("--batch", type=numbers, default=[64, 256, 8, 1], help="sequences of a step (default: 64,256,8,1)")
    parser.add_argument("--context", type=numbers, default=[4096, 32768, 131072], help="tokens of each (default: 4k,32k,128k)")
    parser.add_argument("--prefill", type=numbers, default=[4096, 32768], help="prompt lengths; 0: none")
    parser.add_argument("--chunk", type=int, default=4096, help="rows of a prefill step (default: 4096)")
    parser.add_argument("--tbs", type=float, default=0.0, help="TB/s of the roofline (default: a copy, measured)")
    parser.add_argument("--parts", type=numbers, default=[64, 256], help="batches whose device time is split up; 0: none")
    parser.add_argument("--engine", type=numbers, default=[], help="batches of the whole engine (default: none)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the whole engine (default: 0)")
    parser.add_argument("--apart", type=sets_apart, nargs="?", const="all", default="", metavar="NAME,..:NAME,..", help=(
        f"sets of what is launched by itself: {', '.join(APART)} (see `model.APART`), all (without a value) or none (empty)"
    ))  # fmt: skip
    parser.add_argument("--tuned", default="", help="take launch shapes of linears from this file of tune_decode --json")
    options = parser.parse_args(arguments)
    device, rows = device_of(parser, options), Rows(options.json, options.budget)
    if options.tuned:
        print(f"{use_tuned(options.tuned)} launch shapes from {options.tuned}", file=sys.stderr)
    config = configure(SMALL if options.small else RELEASED, options.layers, options.experts)
    rate = options.tbs * 1e12 or (copy_rate(device) if device.type == "cuda" else 1e10)
    rates = matrix_rates(device) if device.type == "cuda" else {}
    model = build(config, device, not options.eager, not options.plain)
    model.overlap = not options.one_stream
    began = time.perf_counter()
    balance(model, 256 if device.type == "cuda" else 16, 24 if device.type == "cuda" else 4)
    forget(model)
    print(f"gates balanced in {time.perf_counter() - began:.1f} s", file=sys.stderr)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    measured = {"tb_per_s": rate / 1e12, **{f"{name}_tflops": value / 1e12 for name, value in rates.items()}}
    shape = {"layers": options.layers, "experts": options.experts, "packed": not options.plain, "overlap": model.overlap}
    rows.say({"card": card, "torch": torch.__version__} | shape | measured)
    for context in options.context:
        for batch, model.apart in itertools.product(options.batch, options.apart):
            parts = batch in options.parts
            rows.add(
                {"batch": batch, "context": context} | ({"apart": sorted(model.apart)} if any(options.apart) else {}),
                lambda b=batch, c=context, p=parts: decode(model, b, c, rate, options.times, p, rates.get("bf16", 0.0)),
            )
            forget(model)
        if context == options.context[0]:
            for tokens in filter(None, options.prefill):
                rows.add({"prefill": tokens}, lambda n=tokens: prefill(model, n, options.chunk, rates))
                forget(model)
    for batch in options.engine:
        rows.add(
            {"engine": batch, "prompt": 1024, "temperature": options.temperature},
            lambda b=batch: engine(model, b, 1024, 64, options.temperature, rate, options.times),
        )
        forget(model)
    return int(rows.failed > 0)


def sets_apart(text: str) -> list[frozenset[str]]:
    """Sets of names of `APART`, names by comma and sets by colon; `all`: every name."""
    sets = [frozenset(APART if part == "all" else filter(None, part.split(","))) for part in text.split(":")]
    if unknown := sorted(frozenset().union(*sets) - set(APART)):
        raise argparse.ArgumentTypeError(f"nothing is called {', '.join(unknown)}; known are {', '.join(APART)} and all")
    return sets


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
