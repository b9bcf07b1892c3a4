"""Weights packed into words: what packing refuses, and that the kernel compiles for a Hopper card without one.

Values are checked by the cases of `test_kernels`; the interpreter there does not run the decoder's NVIDIA form, so here it is
compiled and its operands looked at.
"""

import pytest
import torch

from headrace.kernels import gemm_upcast
from headrace.kernels._triton import HAVE_TRITON, INTERPRETED
from headrace.kernels.gemm_upcast import held, pack_words

from .offline import compiled_for_hopper


@pytest.mark.parametrize(("name", "largest"), [("mxfp4", 176), ("fp8", 182)])
def test_largest_scale(name, largest):
    weight = torch.ones(32, 128 // (2 if name == "mxfp4" else 1)).to(torch.uint8 if name == "mxfp4" else torch.float8_e4m3fn)
    scale = torch.full((32 if name == "mxfp4" else 1, 4), largest, dtype=torch.uint8)
    assert pack_words(weight, scale, name)[1].shape == (1, scale.shape[0])
    scale[0, 2] += 1
    with pytest.raises(ValueError, match=f"{name} scale 2\\^{largest - 126} is above 2\\^{largest - 127}"):
        pack_words(weight, scale, name)


@pytest.mark.skipif(INTERPRETED or not HAVE_TRITON, reason="nothing compiles without Triton, nor under its interpreter")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("values", "pairs", "gated"), [(8, 1, True), (4, 0, False)])
def test_compiles_for_hopper(values, pairs, gated):
    kernel = gemm_upcast._words_kernel
    constants = {"K": 512, "MODE": 1, "VALUES": values, "X_FP8": False, "SPLIT": False, "BLOCK_M": 16, "BLOCK_N": 64,
                 "ATOMS": 1, "PAIRS": pairs, "STAGES": 3, "HEAD": 0 if gated else 512, "HALF": 32, "GATED": gated,
                 "LIMIT": True, "ROW_WEIGHT": True}  # fmt: skip
    pointers = {"x_ptr": "*bf16", "out_ptr": "*bf16", "limit": "fp32"}
    pointers |= {f"{name}_ptr": "*fp32" for name in ("partial", "row_weight", "cos", "sin")}
    compiled = compiled_for_hopper(kernel, constants, pointers, odd=["limit"])
    dots = [line for line in compiled.asm["ttgir"].splitlines() if "warp_group_dot " in line]
    assert len(dots) == values // 2
    assert all("dot_op<{opIdx = 0" in line for line in dots)  # weights reach the matrix unit from registers


@pytest.mark.parametrize("name", ["mxfp4", "fp8"])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_a_weight_is_held_packed(name, lead):
    """Experts are packed one by one, to what packing them together gives."""
    n, k = 64, 256
    if name == "mxfp4":
        weight, rows = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8), n
    else:
        weight, rows = torch.randn(*lead, n, k).to(torch.float8_e4m3fn), n // 32
    scale = torch.randint(100, 130, (*lead, rows, k // 32), dtype=torch.uint8)
    words, fields, packed = held(weight, scale, name)
    expected = pack_words(weight, scale, name)
    assert packed == expected[2] == f"{name}_words"
    assert torch.equal(words, expected[0]) and torch.equal(fields, expected[1])


def test_what_cannot_be_packed_is_held_as_stored():
    short = torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8), "mxfp4"  # 64 columns
    large = torch.zeros(2, 64, dtype=torch.uint8), torch.full((2, 4), 200, dtype=torch.uint8), "mxfp4"
    for stored in (short, large, (torch.zeros(2, 128, dtype=torch.bfloat16), None, "bf16")):
        kept = held(*stored)
        assert kept[0] is stored[0] and kept[1] is stored[1] and kept[2] == stored[2]
