"""Forms of dense latent attention that the interpreter's own table does not name, against the reference; how forms are ranked.

The small cases have absent indices, lengths of 0 and of no multiple of a tile, and memory that decodes to NaN where nothing is
stored.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from headrace.kernels.kv_layouts import PagedKV
from headrace.kernels.sparse_attention import sparse_attention
from headrace.kernels.tune_attention import proposal, ranking

DENSE = {"BLOCK_M": 16, "STAGES": 1, "WAVES": 2, "num_warps": 4}
FORMS = [
    ("mla_decode", "bf16", DENSE | {"BLOCK_N": 64, "PAGES": 1}),
    ("mla_decode", "bf16", DENSE | {"BLOCK_N": 32, "PAGES": 0, "SPREAD": 0}),
    ("mla_decode", "v32_fp8", DENSE | {"BLOCK_N": 32, "PAGES": 0, "SPREAD": 0}),
]
SCRIPT = """
import json, sys, torch
from headrace.kernels import tuning
from headrace.kernels.cases import all_cases
from headrace.kernels.check import check
op, layout, form = json.loads(sys.argv[1])
setattr(tuning, op, lambda *_: form)
for case in all_cases():
    mine = case.op == op and case.name.startswith(layout) or (case.op, case.name) == ("batch_invariance", op + " small")
    if mine and case.size == "small" and not case.timed:
        print(json.dumps(check(case, torch.device("cpu"))))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f[0]} {f[1]} " + " ".join(f"{k} {v}" for k, v in f[2].items()))
def test_form(form):
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, json.dumps(form)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=580, check=True)
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(results) >= 2
    for result in results:
        assert result["ok"], result.get("trace") or result


@pytest.mark.parametrize(
    ("layout", "extra", "dim"), [("window_fp8", "v4_fp8", 512), ("v4_fp8", "main_fp4", 512), ("bf16", None, 448)]
)
def test_sources_that_no_kernel_reads_together_are_refused(layout, extra, dim):
    """V4 entries have 448 columns of one format and 64 of another: read as 512 of one, they would be garbage."""
    kv, index = PagedKV.allocate(layout, 1, 16, dim), torch.zeros(1, 1, dtype=torch.int32)
    second = (PagedKV.allocate(extra, 1, 16), index) if extra else ()
    with pytest.raises(ValueError, match="v4_fp8 alone|512 or 576"):
        sparse_attention(torch.zeros(1, 16, dim, dtype=torch.bfloat16), kv, index, 1.0, *second)


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
