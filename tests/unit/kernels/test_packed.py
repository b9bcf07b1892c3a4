"""Weights packed into words: what packing refuses, and that the kernel compiles for a Hopper card without one.

Values are checked by the cases of `test_kernels`; the interpreter there does not run the decoder's NVIDIA form, so here it is
compiled and its operands looked at.
"""

import pytest
import torch

from headrace.kernels import gemm_upcast
from headrace.kernels._triton import HAVE_TRITON, INTERPRETED
from headrace.kernels.gemm_upcast import pack_words


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
@pytest.mark.parametrize(("values", "pairs"), [(8, 1), (4, 0)])
def test_compiles_for_hopper(values, pairs):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = gemm_upcast._words_kernel
    constants = {"K": 512, "MODE": 1, "VALUES": values, "X_FP8": False, "SPLIT": False, "BLOCK_M": 16, "BLOCK_N": 64,
                 "ATOMS": 1, "PAIRS": pairs, "STAGES": 3}  # fmt: skip
    pointers = {"x_ptr": "*bf16", "out_ptr": "*bf16", "partial_ptr": "*fp32"}
    types = {name: pointers.get(name, "*i32" if name.endswith("_ptr") else "i32") for name in kernel.arg_names}
    places = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else kind for name, kind in types.items()},
        {places[name]: value for name, value in constants.items()},
        {places[name]: [["tt.divisibility", 16]] for name in types if name not in constants},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    dots = [line for line in compiled.asm["ttgir"].splitlines() if "warp_group_dot " in line]
    assert len(dots) == values // 2
    assert all("dot_op<{opIdx = 0" in line for line in dots)  # weights reach the matrix unit from registers
