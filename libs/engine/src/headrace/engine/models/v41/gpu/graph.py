"""Captured passes: the launches of one shape, recorded once and replayed with other inputs.

Knows static buffers and when they are filled; what is launched is the model's. Without a CUDA device (Triton's interpreter) a
replay runs the pass anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from headrace.kernels._triton import workspace

from .rows import GpuRows


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


class Graph:
    """A captured pass of one shape. `run(ids, matrix, tables, memory)` launches it on these very tensors."""

    WARM_UPS = 2  # Triton compiles and chooses in the first; the capture itself must not

    def __init__(
        self,
        run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, dict[int, torch.Tensor]], torch.Tensor],
        ids: np.ndarray,
        matrix: np.ndarray,
        tables: np.ndarray,
        memory: dict[int, torch.Tensor],
        device: torch.device,
    ) -> None:
        self.ids, self.matrix, self.tables = (torch.from_numpy(part.copy()).to(device) for part in (ids, matrix, tables))
        self.memory = {layer: values.to(device, copy=True) for layer, values in memory.items()}
        self.run = lambda: run(self.ids, self.matrix, self.tables, self.memory)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            return
        # A pass writes only what its own rows own, with the same values each time, and reads a pending row before it writes
        # another cell: it may run more than once.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self.WARM_UPS):
                self.run()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.run()
        self._scratch = workspace(device, 1, 1)  # the kernels' own, which a larger launch would replace and free

    def __call__(
        self, ids: np.ndarray, matrix: np.ndarray, tables: np.ndarray, memory: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        for place, values in ((self.ids, ids), (self.matrix, matrix), (self.tables, tables)):
            place.copy_(torch.from_numpy(values), non_blocking=True)
        for layer, values in memory.items():
            self.memory[layer].copy_(values, non_blocking=True)
        return self.replay()

    def replay(self) -> torch.Tensor:
        """The pass on the inputs that are in place; with a CUDA device its output is overwritten by the next."""
        if self.graph is None:
            return self.run()
        self.graph.replay()
        return self.out
