"""State slots in GPU memory: window KV as the records that kernels read, pending compressor rows as fp32.

A packed state is byte for byte the one of `..cache.V41StatePool` (records travel unchanged), so a prefill on a GPU can hand
over to a decode on a CPU. Behind the slots of a layer's pool lie one spare slot, for padding rows, and a scratch line for
chunks that are longer than a ring.
"""

from __future__ import annotations

import torch

from headrace.kernels.kv_layouts import PagedKV

from ....cache import CacheSpec
from ..cache import UNSET, Codecs, V41StatePool
from ..config import ModelConfig
from .rows import Tables


class GpuStatePool(V41StatePool):
    """`slots` state slots; positions, floors and the wire format are the CPU pool's.

    windows: uint8 [layers, (slots + 1) * ring + scratch, record]. pending: fp32 [sources, (slots + 1) * pending ring, 2, D].
    """

    def __init__(
        self, config: ModelConfig, spec: CacheSpec, kinds: Codecs, slots: int, scratch: int, device: torch.device
    ) -> None:
        super().__init__(config, spec, kinds, 0, None, "cpu")  # its rings stay empty: they are this class's
        self.slots, self.tables = slots, Tables()
        assert self.codec.entry_bytes == 528, "the kernels' window record"
        for phase in range(len(self.first)):
            self.first[phase], self.next[phase] = [UNSET] * slots, [0] * slots
        self.windows = self._pool(scratch, device)
        self.pending = torch.zeros(len(self.pending_index), (slots + 1) * self.pending_ring, 2, config.head_dim, device=device)

    def _pool(self, scratch: int, device: torch.device) -> torch.Tensor:
        shape = sum(self.layout.layers), (self.slots + 1) * self.ring + scratch, self.codec.entry_bytes
        return torch.zeros(shape, dtype=torch.uint8, device=device)

    @property
    def places(self) -> tuple[int, ...]:
        """Where everything lies: a captured graph is for these addresses."""
        return self.windows.data_ptr(), self.windows.shape[1], self.pending.data_ptr()

    def ensure_scratch(self, entries: int) -> None:
        """Room for long pieces of so many entries in all. Growing moves the pool: captured graphs of it are void then."""
        rings = (self.slots + 1) * self.ring
        if self.windows.shape[1] - rings < entries:
            grown = self._pool(2 * entries, self.windows.device)
            grown[:, :rings] = self.windows[:, :rings]
            self.windows = grown

    def window_kv(self, layer: int) -> PagedKV:
        """A layer's window pool: entry slot * ring + position % ring."""
        return PagedKV(self.windows[layer], "window_fp8", 1, self.codec.entry_bytes)

    def copy(self, source: int, target: int) -> None:
        for pool, size in ((self.windows, self.ring), (self.pending, self.pending_ring)):
            pool[:, target * size : (target + 1) * size] = pool[:, source * size : (source + 1) * size]
        for phase in range(len(self.first)):
            self.first[phase][target], self.next[phase][target] = self.first[phase][source], self.next[phase][source]

    # -------------------------------------------------------------- the wire

    def _window_bytes(self, phase: int, slot: int, start: int, stop: int) -> torch.Tensor:
        return self._window(phase)[:, slot * self.ring + self._at(start, stop)]

    def _put_window_bytes(self, phase: int, slot: int, start: int, stop: int, records: torch.Tensor) -> None:
        self._window(phase)[:, slot * self.ring + self._at(start, stop)] = records.to(self.windows.device)

    def _pending_row(self, slot: int, position: int) -> torch.Tensor:
        return self.pending[:, slot * self.pending_ring + position % self.pending_ring]

    def _put_pending_row(self, slot: int, position: int, values: torch.Tensor) -> None:
        self.pending[:, slot * self.pending_ring + position % self.pending_ring] = values.to(self.pending.device)
