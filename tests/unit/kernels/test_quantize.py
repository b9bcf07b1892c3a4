"""The number formats: bit-equality with an independent implementation, round trips, and every edge of the codes."""

import os

import pytest
import torch

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
from headrace.kernels import quantize as Q

SHAPES = [(3, 512), (2, 5, 128), (1, 64), (0, 512)]


def samples(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Values over many magnitudes, with exact ties, zeros of both signs and whole zero groups among them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-30, 12, shape[:-1] + (1,), generator=g).float())
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -5.0, 0.0, -0.0])
    pick = torch.randint(0, len(ties), shape, generator=g)
    x = torch.where(torch.rand(shape, generator=g) < 0.3, ties[pick], x)
    x[..., :32] = torch.where(torch.rand(shape[:-1] + (1,), generator=g) < 0.2, 0.0, x[..., :32])
    return x


@pytest.fixture(scope="module")
def oracle():
    module = pytest.importorskip("nemo_automodel.components.models.deepseek_v41.quantization")
    return module.quantize_cache


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({4: torch.int32, 2: torch.int16}[x.element_size()])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fmt", "group", "pack", "unpack"),
    [
        ("fp8", 32, Q.pack_window_record, Q.unpack_window_record),
        ("nvfp4", 16, Q.pack_main_record, Q.unpack_main_record),
        ("mxfp4", 32, Q.pack_index_record, Q.unpack_index_record),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_records_equal_oracle(oracle, shape, dtype, fmt, group, pack, unpack):
    x = samples(shape).to(dtype)
    record = pack(x)
    assert record.shape[-1] == shape[-1] * {"fp8": 33 / 32, "nvfp4": 9 / 16, "mxfp4": 17 / 32}[fmt]
    assert torch.equal(bits(unpack(record, dtype)), bits(oracle(x, format=fmt, block_size=group)))
    assert torch.equal(pack(unpack(record)), pack(unpack(pack(unpack(record)))))


def test_e2m1_rounds_ties_to_even_codes_and_saturates():
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -5.0, 0.0, -0.0, 5.01, 4.99])
    packed, scale = Q.quantize_fp4_e4m3(x)
    assert scale.float().item() == 1.0
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten().tolist()
    assert codes == [0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 10, 14, 0, 8, 7, 6]
    big, scale = Q.quantize_fp4_e4m3(torch.full((16,), 1e6))
    assert scale.float().item() == 448 and (big == 0x77).all()


def test_all_packed_bytes_and_scales_decode():
    packed = torch.arange(256, dtype=torch.uint8)
    values = Q.dequantize_fp4_ue8m0(packed, torch.full((16,), 128, dtype=torch.uint8))
    levels = torch.tensor(Q.E2M1_VALUES)
    low, high = packed & 15, packed >> 4
    expect = torch.stack([levels[(n & 7).int()] * torch.where(n > 7, -2.0, 2.0) for n in (low, high)], -1).flatten()
    assert torch.equal(values, expect)
    decoded = Q.decode_ue8m0(torch.arange(256, dtype=torch.uint8))
    assert decoded[0] == 2.0**-127 and decoded[127] == 1 and decoded[254] == 2.0**127 and decoded[255].isnan()


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("shape", [(256, 384), (100, 130), (5, 33)])
@pytest.mark.parametrize("fp32_scale", [False, True])
def test_block_weights(block, shape, fp32_scale):
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=g).to(torch.float8_e4m3fn)
    grid = (-(-shape[0] // block), -(-shape[1] // block))
    byte = torch.randint(110, 140, grid, generator=g).to(torch.uint8)
    value = torch.exp2(byte.float() - 127)
    got = Q.dequantize_block_fp8(weight, value if fp32_scale else byte.view(torch.float8_e8m0fnu), block)
    for i, j in [(0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, shape[1] // 3)]:
        assert got[i, j] == weight[i, j].float() * value[i // block, j // block]
    with pytest.raises(ValueError, match="needs"):
        Q.dequantize_block_fp8(weight, value[:, :-1] if grid[1] > 1 else value.repeat(2, 1), block)


def test_mxfp4_expert():
    g = torch.Generator().manual_seed(2)
    packed = torch.randint(-128, 128, (3, 8, 32), generator=g).to(torch.int8)
    scale = torch.randint(120, 130, (3, 8, 2), generator=g).to(torch.uint8)
    got = Q.dequantize_mxfp4(packed, scale.view(torch.float8_e8m0fnu))
    nibble = (int(packed[1, 2, 20]) >> 4) & 15
    assert got[1, 2, 41] == (-1) ** (nibble >> 3) * Q.E2M1_VALUES[nibble & 7] * 2.0 ** (int(scale[1, 2, 1]) - 127)


def test_errors_name_the_sizes():
    with pytest.raises(ValueError, match="100.*32"):
        Q.quantize_fp8_ue8m0(torch.zeros(2, 100))
    with pytest.raises(ValueError, match="530"):
        Q.unpack_window_record(torch.zeros(2, 530, dtype=torch.uint8))
