"""Every form that the attention tables may name, run by Triton's interpreter against the reference; and how forms are ranked.

The small cases have absent indices, lengths of 0 and of no multiple of a tile, and memory that decodes to NaN where nothing is
stored.
"""

import json
import os
import subprocess
import sys

import pytest

from headrace.kernels.tune_attention import proposal, ranking

DENSE = {"BLOCK_M": 16, "STAGES": 1, "WAVES": 2, "num_warps": 4}
SPARSE = {"BLOCK_N": 16, "STAGES": 1, "num_warps": 4}
FORMS = [
    ("mla_decode", "bf16", DENSE | {"BLOCK_N": 16, "SPREAD": 2}),
    ("mla_decode", "bf16", DENSE | {"BLOCK_N": 32, "SPREAD": 1, "COLUMNS": 512}),
    ("mla_decode", "bf16", DENSE | {"BLOCK_N": 64, "SPREAD": 2, "COLUMNS": 512}),
    ("mla_decode", "bf16", DENSE | {"BLOCK_N": 16, "SPREAD": 0, "COLUMNS": 256}),
    ("sparse_attention", "v4_fp8", SPARSE | {"SPREAD": 2}),
    ("sparse_attention", "bf16", SPARSE | {"SPREAD": 2}),
]
SCRIPT = """
import json, sys, torch
from headrace.kernels import tuning
from headrace.kernels.cases import all_cases
from headrace.kernels.check import check
op, layout, form = json.loads(sys.argv[1])
setattr(tuning, op, lambda *_: form)
for case in all_cases():
    if case.op == op and case.size == "small" and not case.timed and case.name.startswith(layout):
        print(json.dumps(check(case, torch.device("cpu"))))
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f[0]} {f[1]} " + " ".join(f"{k} {v}" for k, v in f[2].items()))
def test_form(form):
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, json.dumps(form)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=True)
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(results) >= 2
    for result in results:
        assert result["ok"], result.get("trace") or result


def test_a_form_is_proposed_only_where_it_ran_agreed_and_passed_on_all_shapes():
    def line(case, form, us, difference=0.0):
        return {"row": "r", "case": case, "form": form, "us": us, "difference": difference}

    lines = [line("a", None, 10.0), line("b", None, 10.0)]
    lines += [line("a", {"x": 1}, 2.0), {"row": "r", "case": "b", "form": {"x": 1}, "error": "does not fit"}]
    lines += [line("a", {"x": 2}, 1.0, 0.5), line("b", {"x": 2}, 1.0)]
    lines += [line("a", {"x": 3}, 5.0), line("b", {"x": 3}, 10.0), line("a", {"x": 4}, 8.0), line("b", {"x": 4}, 8.0)]
    ranked = ranking(lines)
    assert [form for _, form in ranked["r"]][:3] == [{"x": 3}, {"x": 4}, None]
    assert proposal(ranked, set())["r"] == {"form": {"x": 3}, "time of present": 0.707}
    assert proposal(ranked, {("r", json.dumps({"x": 3}))})["r"]["form"] == {"x": 4}
    assert proposal(ranked, {("r", json.dumps({"x": n})) for n in (3, 4)})["r"] == {"form": None, "time of present": 1.0}
