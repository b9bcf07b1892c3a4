"""The GPU path of V4.1, its kernels run by Triton's interpreter in a process of their own (see tests/unit/kernels)."""

import argparse
import dataclasses
import gc
import json
import os
import random
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from headrace.engine.batch import Segment
from headrace.engine.cache import KVPool
from headrace.engine.config import ConfigError
from headrace.engine.loader import LoadOptions, load_model
from headrace.engine.make_checkpoint import make_checkpoint
from headrace.engine.models.v41.gpu import bench, bench_drafts
from headrace.engine.models.v41.gpu.bench import SMALL, build, configure
from headrace.engine.models.v41.gpu.bench_host import without_device
from headrace.engine.models.v41.gpu.graph import Graph, _nothing_collected, fill, padded_rows
from headrace.engine.models.v41.gpu.model import APART
from headrace.engine.models.v41.gpu.rows import (
    FLOOR,
    FROM_END,
    IN_PIECE,
    LIVE,
    POSITION,
    RING,
    SCRATCH,
    SEQUENCE,
    SLOT,
    SentTables,
    Tables,
    host_rows,
    table_rows,
)
from headrace.engine.models.v41.rows import Piece
from headrace.kernels import gemm_upcast, tuning

pytest.importorskip("triton")


# The check with few programs, by which the interpreter's time goes: two heads, tiles as wide as weights (tests/unit/kernels
# has narrow ones), and of the pieces those that are named. A last piece of one row is a decode step's; both begin another
# sequence beside it.
CHECK = """
import sys
from headrace.kernels import tuning
from headrace.engine.models.v41.gpu import check
products, streams, rows_of = tuning.gemm_upcast, tuning.mhc, check.rows_of
tuning.gemm_upcast = lambda *shape: products(*shape) | {"BLOCK_N": 256}
tuning.mhc = lambda *shape: streams(*shape) | {"BLOCK_D": 128}
check.TEXT["num_attention_heads"] = 2
pieces = slice(*map(int, sys.argv.pop(1).split(":")))
check.rows_of = lambda model, ids, cuts, *floor: rows_of(model, ids, [*cuts[pieces][:-1], len(ids)], *floor)
sys.exit(check.main())
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("pieces", "what"), [("1:3", ["--numerics", "bounded"]), ("0:2", ["--only-invariance"])])
def test_rows_are_those_of_the_cpu_and_the_same_in_any_batch(pieces, what):
    """Class bounded: its chunks run on fewer rows in decoder layers, everything else is as in class exact. Rows come in one
    piece and in two: all but the last one, or all but the last four."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", CHECK, pieces, "--device", "cpu", "--rows", "10", *what]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=800, check=False)
    assert run.stdout, run.stderr
    assert json.loads(run.stdout)["ok"], run.stdout


def test_a_step_launches_no_more_than_it_did():
    """A launch costs more than most of what is launched here: less of them is better, and then goes in here."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "headrace.engine.models.v41.gpu.launches", "--layers", "8"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert run.stdout, run.stderr
    found = json.loads(run.stdout)
    assert found["kernels"]["_sparse_attention_kernel"] == found["kernels"]["_route_kernel"] == 8
    assert found["sums"]["kernels"] <= 196 and found["sums"]["operations"] <= 8, found


# Experts of one layer, in few launches and each step apart, on memory that holds NaN and numbers of no row before it is
# written; the last row is not live and NaN too.
EXPERTS = """
from unittest import mock
import torch
from headrace.engine.models.v41.gpu import bench, model as passes
from headrace.kernels.routing import combine
fill, plan, plans, found = {torch.float32: float("nan"), torch.bfloat16: float("nan")}, passes.plan_choices, [], []
def dirty(make):
    def made(*a, **options):
        t = make(*a, **options)
        return t.fill_(fill.get(t.dtype, 77 if t.dtype == torch.uint8 else 1 << 30))
    return made
def planned(*a, **options):
    plans.append(options)
    return plan(*a, **options)
with torch.no_grad():
    model = bench.build(bench.configure(bench.SMALL, 6, 8), torch.device("cpu"))
    x = torch.randn(7, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[-1] = float("nan")
    live = torch.arange(7) < 6
    empties = [mock.patch.object(torch, name, dirty(getattr(torch, name))) for name in ("empty", "empty_like")]
    for model.apart in ({}, *({name} for name in passes.APART), set(passes.APART)):
        with empties[0], empties[1], mock.patch.object(passes, "plan_choices", planned):
            out = model._experts(model.layers[1].ffn, x, live)
            found.append(out if isinstance(out, torch.Tensor) else combine(out.y, out.row_of_choice, None, out.shared))
    model.apart, forms = set(), {}
    for model.batch_invariant in (False, True):
        for passes.SIZES in ((8,), (4,)):  # seven rows: of a decode graph, and more than it takes
            forms[model.batch_invariant, passes.SIZES] = type(model._experts(model.layers[1].ffn, x, live)).__name__
assert [options["apart"] for options in plans] == [False] * 6 + [True] * 2
assert found[0][live].isfinite().all() and found[0][live].float().std() > 0
assert all(torch.equal(found[0][live], out[live]) for out in found[1:])
assert forms == {(False, (8,)): "Routed", (False, (4,)): "Tensor", (True, (8,)): "Tensor", (True, (4,)): "Tensor"}, forms
"""


def test_experts_in_few_launches_are_those_of_each_step_apart():
    """And with `batch_invariant` a row takes the same form in any batch."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", EXPERTS]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert run.returncode == 0, run.stderr


def test_a_step_is_measured_once_for_each_set_of_what_is_apart(monkeypatch, capsys):
    """The device's work is left out: an interpreter has no time to measure."""
    monkeypatch.setattr(bench, "balance", lambda *_: None)
    monkeypatch.setattr(bench, "decode", lambda model, batch, *_: {"apart_in_it": sorted(model.apart)})
    small = ["--device", "cpu", "--small", "--experts", "8", "--batch", "2,3", "--context", "256", "--prefill", "0", "--json"]
    assert bench.main([*small, "--apart", ":swiglu,rope:all"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:]
    sets = [[], ["rope", "swiglu"], sorted(APART)]
    assert [(row["batch"], row["apart"], row["apart_in_it"]) for row in rows] == [(b, s, s) for b in (2, 3) for s in sets]
    assert bench.sets_apart("") == [frozenset()] and bench.sets_apart("all") == [frozenset(APART)]
    with pytest.raises(argparse.ArgumentTypeError, match="nothing is called nope"):
        bench.sets_apart("rope,nope:all")


def test_what_the_host_says_of_rows():
    """A piece longer than a ring takes a scratch line behind the slots."""
    segments = [Segment(2, 100, [1] * 3, [], [7, 5]), Segment(0, 5, [1] * 9, [], [3])]
    pieces = [Piece(0, 100, 103, 0), Piece(1, 5, 14, 2)]
    sizes = {"window": 8, "ring": 20, "slots": 3, "longest": 8, "padded": 13}
    rows = host_rows(pieces, segments, **sizes)
    line = 4 * 20 - (5 - 7)
    assert rows.matrix[[POSITION, SEQUENCE, SLOT, SCRATCH, IN_PIECE, FROM_END, LIVE], 1].tolist() == [101, 0, 2, RING, 1, 2, 1]
    assert rows.matrix[[POSITION, SLOT, FLOOR, SCRATCH, IN_PIECE, FROM_END], 4].tolist() == [6, 0, 2, line, 1, 8]
    assert rows.matrix[[SLOT, SCRATCH, LIVE], 12].tolist() == [3, RING, 0]  # padding: the spare slot
    history, line_of_history, kept, ring_of_kept = (part.tolist() for part in rows.copies)
    assert (history, line_of_history) == ([0, 1, 2, 3, 4], [line + p for p in range(5)])
    assert (kept, ring_of_kept) == ([line + p for p in range(5, 14)], list(range(5, 14)))


def test_a_block_table_that_grew_is_read_anew():
    tables, table = Tables(), [7, 5]
    segments = [Segment(2, 100, [1] * 3, [], table), Segment(0, 5, [1] * 9, [], [3])]
    assert table_rows([Piece(0, 100, 103, 0), Piece(1, 5, 14, 2)], segments, tables, 2, 64).tolist() == [[7, 5], [3, 0]]
    table.append(9)
    assert table_rows([Piece(0, 128, 129, 0)], segments, tables, 4, 64).tolist() == [[7, 5, 9, 0]]
    with pytest.raises(ValueError, match="200 tokens need 4 blocks, the block table has 3"):
        table_rows([Piece(0, 199, 200, 0)], segments, tables, 4, 64)


def test_a_graph_ends_with_its_last_name_and_nothing_is_collected_while_another_is_captured():
    """A graph that the collector destroys in the middle of a capture makes that void."""
    gc.disable()
    try:
        graph = Graph(lambda t: t, [np.zeros(3, np.int32)], torch.device("cpu"))
        found = weakref.ref(graph)
        del graph
        assert found() is None
        with _nothing_collected():
            assert not gc.isenabled()
        assert not gc.isenabled(), "as it was"
        gc.enable()
        with pytest.raises(RuntimeError), _nothing_collected():
            assert not gc.isenabled()
            raise RuntimeError
        assert gc.isenabled()
    finally:
        gc.enable()


def test_block_tables_on_the_device_are_those_of_the_batch_after_any_history():
    """Sequences come, grow, step back, are given other blocks, change places and leave; two graphs take turns, and a pool of
    states follows another. What the device holds is what making the tables anew gives, and little of it is sent in between."""
    draw, block_tokens, blocks, most, sent, steps = np.random.default_rng(5), 4, 8, 6, [], []
    graphs = [Graph(lambda t: t, [SentTables(rows, blocks)], torch.device("cpu")) for rows in (most, most + 2)]
    for _ in range(2):
        known, live = Tables(), {}
        for _step in range(300):
            for slot in range(most):
                chance = draw.random()
                if slot not in live or chance < 0.02:
                    live[slot] = [int(draw.integers(1, 9)), draw.integers(0, 99, blocks).tolist()]
                elif chance < 0.03:
                    del live[slot]
                elif chance < 0.1:
                    live[slot][0] = max(1, live[slot][0] - int(draw.integers(1, 5)))  # drafts that did not stand
                else:
                    live[slot][0] = min(live[slot][0] + 1, blocks * block_tokens)
            batch = list(live.items())[: int(draw.integers(3, most + 1))] if draw.random() < 0.2 else list(live.items())
            segments, pieces = [], []
            for slot, (stop, table) in batch:
                held = -(-stop // block_tokens) + int(draw.integers(0, 2))
                pieces.append(Piece(len(segments), stop - 1, stop, 0))
                segments.append(Segment(slot, stop - 1, [1], [], table[: min(held, blocks)]))
            graph = graphs[int(draw.random() < 0.1)]
            graph.tables.put(pieces, segments, known, block_tokens)
            changes = graph.tables.unsent()
            sent.append(graph.tables.array.size if changes is None else len(changes[0]))
            place = graph([graph.tables])
            anew = table_rows(pieces, segments, Tables(), blocks, block_tokens)
            assert place[: len(pieces)].tolist() == anew.tolist() and not place[len(pieces) :].any()
            steps.append(place.numel())
    assert 0 < np.median(sent) < 0.15 * np.median(steps)


def test_what_was_not_sent_is_sent_with_the_next():
    """As when an allocation fails between the two."""
    sent, known, table = SentTables(2, 16), Tables(), [4, 6]
    for stop, more in ((8, []), (9, [9]), (13, [2])):
        table += more
        sent.put([Piece(0, stop - 1, stop, 0)], [Segment(0, stop - 1, [1], [], list(table))], known, 4)
    places, values = sent.unsent()
    assert dict(zip(places.tolist(), values.tolist(), strict=True)) == {0: 4, 1: 6, 2: 9, 3: 2}
    sent.sent()
    assert len(sent.unsent()[0]) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.float32])
def test_host_tensors_are_copied_bit_for_bit(dtype):
    values = torch.randn(7, 5).mul(9).to(dtype)
    alone = values[:1, :1].as_strided((1, 1), (5, 0))  # one value, of which a stride says nothing
    for case in (values, values.T, values[:0], values[2, 3], alone):
        assert torch.equal(fill(torch.empty(case.shape, dtype=dtype), case), case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_from_host_memory_are_rounded_and_padded(dtype):
    values = torch.randn(5, 9000)
    out = padded_rows(values, 8, dtype, torch.device("cpu"))
    assert torch.equal(out[:5], values.to(dtype)) and out.shape == (8, 9000) and not out[5:].any()


def test_the_drafts_bench_runs_the_whole_engine_three_ways():
    """On passes of zeros, so no kernel runs: the host's part of a step, the scheduler and the lot are real."""
    model = without_device(build(configure(SMALL, 6, 4, draft=True), torch.device("cpu")))
    row = bench_drafts.engine(model, 2, bench_drafts.by_lot(8, 0.05, [0.8] * 5))
    assert row["none"] > 0 and row["scheduled"] > 0 and row["of_best"] > 0
    assert row["length_none"] == 1.0 and 1.5 < row["length_full"] < 5.5  # 3.4 are expected


def test_the_whole_engines_steps_are_held_against_the_device_alone(monkeypatch):
    """On passes of zeros, for greedy rows and drawn ones; what the device alone takes is given."""
    model = without_device(build(configure(SMALL, 6, 4), torch.device("cpu")))
    monkeypatch.setattr(bench, "decode", lambda model, batch, context, *_: {"device_ms": context / 1e6, "step_ms": 1.0})
    for temperature in (0.0, 1.0):
        row = bench.engine(model, 2, 8, 6, temperature, 1.0, 1)
        assert row["device_ms"] == 12e-6 and row["steps"] >= 4 and 0.9 < row["not_hidden"] < 1
        assert row["threads_step_ms"] > 0 and row["tokens_per_s"] == pytest.approx(2e3 / row["step_ms"])


def test_the_bound_of_a_step_counts_what_takes_longer():
    model = build(configure(SMALL, 6, 8), torch.device("cpu"))
    products = bench.step_products(model, 64, 4096)
    assert products["experts"] == 64 * 6 * 2 * 2 * 3 * 128 * 128  # rows, layers, experts of a row, two a product, weights
    assert products["head"] == 64 * 2 * 512 * 128 and set(products) < set(bench.step_bytes(model, 64, 4096, [8] * 6))
    given = {"linears": 100.0, "mHC": 20.0}
    assert [bench.bound(given, {"linears": 500.0}, 10.0, rate) for rate in (1e9, 5.0)] == [12.0, 102.0]


def test_a_pass_that_was_prepared_has_the_inputs_of_one_that_was_not():
    """Whatever happens between the two: rows that are gone, that begin elsewhere, slots that were reset, other passes. And rows
    that decoder layers do not run on, or that see less there."""
    twins, calls = [], ([], [])
    for seen in calls:
        model = without_device(build(configure(SMALL, 6, 4), torch.device("cpu")))

        def run(inputs, kv, states, until=None, seen=seen, model=model):
            rows, ids = inputs.rows, inputs.ids
            seen.append([ids, rows.matrix, rows.tables, *inputs.memory.values()])
            if inputs.decoder is not None:
                seen[-1] += [inputs.decoder[0].matrix, inputs.decoder[1]]
                ids = ids[inputs.decoder[1]]
            return ids[:, None].expand(-1, model.hidden_size).to(model.dtype)

        model.run = run
        twins.append((model, KVPool(model.spec, 64), model.new_states(8)))
    draw, used = random.Random(4), 0
    starts, tables = [draw.randrange(100, 300) for _ in range(8)], [[8 * slot] for slot in range(8)]
    for _ in range(200):
        slots = sorted(draw.sample(range(8), draw.choice([3, 4, 4, 4])))
        events = [*[""] * 6, "gone", "moved", "reset", "copy", "decoder later", "decoder since"]
        event, resets = draw.choice(events), draw.choice(slots)
        for slot in slots:
            while len(tables[slot]) * 128 <= starts[slot] + 1:
                tables[slot] = [*tables[slot], 8 * slot + len(tables[slot]) % 8]
        ids = draw.choices(range(3, 256), k=8)  # exact in bf16
        results = []
        for number, (model, kv, states) in enumerate(twins):
            floor = {"window_floor": starts[slots[0]] - 5} if event == "copy" else {}
            segments = [
                Segment(slot, starts[slot], [-1], [5, 6, slot], tables[slot], outputs=[starts[slot]], **floor) for slot in slots
            ]
            if event == "decoder later":  # rows of a prompt in class `bounded`
                segments[0].decoder_floor, segments[0].outputs = starts[slots[0]] + 1, []
            elif event == "decoder since":
                segments[0].decoder_floor = starts[slots[0]] - 2
            if number:
                model.prepare(segments, kv, states)
                ready = model._ready
            for segment in segments:
                segment.ids = [ids[segment.slot]]
            if event == "gone":
                segments = segments[1:]
            elif event == "moved":
                segments[0].start, segments[0].outputs = segments[0].start + 1, [segments[0].start + 1]
            elif event == "reset":
                states.reset(resets)
            elif event == "copy":
                segments = [dataclasses.replace(segment) for segment in segments]
            results.append(model.forward(segments, kv, states))
        used += ready is not None and event == ""
        for segment in segments:
            starts[segment.slot] = segment.stop
        assert torch.equal(*results) and results[0][:, 0].tolist() == [float(s.ids[0]) for s in segments if s.outputs]
        assert len(calls[0][-1]) == len(calls[1][-1])
        assert all(torch.equal(a, b) for a, b in zip(calls[0][-1], calls[1][-1], strict=True))
        assert twins[0][2].first == twins[1][2].first and twins[0][2].next == twins[1][2].next
    assert used > 30


# Draws of the sampling kernels: rows of several kinds in one call, alone, and many of one distribution.
DRAWS = """
import numpy as np, torch
from headrace.engine import api, rng
from headrace.engine.sampler import Draw, by_kernel
torch.manual_seed(1)
logits = torch.randn(9, 50)
logits[3, 7:] = -torch.inf
logits[4, [20, 30]] = 9.0
kinds = [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-6}, {}, {"temperature": 0.0}, {"top_p": 0.5}, {"min_p": 0.3},
         {"top_k": 5, "top_p": 0.9, "temperature": 0.7}, {"seed": 1 << 63, "top_k": 1 << 40}]
draws = [Draw(api.SamplingParams(**{"seed": i, **kind}), 0, 5 + i, [], 0) for i, kind in enumerate(kinds)]
tokens = by_kernel(logits, draws)
best = logits.argmax(-1)
assert tokens.dtype == torch.int64 and tokens[:3].tolist() == best[:3].tolist() and tokens[4] == 20 and tokens[3] < 7
assert tokens.tolist() == [int(by_kernel(logits[i : i + 1], draws[i : i + 1])) for i in range(9)]
assert by_kernel(logits[:1], draws[:1]).tolist() == best[:1].tolist()  # nobody draws
p = torch.tensor([0.45, 0.3, 0.15, 0.07, 0.03])
for kind in ({"top_p": 1e-60}, {"top_p": 1e-40, "top_k": 7}):  # 0 in fp32
    assert by_kernel(logits[:1], [Draw(api.SamplingParams(**kind), 0, 5, [], 0)]).tolist() == best[:1].tolist()
for kind, left in (({"temperature": 0.5}, p**2), ({"min_p": 0.2}, p[:3])):
    many = [Draw(api.SamplingParams(seed=s, **kind), 0, s % 7, [], 0) for s in range(150)]
    counts = np.bincount(by_kernel(p.log().expand(150, -1).contiguous(), many).numpy(), minlength=5)
    expected = 150 * (left / left.sum()).numpy()
    assert counts[len(left):].sum() == 0 and ((counts[: len(left)] - expected) ** 2 / expected).sum() < 18, (kind, counts)
"""


def test_the_sampling_kernels_draw_what_the_engine_asks_for():
    """Chi-square of at most 4 degrees of freedom: above 18 once in 800 tries, and these draws are always the same."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", DRAWS]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert run.returncode == 0, run.stderr


def test_the_policy_can_be_looked_at_on_times_that_were_measured_before(tmp_path, capsys):
    """A draft that always stands is worth its time on that machine, one that never does is not."""
    lines = [{"card": "X"}, {"curve": "forward", "rows": 1, "ms": 3.0}]
    lines += [{"curve": "forward", "rows": 99, "computed": 96, "ms": 8.0}]
    path = tmp_path / "curves.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SystemExit):
        bench_drafts.main(["--curves", str(path)])
    assert "has no line of the curve draft" in capsys.readouterr().err
    path.write_text(path.read_text() + json.dumps({"curve": "draft", "sequences": 1, "ms": 1.0}))
    assert bench_drafts.read_curves(path) == ({1: 0.003, 96: 0.008}, {1: 0.001})
    for chance, better in (("0.97", "full"), ("0.03", "none")):
        assert bench_drafts.main(["--curves", str(path), "--batch", "1", "--profile", ",".join([chance] * 5), "--json"]) == 0
        row = json.loads(capsys.readouterr().out.splitlines()[0])
        assert row["scheduled"] > 0.95 * row[better] and max(row["none"], row["full"]) == row[better]
    command = ["--curves", str(path), "--batch", "1", "--engine", "--seconds", "0.2", "--prompt", "8"]
    command += ["--profile", ",".join(["0.9"] * 5)]
    assert bench_drafts.main(command) == 0
    text = capsys.readouterr().out
    assert "ms none: schedule 0." in text and "worst_of_best: policy" in text
    assert bench_drafts.main([*command, "--json"]) == 0  # the whole engine, its device only takes its time
    row = next(row for line in capsys.readouterr().out.splitlines() if "engine" in (row := json.loads(line)))
    assert row["ms"]["none"]["logits"] + row["ms"]["none"]["forward"] >= 3.0 and row["length_full"] > 1.5


@pytest.mark.parametrize("rows", [1, 16, 33, 100, 200, 400, 1000, 5000])
def test_a_tile_of_experts_is_no_taller_than_what_their_rows_are_aligned_to(rows, monkeypatch):
    """Else rows of a second expert in the tile would be left out. The tables of the card, not those of the interpreter."""
    taken = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *_, **options: taken.append(options["BLOCK_M"])

    monkeypatch.setattr(tuning, "INTERPRETED", False)
    monkeypatch.setattr(gemm_upcast, "_upcast_kernel", Kernel())
    x, weight = torch.zeros(2 * rows, 128, dtype=torch.bfloat16), torch.zeros(2, 64, 64, dtype=torch.uint8)
    scale, groups = torch.zeros(2, 64, 4, dtype=torch.uint8), torch.zeros(2 * rows, dtype=torch.int32)
    for alignment in (16, 128):
        gemm_upcast.gemm_upcast(x, weight, scale, "mxfp4", group_of_row=groups, alignment=alignment)
        assert alignment % taken[-1] == 0


def test_a_model_that_the_kernels_are_not_made_for_is_refused_by_name(tmp_path):
    from headrace.engine.checkpoint import Checkpoint
    from headrace.engine.config import read_config
    from headrace.engine.models.v41.gpu.loader import load

    path = make_checkpoint("w16", 1, tmp_path / "w16")
    options = LoadOptions("quantized", "exact", False, "cuda", None, None)
    with pytest.raises(ConfigError, match="head_dim is 32, the kernels are for 512; this model runs on device 'cpu'"):
        load(Checkpoint(path), read_config(path), options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_devices_that_are_not_here_are_named(tmp_path):
    with pytest.raises(ValueError, match="sees no CUDA device here; choose 'cpu'"):
        load_model(tmp_path, device="cuda")
    with pytest.raises(ValueError, match="device 'tpu' is not one that the engine runs on"):
        load_model(tmp_path, device="tpu")
