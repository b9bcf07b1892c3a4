"""The one place that imports Triton. Without it every reference still works and a kernel launch says what to install.

Kernels are plain Triton, so any Triton back end can compile them. (Two decoders have lines of NVIDIA's assembly beside the
plain form, chosen by a table: `gemm_upcast`, `attention_core`.) Set
TRITON_INTERPRET=1 before the first import of this package to run the kernels on a CPU (slow; for correctness only).
"""

import contextlib
import functools
import os
from collections.abc import Iterator

import torch

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    HAVE_TRITON = True
except ImportError:  # a CPU-only or kernel-less installation
    HAVE_TRITON = False

    class _MissingKernel:
        def __init__(self, name: str):
            self.name = name

        def __getitem__(self, grid):
            raise RuntimeError(
                f"kernel {self.name} needs Triton, which is not installed: pip install 'headrace-kernels[triton]', "
                "or call the torch reference in the same module"
            )

    class _Constant:
        def __init__(self, value: object = None):
            self.value = value

    class _Missing:
        constexpr = _Constant

        def __getattr__(self, name: str):
            return _Missing()

        def __call__(self, *args, **kwargs):
            return _Missing()

    class _MissingTriton(_Missing):
        @staticmethod
        def jit(function=None, **_):
            return _MissingKernel(function.__name__) if function else _MissingTriton.jit

    TensorDescriptor = _Missing()  # type: ignore[assignment,misc]
    triton, tl = _MissingTriton(), _Missing()  # type: ignore[assignment]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@functools.lru_cache(maxsize=16)
def processor_count(device: torch.device | None = None) -> int:
    """Multiprocessors of the device; a small number under the interpreter, so that splits are exercised there too."""
    if INTERPRETED or not torch.cuda.is_available():
        return 4
    return torch.cuda.get_device_properties(device or torch.cuda.current_device()).multi_processor_count


@functools.lru_cache(maxsize=1)
def has_bf16_pairs() -> bool:
    """Whether the device multiplies two bf16 in one instruction that NVIDIA's assembly can name."""
    return torch.version.cuda is not None and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


# registry: scratch of a device and lane, by size
_workspaces: dict[tuple[torch.device, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
_lane = 0  # of the launches that are issued now


@contextlib.contextmanager
def lane(number: int) -> Iterator[None]:
    """Launches issued inside use scratch of their own: for a stream that runs beside another. Lane 0 is everyone's."""
    global _lane
    before, _lane = _lane, number
    try:
        yield
    finally:
        _lane = before


def workspace(device: torch.device, floats: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scratch fp32 memory and int32 counters of a device, for products that split K.

    Counters are zero between launches (each kernel puts back what it counted), so no launch has to clear them. One
    stream per device and `lane` at a time may use it: programs of two concurrent launches would count each other. Scratch
    that a larger launch outgrew is kept: a captured graph may still use it. Each is twice the one before, so all are twice
    the last.
    """
    known = _workspaces.setdefault((device, _lane), [])
    if known and known[-1][0].numel() >= floats and known[-1][1].numel() >= counters:
        return known[-1]
    least = (2 * known[-1][0].numel(), 2 * known[-1][1].numel()) if known else (1 << 22, 1 << 14)
    partial = torch.empty(max(floats, least[0]), dtype=torch.float32, device=device)
    known.append((partial, torch.zeros(max(counters, least[1]), dtype=torch.int32, device=device)))
    return known[-1]


_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, acc):
    """acc + a b with an fp32 accumulator. The interpreter keeps bf16 as raw integers, so it multiplies fp32 instead."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def to_bf16(x):
    """fp32 -> bf16, nearest, ties to even. The interpreter's cast cuts the low bits off, so there they are rounded first."""
    if _INTERPRETED:
        raw = x.to(tl.int32, bitcast=True)
        raw = (raw + 0x7FFF + ((raw >> 16) & 1)) & -65536
        return raw.to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def round_e4m3(x):
    """fp32 of magnitude up to 448 -> the nearest e4m3, ties to even, as fp32.

    Also for the value of an e4m3 that a kernel has just packed: ptxas 12.8 and 12.9 let the unpacking of a pair read a register
    that nobody wrote where two packed pairs go to shared memory in one store.
    """
    raw = x.to(tl.int32, bitcast=True)
    normal = ((raw + 0x7FFFF + ((raw >> 20) & 1)) & -1048576).to(tl.float32, bitcast=True)
    small = ((x * 512.0 + 12582912.0) - 12582912.0) * 0.001953125
    small = tl.where(raw < 0, -tl.abs(small), small)  # keeps the sign of zero
    return tl.where(tl.abs(x) < 0.015625, small, normal)


@triton.jit
def to_e4m3(x):
    """fp32 of magnitude up to 448 -> e4m3, nearest, ties to even; see `to_bf16`."""
    if _INTERPRETED:
        return round_e4m3(x).to(tl.float8e4nv)
    else:
        return x.to(tl.float8e4nv)
