"""Captured passes: the launches of one shape, recorded once and replayed with other inputs.

Knows static buffers and when they are filled; what is launched is the model's. Without a CUDA device (Triton's interpreter) a
replay runs the pass anew.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .rows import GpuRows, SentTables

Value = np.ndarray | torch.Tensor


def staged(values: Value, device: torch.device) -> torch.Tensor:
    """Host values where a copy to the device does not hold up the host: a copy from pageable memory may wait for everything
    before it. The allocator of pinned memory does not give it to others before the copy is over. Device tensors stay."""
    host = torch.from_numpy(np.ascontiguousarray(values)) if isinstance(values, np.ndarray) else values
    if device.type != "cuda" or host.device.type != "cpu" or host.is_pinned():
        return host
    return fill(_empty(host.shape, host.dtype, device), host)


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory, pinned when the device can copy from it by itself."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def padded_rows(values: torch.Tensor, rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """values [n, w] and zeros behind them: [rows, w] of `dtype`, where the values are; in host memory staged already."""
    if values.device.type != "cpu":
        return torch.nn.functional.pad(values.to(dtype), (0, 0, 0, rows - len(values)))
    out = _empty((rows, values.shape[1]), dtype, device)
    fill(out[: len(values)], values)
    _bytes(out[len(values) :])[...] = 0
    return out


PART = 16384  # values that the framework copies without other threads


def fill(target: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Copy between host tensors of one shape, by this thread: the framework would wake a thread for every 32 k values and wait
    for the last, which on a machine with other work costs milliseconds. target: contiguous."""
    values = values.contiguous()
    if target.dtype == values.dtype:
        np.copyto(_bytes(target), _bytes(values))
    else:
        for part, value in zip(target.view(-1).split(PART), values.view(-1).split(PART), strict=True):
            part.copy_(value)
    return target


def _bytes(values: torch.Tensor) -> np.ndarray:
    """A contiguous host tensor's memory, flat."""
    flat = values.detach().reshape(-1)  # of one value: its stride may be anything, a contiguous tensor's too
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy()


@dataclass(slots=True)
class Images:
    """Rows inside image spans: bool [padded], their numbers int64 [n] and their embeddings bf16 [n, d]."""

    inside: torch.Tensor
    rows: torch.Tensor
    embeddings: torch.Tensor


@dataclass(slots=True)
class Inputs:
    """What a pass needs from the host, on the device. `decoder`: rows of the second phase and where each lies among the
    first's, when they differ."""

    ids: torch.Tensor  # int32 [padded]
    rows: GpuRows
    memory: dict[int, torch.Tensor]  # Engram layer -> bf16 [padded, hashes * dim]
    decoder: tuple[GpuRows, torch.Tensor] | None = None
    images: Images | None = None


@functools.cache
def _warm_up_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all graphs: memory that a stream has used serves no other."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """A capture is void if another graph is destroyed meanwhile, which the collector of garbage may do at any time."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


class Graph:
    """A captured pass of one shape. `run` launches it on these very tensors, one for each of `values`. Of block tables, which
    are much the same in every step, only what is new is written.

    `pool`: of a graph that is never replayed at the same time, to share the memory of intermediate results with; the output of
    each stays its own.
    """

    WARM_UPS = 2  # Triton compiles and chooses in the first; the capture itself must not

    def __init__(
        self, run: Callable[..., Any], values: Sequence[Value | SentTables], device: torch.device, pool: Any = None
    ) -> None:
        self.tables = next((value for value in values if isinstance(value, SentTables)), None)
        arrays = [value.array if value is self.tables else value for value in values]
        inputs = self.inputs = [torch.as_tensor(array).to(device, copy=True) for array in arrays]
        self.run = lambda: run(*inputs)  # not of `self`: a graph is to end with its last name
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            return
        # A pass writes only what its own rows own, with the same values each time, and reads a pending row before it writes
        # another cell: it may run more than once.
        stream = _warm_up_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(self.WARM_UPS):
                self.run()
        torch.cuda.current_stream(device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with _nothing_collected(), torch.cuda.graph(self.graph, pool=pool):
            self.out = self.run()

    @property
    def pool(self) -> Any:
        return None if self.graph is None else self.graph.pool()

    def __call__(self, values: Sequence[Value | SentTables]) -> Any:
        self.load(dict(enumerate(values)))
        return self.replay()

    def load(self, values: Mapping[int, Value | SentTables]) -> None:
        """Bring inputs, by their places, behind the passes that read what they were."""
        for number, value in values.items():
            place = self.inputs[number]
            if isinstance(value, SentTables):
                _send(value, place)
            else:
                place.copy_(staged(value, place.device), non_blocking=True)

    def replay(self) -> Any:
        """The pass on the inputs that are in place; with a CUDA device its output is overwritten by the next."""
        if self.graph is None:
            return self.run()
        self.graph.replay()
        return self.out


def _send(tables: SentTables, place: torch.Tensor) -> None:
    """Bring the device's copy up to date, behind the passes that read it as it was."""
    changes = tables.unsent()
    if changes is None:
        place.copy_(staged(tables.array, place.device), non_blocking=True)
    elif len(changes[0]):
        index, values = (staged(part, place.device).to(place.device, non_blocking=True) for part in changes)
        place.view(-1).index_copy_(0, index, values)
    tables.sent()
