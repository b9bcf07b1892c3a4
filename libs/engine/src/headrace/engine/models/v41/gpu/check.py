"""The GPU path against the CPU's on a random checkpoint: `python -m headrace.engine.models.v41.gpu.check [--device cuda]`.

Rows in one chunk, in pieces, as decode steps and beside another sequence, in class `exact` or `bounded`; bit for bit, the same
rows and states in any chunks and any company with `batch_invariant`; and the same tokens from the whole engine whether steps
wait for each other or are planned ahead, in a thread or in one, with drafts and without. The two paths round in different
places (bf16 activations, FP4 keys), and a rounding that flips can move a row far; so the measure is the median row, beside that
of the CPU path in bf16, which has the same freedom. Weights are as the loader makes them: the report counts products by format
(`weights`), and FP8 or FP4 that is not packed makes it fail. With TRITON_INTERPRET=1 it runs on a CPU, slowly.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from headrace.kernels.gemm_upcast import PACKED

from .... import api
from ....batch import Model, Segment
from ....cache import KVPool
from ....checkpoint import Checkpoint
from ....config import read_config
from ....core import EngineCore
from ....llm import collect
from ....loader import LoadOptions, load_model
from ....make_checkpoint import write_checkpoint
from ....pipeline import OneThread, Pipeline
from .loader import load
from .model import V41Gpu
from .weights import Weight

# The kernels' fixed dimensions, everything else as small as it may be. All experts are chosen: a routing that flips for want
# of a bit would say nothing about the code.
TEXT = {
    "hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 512,
    "qk_rope_head_dim": 64, "q_lora_rank": 128, "o_lora_rank": 64, "o_groups": 2, "n_routed_experts": 2,
    "num_experts_per_tok": 2, "sliding_window": 8, "compress_ratios": [0, 2, 1, 1, 0, 0], "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3], "index_n_heads": 16, "index_head_dim": 128, "index_topk": 4,
    "candidate_source_layer_id": 2, "candidate_topk_blocks": 1, "candidate_block_size": 8, "engram_layer_ids": [1],
    "engram_vocab_size": 400, "engram_n_heads": 4, "engram_head_dim": 32, "num_nextn_predict_layers": 2,
    "dspark_block_size": 3, "dspark_noise_token_id": 259, "dspark_target_layer_ids": [1, 3], "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 2, "dspark_num_experts_per_tok": 2,
}  # fmt: skip
WORSE = 2.0  # the GPU's median error may be so many times the CPU's in bf16


def rows_of(model: Model, ids: Sequence[int], cuts: Sequence[int], floor: int = 0) -> tuple[torch.Tensor, torch.Tensor, bytes]:
    """Hidden rows of `ids` from `floor` on, computed in pieces that end at `cuts`; base logits of a draft behind them; the
    packed state. Beside the last piece another sequence begins."""
    kv, states = KVPool(model.spec, 4, device=str(model.device)), model.new_states(3)
    out, start = [], 0
    for stop in cuts:
        before = ids[max(0, start - 3) : start]
        outputs = range(max(start, floor), stop)
        own = Segment(1, start, ids[start:stop], before, [2], outputs=outputs, decoder_floor=floor)
        beside = [Segment(0, 0, ids[:2], [], [0])] if stop == cuts[-1] and len(cuts) > 1 else []
        out.append(model.forward([*beside, own], kv, states).float().cpu())
        start = stop

    def choose(place: int, logits: torch.Tensor) -> torch.Tensor:
        return torch.full((1,), 7 + place, device=logits.device)

    drafts = model.draft([1], [ids[0]], [start], states, choose)
    return torch.cat(out), drafts.base[0].float().cpu(), states.pack(1, start)


def weights_of(part: Any) -> Iterator[Weight]:
    """Every product's weight in layers, stages and what they are made of."""
    if isinstance(part, Weight):
        yield part
    elif isinstance(part, list):
        for item in part:
            yield from weights_of(item)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from weights_of(getattr(part, field.name))


def formats(model: V41Gpu) -> dict[str, int]:
    """Products of a model by their weights' format."""
    return dict(Counter(weight.name for weight in weights_of([*model.layers, model.mtp, model.head])))


def errors(rows: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Relative error of each row."""
    return (rows - reference).norm(dim=1) / reference.norm(dim=1)


def check(device: str, rows: int, numerics: str) -> dict:
    """One class: medians and the worst, and whether they are within bounds."""
    draw = random.Random(7)
    ids = [draw.randrange(3, 250) for _ in range(rows)]
    floor = 0 if numerics == "exact" else rows - 9
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(TEXT, 3, folder)
        options = LoadOptions("quantized", numerics, False, device, None, None)
        gpu = load(Checkpoint(path), read_config(path), options)
        exact = load_model(path, numerics=numerics)
        half = load_model(path, numerics=numerics, dtype=torch.bfloat16)
        whole, pieces = [rows], [rows - 4, rows - 1, rows]
        reference, draft_reference, _ = rows_of(exact, ids, whole, floor)
        stored = formats(gpu)
        runs = {"bf16": rows_of(half, ids, whole, floor), "gpu": rows_of(gpu, ids, whole, floor)}
        runs["pieces"] = rows_of(gpu, ids, pieces, floor)
    medians = {name: float(errors(hidden, reference).median()) for name, (hidden, _, _) in runs.items()}
    drafted = {name: float(errors(base, draft_reference).median()) for name, (_, base, _) in runs.items()}
    report = {
        "device": device, "numerics": numerics, "rows": rows, "weights": stored, "median_error": medians,
        "draft_error": drafted, "worst_error": float(errors(runs["gpu"][0], reference).max()),
        "state_bytes": [len(run[2]) for run in runs.values()],
    }  # fmt: skip
    report["ok"] = len(set(report["state_bytes"])) == 1 and not set(PACKED) & set(stored) and all(
        max(found["gpu"], found["pieces"]) <= WORSE * found["bf16"] + 0.01 for found in (medians, drafted)
    )
    return report


def invariance(device: str, rows: int) -> dict:
    """Class exact with batch_invariant: hidden rows, logits, drafts and packed states bitwise equal in one chunk, in pieces and
    single rows, beside other sequences, and one by one in the head."""
    draw = random.Random(11)
    ids = [draw.randrange(3, 250) for _ in range(rows)]
    chunkings = [[rows], [rows - 4, rows - 1, rows], [*range(rows // 2, rows + 1)], [2, rows // 2, rows]]
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(TEXT, 3, folder)
        model = load(Checkpoint(path), read_config(path), LoadOptions("quantized", "exact", True, device, None, None))
        (hidden, base, packed), *others = [rows_of(model, ids, cuts) for cuts in chunkings[: 4 if device == "cuda" else 2]]
        together = model.logits(hidden.to(model.device))
        alone = torch.cat([model.logits(row[None].to(model.device)) for row in hidden])
    report = {
        "device": device, "batch_invariant": True, "rows": rows, "weights": formats(model),
        "rows_equal": [torch.equal(hidden, other) for other, _, _ in others],
        "drafts_equal": [torch.equal(base, other) for _, other, _ in others],
        "states_equal": [packed == other for _, _, other in others],
        "logits_equal": torch.equal(together, alone),
    }  # fmt: skip
    every = (*report["rows_equal"], *report["drafts_equal"], *report["states_equal"], report["logits_equal"])
    return report | {"ok": all(every) and not set(PACKED) & set(report["weights"])}


def engine(device: str, count: int = 12) -> dict:
    """Tokens of greedy and drawn requests, some with stops and penalties, from a whole engine with `batch_invariant` and exact
    acceptance. What differs in the ways is who is in a step with whom, what was prepared, and how many tokens a step gives."""
    draw = random.Random(5)
    todo = []
    for i in range(count):
        sampling = api.SamplingParams(
            temperature=(0.0, 1.0, 0.7)[i % 3], top_p=(1.0, 0.9)[i % 2], top_k=(0, 0, 40)[i % 3], seed=i, max_tokens=5 + 2 * i,
            stop_token_ids=tuple(range(3, 250, 40)) if i % 4 == 1 else (), presence_penalty=0.5 * (i % 5 == 4),
        )  # fmt: skip
        todo.append(api.EngineRequest(f"r{i}", [draw.randrange(3, 250) for _ in range(3 + 9 * i)], [], sampling))
    found, plans = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(TEXT, 3, folder)
        model = load(Checkpoint(path), read_config(path), LoadOptions("quantized", "exact", True, device, None, None))
        for drafts in ("off", "dspark"):
            for name, begin in WAYS.items():
                config = api.EngineConfig(
                    num_blocks=4 * count, max_num_seqs=5, max_num_batched_tokens=64, prefix_caching=False, speculative=drafts,
                    draft_budget=7 if drafts == "dspark" else None, rollback_gate=1.0,
                )  # fmt: skip
                core = EngineCore(model, config)
                with begin(core) as step:
                    answers = collect(core, todo, step=step)
                found[f"{name}, {drafts}"] = [answer.error or answer.choices[0].ids for answer in answers]
                plans[f"{name}, {drafts}"] = core.stats()["steps"]
    first, *others = found.values()
    drawn = all(isinstance(ids, list) for ids in first)
    return {
        "device": device, "engine": True, "requests": count, "tokens": sum(map(len, first)), "steps": plans,
        "differ": {name: sum(a != b for a, b in zip(first, ids, strict=True)) for name, ids in found.items()},
        "ok": drawn and all(other == first for other in others),
    }  # fmt: skip


@contextlib.contextmanager
def _in_a_thread(core: EngineCore) -> Iterator[Any]:
    with Pipeline(core) as pipeline:
        yield pipeline.step


WAYS = {
    "waits": lambda core: contextlib.nullcontext(core.step),
    "one thread": lambda core: contextlib.nullcontext(OneThread(core).step),
    "a thread": _in_a_thread,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace.engine.models.v41.gpu.check", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu under TRITON_INTERPRET=1 (default: cuda)")
    parser.add_argument("--rows", type=int, default=200, help="rows of the sequence, at least 12 (default: 200)")
    parser.add_argument("--numerics", choices=("exact", "bounded"), action="append", help="class (default: both)")
    parser.add_argument("--only-invariance", action="store_true", help="batch invariance alone")
    parser.add_argument("--only-engine", action="store_true", help="the whole engine alone (by default on cuda only)")
    options = parser.parse_args(arguments)
    few = options.only_invariance or options.only_engine
    classes = () if few else options.numerics or ("exact", "bounded")
    runs = [partial(check, options.device, options.rows, numerics) for numerics in classes]
    good, every = True, not (few or options.numerics)
    if options.only_invariance or every:
        runs.append(partial(invariance, options.device, options.rows))
    if options.only_engine or (every and options.device == "cuda"):
        runs.append(partial(engine, options.device))
    for run in runs:
        report = run()
        print(json.dumps(report), flush=True)
        good &= report["ok"]
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
