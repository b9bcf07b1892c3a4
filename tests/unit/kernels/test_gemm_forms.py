"""Every launch form of the FP8 products, in every row layout, against the reference, under the Triton interpreter.

The tables choose one form a shape; here each form takes each shape, odd ones included. As in test_kernels, one subprocess runs
all of them, for the interpreter must be chosen before Triton is first imported.
"""

import functools
import itertools
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
from headrace.kernels import tuning

SMALL = {"STAGES": 1, "num_warps": 4}
FORMS = {
    "wide": tuning.wide(32, 64, GROUP_M=2, **SMALL),
    "tailed": tuning.tailed(32, **SMALL),
    "narrow, weight left": tuning.narrow(16, 64, WAVES=2, **SMALL),
    "narrow, rows left": tuning.narrow(16, 64, WAVES=2, ROWS_LEFT=1, **SMALL),
    "pairs": tuning.narrow(16, 64, WAVES=4, PAIR=1, ROWS_LEFT=1, **SMALL),
    "pairs, no split": tuning.narrow(32, 128, WAVES=0, PAIR=1, ROWS_LEFT=1, GROUP_M=2, **SMALL),
}
# rows, n, k: fewer rows than a tile, columns that end in the tail or in its middle, odd numbers of steps
DENSE = [(33, 208, 384), (3, 80, 1152)]
SHAPES = [*(f"{m}x{n}x{k}" for m, n, k in DENSE), "contiguous", "masked"]


def run_all() -> None:
    import torch

    from headrace.kernels import check
    from headrace.kernels.cases import gemm

    check.RUNS = 1  # that repeated runs are bit-equal is tested with the tables' own forms
    cases = [gemm.dense_fp8(m, n, k, "small") for m, n, k in DENSE]
    cases += [gemm.contiguous_fp8(2, 256, 80, 256, "small"), gemm.masked_fp8(3, 20, 80, 256, "small")]
    for (form, config), (shape, case) in itertools.product(FORMS.items(), zip(SHAPES, cases, strict=True)):
        tuning.gemm_fp8 = lambda *_, config=config: config
        print(json.dumps({"form": form, "shape": shape} | check.check(case, torch.device("cpu"))), flush=True)


@functools.cache
def results() -> dict[tuple[str, str], dict]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, timeout=600, check=False)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert lines, run.stderr
    return {(line["form"], line["shape"]): line for line in lines}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_form(form, shape):
    result = results()[form, shape]
    assert result["ok"], result.get("trace") or result


if __name__ == "__main__":
    run_all()
