"""Forms of sampling, top-k and routing that the interpreter's tables do not name, against the reference, on edges.

Each script runs in a process of its own, since the interpreter must be chosen before Triton is first imported.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from headrace.kernels import tune, tuning
from headrace.kernels.cases import all_cases
from headrace.kernels.sampling import SamplingRows, noise_key, sample_reference, uniform_reference

PARTS = {"PART": 64, "GROUPS": 16, "DENSE": 64, "BITS": 2, "num_warps": 4, "JOIN_WARPS": 4}
TIED_SEED, TIED_TOKEN = 77182, 128  # the largest 24 bits: their uniform number rounded to 1


def run(script: str, *arguments: object) -> list[dict]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", script, *map(json.dumps, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


CHECKS = """
import json, sys, torch
from headrace.kernels import tuning
from headrace.kernels.cases import all_cases
from headrace.kernels.check import check
op, table, form = map(json.loads, sys.argv[1:])
setattr(tuning, table, lambda *_: form)
for case in all_cases():
    if case.op == op and case.size == "small" and not case.timed:
        print(json.dumps(check(case, torch.device("cpu"))))
"""

FORMS = [  # beside those of the interpreter's tables, which test_kernels.py has
    ("sample", "sample", PARTS | {"PART": 512, "GROUPS": 4, "DENSE": 512, "BITS": 4}),  # one part a row, all tokens fit
    ("verify_drafts", "verify_drafts", {"PART": 256, "num_warps": 4}),  # one part
    ("topk", "topk", {"FORM": 0}),
    ("topk", "topk", {"FORM": 1, "BITS": 2, "WAVES": 1, "REGISTERS": None, "num_warps": 4}),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("op", "table", "form"), FORMS, ids=lambda v: v if isinstance(v, str) else json.dumps(v))
def test_small_cases(op, table, form):
    results = run(CHECKS, op, table, form)
    assert results
    for result in results:
        assert result["ok"], result.get("trace") or result


EDGES = """
import json, sys, torch
from headrace.kernels import sampling_split, tuning
from headrace.kernels.sampling import SamplingRows, noise_key, sample, sample_reference
form = json.loads(sys.argv[1])
tuning.sample = lambda *_: form
inf = float("inf")

def compare(name, logits, temperature, top_k=0, top_p=1.0, min_p=0.0, mask=None, **others):
    count = len(logits)
    full = lambda value: torch.full((count,), value)
    key = torch.tensor([noise_key(5, i, 3) for i in range(count)])
    rows = SamplingRows(full(temperature), full(top_k).int(), full(top_p), full(min_p), key, mask, **others)
    ours, theirs = sample(logits, rows), sample_reference(logits, rows)
    same = bool((ours[0] == theirs[0]).all()) and torch.equal(ours[2], theirs[2]) and torch.equal(ours[4], theirs[4])
    close = all(torch.allclose(a, b, rtol=1e-5, atol=2e-6, equal_nan=True) for a, b in zip(ours[1:4:2], theirs[1:4:2]))
    alone = [t[:1] for t in ours]
    first = SamplingRows(*(t[:1] for t in (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.key)),
                         None if mask is None else mask[:1], filters=rows.filters)
    invariant = all(torch.equal(a, b) for a, b in zip(sample(logits[:1].clone(), first), alone))
    print(json.dumps({"name": name, "same": same, "close": close, "invariant": invariant,
                      "got": [t[:4].tolist() for t in ours[:4]], "want": [t[:4].tolist() for t in theirs[:4]]}))

g = torch.Generator().manual_seed(3)
rows = torch.randn(3, 257, generator=g) * 3
compare("odd size", rows, 0.7)
compare("odd size, no filters promised", rows, 1.0, filters=False)
compare("top-k", rows, 0.7, 5)
compare("top-p", rows, 0.7, 0, 0.8)
compare("min-p", rows, 0.7, 0, 1.0, 0.1)
compare("all filters", rows, 0.7, 9, 0.9, 0.05)
compare("top-k of nearly all", rows, 1.0, 250)
compare("top-k of all", rows, 1.0, 257)
compare("flat top-p", rows * 0.01, 1.0, 0, 0.95)
compare("tiny top-p", rows, 1.0, 0, 1e-6)
compare("greedy", rows, 0.0, 4, 0.5)
compare("one token", torch.tensor([[2.5], [-1.0]]), 1.0, 3, 0.5, 0.1)
compare("two tokens", torch.tensor([[2.5, 2.5], [-1.0, 3.0]]), 1.0, 1)
compare("all equal", torch.full((2, 300), 1.25), 1.0)
compare("all equal, top-k", torch.full((2, 300), 1.25), 1.0, 3)
compare("all equal, top-p", torch.full((2, 300), 1.25), 1.0, 0, 0.5)
few = torch.full((2, 300), -inf)
few[0, 170], few[0, 171], few[1, 299] = 1.0, 2.0, -5.0
for name, k, p, m in (("plain", 0, 1.0, 0.0), ("top-k", 4, 1.0, 0.0), ("top-p", 0, 0.9, 0.0), ("min-p", 0, 1.0, 0.01)):
    compare("few finite, " + name, few, 1.0, k, p, m)
compare("far apart", torch.cat([rows * 40, rows], 1), 0.3, 0, 0.9)
words = torch.randint(-(2**31), 2**31, (3, 9), generator=g).int()
compare("masked", rows, 0.9, 0, 0.9, mask=words)
words[0] = 0
compare("all masked, greedy", rows, 0.0, mask=words)
if form["DENSE"] >= 64:
    def walked(*_):
        raise AssertionError("a row was walked whose candidates fit")
    sampling_split.limit_of_row = walked
    compare("candidates, top-k", rows, 0.7, 5)
    compare("candidates, top-p", rows * 2, 0.7, 0, 0.8)
    compare("candidates, min-p", rows, 0.7, 0, 1.0, 0.1)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", [PARTS, PARTS | {"DENSE": 16, "BITS": 4}], ids=json.dumps)
def test_parts_on_edges(form):
    results = run(EDGES, form)
    assert len(results) >= 23
    for result in results:
        assert result["same"] and result["close"] and result["invariant"], result


def test_uniform_numbers_stay_below_one():
    """24 bits and a half rounded to 1: infinite noise, which the reference drew and the kernel never could."""
    key = torch.tensor([noise_key(TIED_SEED, 0, 0)])
    u = uniform_reference(key.unsqueeze(1), torch.arange(300))
    assert u[0, TIED_TOKEN] == 1 - 2.0**-24 == u.max()
    logits = torch.zeros(1, 300)
    logits[0, TIED_TOKEN] = -40.0
    one = torch.ones(1)
    token, *_ = sample_reference(logits, SamplingRows(one, torch.zeros(1).int(), one, torch.zeros(1), key))
    assert token.item() != TIED_TOKEN


NOISE = """
import json, sys, torch
from headrace.kernels.sampling import SamplingRows, noise_key, sample, sample_reference
seed, token = map(json.loads, sys.argv[1:])
one, zero = torch.ones(1), torch.zeros(1)
for below in (0.0, -40.0):
    logits = torch.zeros(1, 300)
    logits[0, token] = below
    rows = SamplingRows(one, zero.int(), one, zero, torch.tensor([noise_key(seed, 0, 0)]))
    print(json.dumps([sample(logits, rows)[0].item(), sample_reference(logits, rows)[0].item()]))
"""


def test_kernels_draw_the_largest_noise_as_the_reference():
    """Its noise is 16.6: it wins among equals, and not at 40 below them."""
    drawn = run(NOISE, TIED_SEED, TIED_TOKEN)
    assert all(ours == theirs for ours, theirs in drawn)
    assert drawn[0][0] == TIED_TOKEN != drawn[1][0]


CHOICES = """
import json, sys, torch
from headrace.kernels import tuning
from headrace.kernels.routing import route, route_reference
from headrace.kernels.topk import topk, topk_reference
table, form = map(json.loads, sys.argv[1:])
setattr(tuning, table, lambda *_: form)
inf = float("inf")
g = torch.Generator().manual_seed(1)
if table == "route":
    bias = torch.randn(24, generator=g)
    bias[3], bias[7], bias[20:] = -inf, -inf, -inf
    equal = torch.full((2, 24), 0.5)
    for logits, b, k in ((equal, None, 6), (equal, torch.zeros(24), 24), (equal * -90, None, 3),
                         (torch.randn(3, 24, generator=g) * 20, bias, 20), (torch.randn(1, 1, generator=g), None, 1)):
        print(json.dumps([t[0].tolist() for t in (route(logits, b, k), route_reference(logits, b, k))]))
else:
    flat = torch.full((2, 400), -0.0)
    flat[0, ::3] = 0.0
    few = torch.full((2, 401), -inf)
    few[0, 400], few[1, 5], few[1, 390] = -1.0, 3.0, 3.0
    near = 1 + torch.arange(1000).flip(0).view(1, 1000) % 37 * 2.0**-23
    for scores, k, lengths in ((flat, 7, None), (few, 9, [401, 300]), (near, 30, [999]), (near.repeat(2, 1), 120, None),
                               (torch.randn(1, 1, generator=g), 4, None), (-near, 33, [64])):
        n = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
        print(json.dumps([topk(scores, k, n).tolist(), topk_reference(scores, k, n).tolist()]))
"""


@pytest.mark.parametrize(("table", "form"), [("route", {"num_warps": 1}), *(f[1:] for f in FORMS if f[1] == "topk")], ids=str)
def test_choices_among_equals_and_absent_ones(table, form):
    results = run(CHOICES, table, form)
    assert len(results) >= 5
    for ours, theirs in results:
        assert ours == theirs


def test_a_race_of_these_operations_has_the_present_form_and_others():
    shapes = {"sample": (), "verify_drafts": (), "topk": (128, 16384, 512), "route": ()}
    raced = {}
    for case in all_cases():
        if case.timed and case.op in shapes:
            name, configs = tune.candidates(case)
            raced[case.op] = getattr(tuning, name)(*shapes[case.op]) in configs and len(configs) > 1
    assert raced == dict.fromkeys(shapes, True)


def test_rows_of_a_race():
    case = next(c for c in all_cases() if c.op == "sample" and c.timed)
    results = [(2e-6, 0.0, {"FORM": 1}), (float("inf"), 0.0, {"FORM": 0, "error": "does not fit"})]
    best, failed = tune.rows(case, results, case.bytes / 1e-6)
    assert best == {"op": "sample", "case": case.name, "config": {"FORM": 1}, "us": 2.0, "gbps": round(case.bytes / 2e3),
                    "of_copy": 0.5, "difference": 0.0}  # fmt: skip
    assert failed["config"]["error"] == "does not fit" and "us" not in failed
