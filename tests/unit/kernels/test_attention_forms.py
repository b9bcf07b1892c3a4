"""Forms of dense latent attention that the interpreter's own table does not name, against the reference; how forms are ranked.

The small cases have absent indices, lengths of 0 and of no multiple of a tile, and memory that decodes to NaN where nothing is
stored.
"""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from headrace.kernels._triton import HAVE_TRITON, INTERPRETED
from headrace.kernels.kv_layouts import PagedKV
from headrace.kernels.sparse_attention import _sparse_attention_kernel, sparse_attention
from headrace.kernels.tune_attention import proposal, ranking

from .offline import compiled_for_hopper

SMALL = {"BLOCK_N": 32, "STAGES": 1, "SPREAD": 1, "num_warps": 4}
DENSE = {"BLOCK_M": 16, "STAGES": 1, "WAVES": 2, "num_warps": 4}
FORMS = [
    ("mla_decode", "bf16", DENSE | {"BLOCK_N": 64, "PAGES": 1}),
    ("mla_decode", "bf16", DENSE | {"BLOCK_N": 32, "PAGES": 0, "SPREAD": 0}),
    ("mla_decode", "v32_fp8", DENSE | {"BLOCK_N": 32, "PAGES": 0, "SPREAD": 0}),
    ("sparse_attention", "window_fp8", SMALL | {"PAIRS": 0}),
    ("sparse_attention", "window_fp8", SMALL | {"PAIRS": 1}),
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


DECODERS = """
import torch
from headrace.kernels._triton import tl, triton
from headrace.kernels.attention_core import PAIRS_SCALE, decode, decode_pairs, pairs_column

@triton.jit
def kernel(data_ptr, words_ptr, plain_ptr, pairs_ptr, W: tl.constexpr, S: tl.constexpr, LAYOUT: tl.constexpr):
    row, at = tl.arange(0, 16), tl.arange(0, 512)
    data = tl.load(data_ptr + row[:, None] * W + tl.arange(0, W)[None, :])
    words = tl.load(words_ptr + row[:, None] * S + tl.arange(0, S)[None, :])
    tl.store(plain_ptr + row[:, None] * 512 + at[None, :], decode(data, words, LAYOUT).to(tl.float32))
    tl.store(pairs_ptr + row[:, None] * 512 + pairs_column(at)[None, :], decode_pairs(data, words, LAYOUT).to(tl.float32))

def compare(values, scales, layout):
    for block, scale in zip(values.split(16), scales.split(16), strict=True):
        plain, pairs = torch.empty(2, 16, 512)
        words = [t.contiguous().view(torch.int32) for t in (block, scale)]
        kernel[(1,)](*words, plain, pairs, words[0].shape[1], words[1].shape[1], layout)
        assert torch.equal(plain, pairs * PAIRS_SCALE), (plain, pairs * PAIRS_SCALE)
        assert plain.isfinite().all() and plain.unique().numel() > 50

every = torch.arange(256, dtype=torch.uint8)
scale = torch.arange(128, dtype=torch.uint8) % 127  # e4m3 of no sign, without NaN
compare(every.repeat(128, 1), scale[:, None].repeat(1, 32), 2)
compare(every.repeat(16, 1), (scale[:32] * 4 % 127).repeat(16, 1), 2)
number = torch.where(every % 128 == 127, 0, every)  # without NaN
exponent = torch.arange(58, 183)[torch.arange(128) % 125].to(torch.uint8)
compare(number.repeat(128, 2), exponent[:, None].repeat(1, 16), 1)
compare(number.repeat(16, 2), exponent[20:36].repeat(16, 1), 1)
"""


def test_decoding_pairs_gives_every_value_exactly():
    """Each code with each scale, in each place of a word, against the plain decoder."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DECODERS]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(INTERPRETED or not HAVE_TRITON, reason="nothing compiles without Triton, nor under its interpreter")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_pairs_compile_for_hopper():
    """Keys of V4.1 are decoded where they were loaded: nothing of a tile's size moves between threads but for the products."""
    kernel = _sparse_attention_kernel
    constants = {"D": 512, "FORM": 0, "PAGE": 64, "LAYOUT": 1, "EXTRA_PAGE": 64, "EXTRA_LAYOUT": 2, "HAS_EXTRA": True,
                 "HAS_SINK": True, "HAS_ROPE": True, "SPLIT": False, "BLOCK_H": 64, "BLOCK_N": 64, "STAGES": 5, "SPREAD": 1,
                 "PAIRS": True, "WHOLE": True, "EXTRA_WHOLE": True}  # fmt: skip
    pointers = {"scale": "fp32"} | {name: "*bf16" for name in ("q_ptr", "kv16", "extra16", "out_ptr")}
    pointers |= {name: "*i32" for name in ("kv32", "extra32", "index_ptr", "extra_index_ptr")}
    odd = ["scale", "tiles_per_split"]
    compiled = compiled_for_hopper(kernel, constants, pointers, "*fp32", odd, warps=8)
    lines = compiled.asm["ttgir"].splitlines()
    moved = [line for line in lines if "convert_layout" in line and ("64x512xbf16" in line or "64x256xi32" in line)]
    assert len(moved) == 1  # the output
    chosen = {int(n) for n in re.findall(r"mov.b32 \t%r\d+, (5[0-9]{4}|6[0-9]{4});", compiled.asm["ptx"])}
    bytes_of = {(0, 1), (2, 3)}, {(n, n) for n in range(4)}  # of a word of e4m3; of e2m1 and the same shifted
    wanted = {low | (8 + low) << 4 | (4 + high) << 8 | (12 + high) << 12 for low, high in set.union(*bytes_of)}
    assert wanted <= chosen, (wanted, chosen)  # prmt: a byte, its sign eight times, a byte of the other word, its sign
    assert compiled.metadata.shared <= 232448  # bytes: what a program may have on this card


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
