"""Every Triton kernel against its torch reference on small shapes, under the Triton interpreter.

The interpreter must be chosen before Triton is first imported, and other tests share this process: so the checks run in
one subprocess, a line of JSON a case, and each case is a test here. The same cases, and larger ones, run on a GPU with
`python -m headrace.kernels.check`.
"""

import functools
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
from headrace.kernels.cases import all_cases

CASES = [f"{case.op}: {case.name}" for case in all_cases() if case.size == "small"]


@functools.cache
def results() -> dict[str, dict]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "headrace.kernels.check", "--json", "--size", "small"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert lines, run.stderr
    return {f"{line['op']}: {line['case']}": line for line in lines}


def test_names_are_distinct():
    assert len(set(CASES)) == len(CASES)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_kernel(name):
    result = results()[name]
    assert result["ok"], result.get("trace") or result


def test_imports_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from headrace.kernels import _triton, gemm_fp8, kv_store, sampling, sparse_attention, topk\n"
        "assert not _triton.HAVE_TRITON\n"
        "assert topk.topk_reference(torch.tensor([[1., 3., 2.]]), 2).tolist() == [[1, 2]]\n"
        "try:\n    topk.topk(torch.tensor([[1., 3., 2.]]), 2)\n"
        "except RuntimeError as error:\n    assert 'headrace-kernels[triton]' in str(error)\n"
        "else:\n    raise AssertionError('a kernel ran without Triton')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
