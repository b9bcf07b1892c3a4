"""The one generator of shapes: correctness checks, benchmarks and warm-up all walk these cases.

A Case names an operation and a shape and can build Problems: fresh inputs with closures over them. Small cases run
under the Triton interpreter, full ones need a GPU, timed ones are also benchmark rows.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterator

import torch

MODULES = ("attention", "gemm", "selection", "memory", "places", "sampling", "invariance")


@dataclasses.dataclass
class Problem:
    """One operation on one set of inputs.

    run        our kernel; returns a tensor or a tuple of tensors
    reference  the specification on the same inputs, in higher precision (None: only timed)
    select     picks from outputs what may be compared (drops rows that are not written, by contract)
    peers      other implementations by name, same inputs
    """

    run: Callable[[], object]
    reference: Callable[[], object] | None = None
    select: Callable[[object], object] = lambda outputs: outputs
    peers: dict[str, Callable[[], object]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Case:
    """bound: relative error ||out - ref|| / ||ref||, per output; 0 means bit-equal.

    size: small (interpreter and GPU) | full (GPU). timed: a benchmark row; flops and bytes are the least that the
    operation must do, and `ceiling` names what limits it: copy (device copy bandwidth), bf16 or fp8 (matrix rate).
    """

    op: str
    name: str
    build: Callable[[torch.device, int], Problem]
    bound: float | tuple[float, ...] = 0.0
    size: str = "small"
    timed: bool = False
    flops: float = 0.0
    bytes: float = 0.0
    ceiling: str = "copy"
    target: float | None = None  # the ratio to the peer, or the fraction of the ceiling, that the project promises


def all_cases() -> Iterator[Case]:
    for module in MODULES:
        yield from importlib.import_module(f"headrace.kernels.cases.{module}").cases()


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def randn(shape: tuple[int, ...], device: torch.device, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=generator(device, seed), device=device, dtype=dtype)


def random_fp8(shape: tuple[int, ...], device: torch.device, seed: int) -> torch.Tensor:
    """Finite e4m3 values: random bytes with exponents that a normal distribution would mostly have."""
    g = generator(device, seed)
    if len(shape) > 2:  # one group at a time, so that the fp32 source of a large weight never exists whole
        return torch.stack([random_fp8(shape[1:], device, seed + i) for i in range(shape[0])])
    return torch.randn(shape, generator=g, device=device, dtype=torch.float32).to(torch.float8_e4m3fn)
