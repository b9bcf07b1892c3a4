"""The indexer's form for Hopper: that it compiles without a card and keeps keys in registers, and the racer's judgement.

Values are checked by the cases of `test_kernels`, under the interpreter, which has no layouts to look at.
"""

import re

import pytest
import torch

from headrace.kernels import indexer
from headrace.kernels._triton import HAVE_TRITON, INTERPRETED
from headrace.kernels.tune_indexer import difference

from .offline import compiled_for_hopper


@pytest.mark.skipif(INTERPRETED or not HAVE_TRITON, reason="nothing compiles without Triton, nor under its interpreter")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("tile", "page", "candidates"), [(128, 128, 0), (64, 64, 0), (128, 64, 0), (128, 128, 1)])
def test_keys_reach_the_matrix_unit_from_registers(tile, page, candidates):
    kernel = indexer._score_kernel
    constants = {"HEADS": 32, "PAGE": page, "CANDIDATES": bool(candidates), "BLOCK_N": tile, "ALIGNED": 4}
    pointers = {"q_ptr": "*bf16", "weight_ptr": "*fp32", "out_ptr": "*fp32", "pool": "*i32"}
    compiled = compiled_for_hopper(kernel, constants, pointers)
    before, loop = compiled.asm["ttgir"].split("scf.for", 1)
    dots = [line for line in loop.splitlines() if "warp_group_dot " in line]
    assert len(dots) == tile // 16  # of a scale group and 64 keys each
    assert all("dot_op<{opIdx = 0" in line for line in dots)
    assert "local_alloc" in before and "local_alloc" not in loop  # of queries only
    words = [match.start() for match in re.finditer(r"tt\.load [^\n]*x16x!tt\.ptr<i32>", loop)]
    assert words and max(words) < loop.index("barrier") < loop.index("warp_group_dot ")  # loaded a tile ahead


def test_a_hidden_score_is_no_score():
    expected = torch.tensor([1.0, float("-inf"), 2.0])
    assert difference(expected.clone(), expected) == 0.0
    assert difference(torch.tensor([1.0, float("-inf"), 2.2]), expected) == pytest.approx(0.2 / 5**0.5)
    assert difference(torch.tensor([1.0, 0.0, 2.0]), expected) == float("inf")
    assert difference(torch.tensor([1.0, float("nan"), 2.0]), expected) == float("inf")
    assert difference(torch.tensor([float("nan"), float("-inf"), 2.0]), expected) == float("inf")
