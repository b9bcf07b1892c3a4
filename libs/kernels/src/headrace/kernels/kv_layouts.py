"""How KV entries lie in memory: record formats, paged sources, and their torch reader and writer.

Knows bytes and offsets, not attention. A pool is raw bytes of pages: page p begins at p * page_stride, a cache group
at `offset` inside it, and holds `page_size` entries of one layout. Entry index = page * page_size + slot; negative
means absent. In Headrace a page is the 128-token block of all groups, so page_stride is the block's 113,920 bytes.

layout      D    bytes  what (offsets inside the group)
bf16        any  2 D    plain rows
window_fp8  512  528    e4m3 x 512 | ue8m0 x 16 (per 32), entry by entry                      DeepSeek-V4.1 window
main_fp4    512  288    e2m1 x 512 packed | e4m3 x 32 (per 16), entry by entry                DeepSeek-V4.1 compressed
index_fp4   128  68     e2m1 x 128 packed of ALL slots | ue8m0 x 4 (per 32) of ALL slots      DeepSeek-V4.1 index keys
v4_fp8      512  584    (e4m3 x 448 | bf16 x 64) of ALL slots | ue8m0 x 8 (7 used, per 64)    DeepSeek-V4
v32_fp8     576  656    e4m3 x 512 | fp32 x 4 (per 128) | bf16 x 64, entry by entry           DeepSeek-V3.2
"""

import dataclasses

import torch

from headrace.kernels import quantize

LAYOUT_IDS = {"bf16": 0, "window_fp8": 1, "main_fp4": 2, "v4_fp8": 3, "v32_fp8": 4, "index_fp4": 5}
_DIMS = {"window_fp8": 512, "main_fp4": 512, "index_fp4": 128, "v4_fp8": 512, "v32_fp8": 576}
_BYTES = {"window_fp8": 528, "main_fp4": 288, "index_fp4": 68, "v4_fp8": 584, "v32_fp8": 656}
V4_ALIGNMENT = 576  # bytes; a V4 page is padded to a multiple of this


@dataclasses.dataclass(frozen=True)
class PagedKV:
    """One cache group of a pool.

    pool         any contiguous tensor; read and written as bytes
    layout       a name of the table above
    page_size    entries of this group in a page
    page_stride  bytes from page to page
    offset       bytes from a page's begin to this group; page_stride and offset are multiples of 16
    dim          elements of an entry; fixed by every layout but bf16
    """

    pool: torch.Tensor
    layout: str
    page_size: int
    page_stride: int
    offset: int = 0
    dim: int = 512

    def __post_init__(self) -> None:
        if self.layout not in LAYOUT_IDS:
            raise ValueError(f"unknown KV layout {self.layout!r}; known: {', '.join(LAYOUT_IDS)}")
        object.__setattr__(self, "dim", _DIMS.get(self.layout, self.dim))
        if self.page_stride % 16 or (self.offset % 16 and self.layout != "index_fp4"):
            raise ValueError(f"page_stride {self.page_stride} and offset {self.offset} must be multiples of 16 bytes")
        if not self.pool.is_contiguous():
            raise ValueError("the pool must be contiguous")

    @classmethod
    def allocate(cls, layout: str, pages: int, page_size: int, dim: int = 512, device: str = "cpu") -> "PagedKV":
        """A pool that holds this group alone, filled with bytes that decode to NaN or garbage: nothing may read them."""
        size = entry_bytes(layout, dim) * page_size
        alignment = V4_ALIGNMENT if layout == "v4_fp8" else 16
        stride = -(-size // alignment) * alignment
        pool = torch.full((pages * stride,), 0xFF, dtype=torch.uint8, device=device)
        return cls(pool, layout, page_size, stride, 0, dim)

    @property
    def bytes(self) -> torch.Tensor:
        return self.pool.view(-1).view(torch.uint8)

    @property
    def entry_bytes(self) -> int:
        return entry_bytes(self.layout, self.dim)

    def read(self, index: torch.Tensor) -> torch.Tensor:
        """Entry indices [...] -> fp32 [..., dim]; absent entries (negative index) read as zeros."""
        flat = index.reshape(-1).clamp_min(0).long()
        values = _decode(self.layout, self.dim, *(self.bytes[self._at(flat, *span)] for span in self._spans()))
        return torch.where((index >= 0).unsqueeze(-1), values.view(*index.shape, self.dim), 0.0)

    def write(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Store values [n, dim] at entry indices [n]; negative indices are skipped."""
        keep = index >= 0
        for span, data in zip(self._spans(), _encode(self.layout, values[keep]), strict=True):
            self.bytes[self._at(index[keep].long(), *span)] = data

    def _spans(self) -> list[tuple[int, int, int]]:
        """(offset in the group, stride between slots, bytes) of each contiguous part of an entry."""
        if self.layout == "v4_fp8":
            return [(0, 576, 576), (576 * self.page_size, 8, 8)]
        if self.layout == "index_fp4":
            return [(0, 64, 64), (64 * self.page_size, 4, 4)]
        return [(0, self.entry_bytes, self.entry_bytes)]

    def _at(self, flat: torch.Tensor, begin: int, stride: int, size: int) -> torch.Tensor:
        """Entry indices [n] -> byte positions [n, size] of one part."""
        page, slot = flat // self.page_size, flat % self.page_size
        first = page * self.page_stride + self.offset + begin + slot * stride
        return first.unsqueeze(-1) + torch.arange(size, device=flat.device)


def entry_bytes(layout: str, dim: int = 512) -> int:
    """Bytes of one entry, padding of the page not counted."""
    return _BYTES.get(layout, 2 * dim)


def _encode(layout: str, values: torch.Tensor) -> list[torch.Tensor]:
    if layout == "bf16":
        return [values.to(torch.bfloat16).contiguous().view(torch.uint8)]
    if layout == "window_fp8":
        return [quantize.pack_window_record(values)]
    if layout == "main_fp4":
        return [quantize.pack_main_record(values)]
    if layout == "index_fp4":
        record = quantize.pack_index_record(values)
        return [record[:, :64], record[:, 64:]]
    rope = values[:, -64:].to(torch.bfloat16).contiguous().view(torch.uint8)
    if layout == "v4_fp8":
        q, scale = quantize.quantize_fp8_ue8m0(values[:, :448], 64)
        pad = torch.zeros(len(values), 1, dtype=torch.uint8, device=values.device)
        return [torch.cat([q.view(torch.uint8), rope], -1), torch.cat([scale, pad], -1)]
    q, scale = quantize.quantize_fp8(values[:, :512], 128)
    return [torch.cat([q.view(torch.uint8), scale.view(torch.uint8), rope], -1)]


def _decode(layout: str, dim: int, data: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    if layout == "bf16":
        return data.view(torch.bfloat16).float()
    if layout == "window_fp8":
        return quantize.unpack_window_record(data)
    if layout == "main_fp4":
        return quantize.unpack_main_record(data)
    if layout == "index_fp4":
        return quantize.dequantize_fp4_ue8m0(data, scale, 32)
    if layout == "v4_fp8":
        nope = quantize.dequantize_fp8_ue8m0(data[:, :448].contiguous().view(torch.float8_e4m3fn), scale[:, :7], 64)
        return torch.cat([nope, data[:, 448:].contiguous().view(torch.bfloat16).float()], -1)
    nope = data[:, :512].contiguous().view(torch.float8_e4m3fn)
    scales = data[:, 512:528].contiguous().view(torch.float32)
    return torch.cat([quantize.dequantize_fp8(nope, scales, 128), data[:, 528:].contiguous().view(torch.bfloat16).float()], -1)
