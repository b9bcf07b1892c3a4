"""The V4 cache: what a block holds, what a state slot holds, and how a state travels.

Paged groups, per layer with compressed KV: "main.L" (the latent, key and value at once) and, with an indexer, "index.L" (its
key), one entry per `ratio` tokens. Stores: `quantized` has the model's own records (`LatentCodec`: FP8 with rotary channels in
bf16, 584 bytes at the released dimensions; `RotatedCodec`: FP4, 68 bytes), `fp32` plain values and no quantisation anywhere.

A state slot holds each layer's window ring and, for each compressor, a ring of its newest projections (KV and score): those of
an unfinished entry, and where entries overlap those of the group before. Rings have ROLLBACK rows more than anybody looks back.
A packed state holds these rows by absolute position; at a block boundary no entry is unfinished, so only the overlap is there.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import asdict, dataclass

import numpy as np
import torch

from headrace.kernels.quantize import dequantize_fp8_ue8m0, quantize_fp8_ue8m0, round_fp8_ue8m0

from ...cache import CacheSpec, PagedGroup
from ..v41.cache import GROUP_ALIGNMENT, ROLLBACK, UNSET, Codec, Codecs, RecordCodec
from .config import BLOCK_TOKENS, CSA, ModelConfig

LATENT_GROUP = 64  # values per scale of a latent's FP8 part
BOUNDED_WINDOWS = 2  # of replay in class `bounded`: half of a single one's rows would see too little (benchmarks/engine.md)


# ------------------------------------------------------------------ entry formats


class LatentCodec(Codec):
    """A latent [..., dim]: FP8 values, the last `rope` channels as bf16, a UE8M0 scale per 64 values padded to 8 bytes."""

    def __init__(self, dim: int, rope: int) -> None:
        super().__init__(dim)
        self.rope, self.flat = rope, dim - rope
        self.group = math.gcd(self.flat, LATENT_GROUP)
        self.scales = self.flat // self.group if self.flat else 0
        self.parts = (self.flat + 2 * rope, -(-self.scales // 8) * 8)  # at the released dimensions the kernels' `v4_fp8`
        self.entry_bytes = sum(self.parts)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        parts = [values[..., self.flat :].to(torch.bfloat16).contiguous().view(torch.uint8)]
        if self.flat:
            codes, scale = quantize_fp8_ue8m0(values[..., : self.flat].contiguous(), self.group)
            parts = [codes.view(torch.uint8), *parts, scale]
        record = torch.cat(parts, dim=-1)
        return torch.nn.functional.pad(record, (0, self.entry_bytes - record.shape[-1]))

    def decode(self, entries: torch.Tensor) -> torch.Tensor:
        codes, rope, scale, _ = entries.split(
            [self.flat, 2 * self.rope, self.scales, self.entry_bytes - self.flat - 2 * self.rope - self.scales], dim=-1
        )
        rope = rope.contiguous().view(torch.bfloat16).float()
        if not self.flat:
            return rope
        flat = dequantize_fp8_ue8m0(codes.contiguous().view(torch.float8_e4m3fn), scale.contiguous(), self.group)
        return torch.cat([flat, rope], dim=-1)

    def round(self, values: torch.Tensor) -> torch.Tensor:
        rope = values[..., self.flat :].to(torch.bfloat16).to(values.dtype)
        if not self.flat:
            return rope
        return torch.cat([round_fp8_ue8m0(values[..., : self.flat].contiguous(), self.group), rope], dim=-1)


class RotatedCodec(RecordCodec):
    """An index key or query, spread over its channels by a Hadamard transform before it is rounded to FP4."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, "index")
        self._pack = self.encode
        self.encode = lambda values: self._pack(hadamard(values))

    def round(self, values: torch.Tensor) -> torch.Tensor:
        return super().round(hadamard(values)).to(values.dtype)


def hadamard(values: torch.Tensor) -> torch.Tensor:
    """[..., n] times Sylvester's matrix over sqrt(n), n a power of two, fp32.

    Sums and differences of pairs: a row's bits must not depend on how many rows there are, as a product's do."""
    x, n, half = values.float(), values.shape[-1], 1
    while half < n:
        one, other = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x, half = torch.stack([one + other, one - other], dim=-2).flatten(-3), 2 * half
    return x * n**-0.5


def codecs(config: ModelConfig, kv_store: str) -> Codecs:
    """ValueError when there is no such store, or when its records do not fit the model."""
    if kv_store == "fp32":
        return Codecs(Codec(config.head_dim), Codec(config.head_dim), Codec(config.index_head_dim))
    if kv_store != "quantized":
        raise ValueError(f"kv_store is {kv_store!r}; choose 'quantized' or 'fp32'")
    dim = config.index_head_dim
    if dim % 32 or dim & (dim - 1):
        raise ValueError(f"kv_store 'quantized' needs an index_head_dim of 32, 64, 128, ...; it is {dim}: choose 'fp32'")
    latent = LatentCodec(config.head_dim, config.qk_rope_head_dim)
    return Codecs(latent, latent, RotatedCodec(dim))


# ------------------------------------------------------------------ declaration


@dataclass(frozen=True, slots=True)
class Series:
    """The projections of one compressor: rows of (KV, score), `width` values each."""

    name: str  # of its paged group
    layer: int
    ratio: int
    dim: int  # of an entry
    overlaps: bool  # an entry is made of the group before, too

    @property
    def width(self) -> int:
        return 2 * self.dim if self.overlaps else self.dim

    @property
    def span(self) -> int:
        """Rows that make an entry."""
        return 2 * self.ratio if self.overlaps else self.ratio

    @property
    def ring(self) -> int:
        return self.span + ROLLBACK

    def pending(self, position: int) -> tuple[int, int]:
        """Rows [first, position) that entries from `position` on need."""
        first = position // self.ratio * self.ratio
        return max(0, first - self.ratio * self.overlaps), position


def series(config: ModelConfig) -> tuple[Series, ...]:
    """Every compressor, main ones first, in the order of their layers."""
    main, index = [], []
    for layer, (kind, ratio) in enumerate(zip(config.layer_types, config.compress_ratios, strict=True)):
        if ratio:
            main.append(Series(f"main.{layer}", layer, ratio, config.head_dim, kind == CSA))
        if config.selects(layer):
            index.append(Series(f"index.{layer}", layer, ratio, config.index_head_dim, True))
    return (*main, *index)


def cache_spec(config: ModelConfig, kv_store: str, numerics: str, batch_invariant: bool) -> CacheSpec:
    """No layer of V4 is a decoder layer in the sense of `CacheSpec`, so keep_rows is 0 in both classes."""
    if numerics not in ("bounded", "exact"):
        raise ValueError(f"numerics is {numerics!r}; choose 'bounded' or 'exact'")
    kinds, made = codecs(config, kv_store), series(config)
    overlap = max((s.ratio for s in made if s.overlaps), default=0)
    reach = config.sliding_window - 1
    # A replayed row is exact in layer L once L windows lie behind it; the last layer's compressor looks back over a group.
    exact = (config.num_hidden_layers - 1) * reach + max(reach, overlap)
    groups, offset = [], 0
    for one in made:
        codec = kinds.main if one.name.startswith("main") else kinds.index
        groups.append(PagedGroup(one.name, one.layer, offset, codec.entry_bytes, one.ratio))
        offset += -(-(BLOCK_TOKENS // one.ratio * codec.entry_bytes) // GROUP_ALIGNMENT) * GROUP_ALIGNMENT
    layout = StateLayout(config.num_hidden_layers, config.sliding_window, kinds.window.entry_bytes, made)
    meaning = {
        "family": "deepseek_v4",
        "kv_store": kv_store,
        "numerics": numerics,
        "batch_invariant": batch_invariant,
        "block_tokens": BLOCK_TOKENS,
        "groups": [asdict(group) for group in groups],
        "entries": "planar",  # values of a block's entries, then their scales
        "state": [StateLayout.VERSION, asdict(layout)],
    }
    digest = hashlib.blake2b(json.dumps(meaning, sort_keys=True).encode(), digest_size=12).hexdigest()
    return CacheSpec(
        layout_id=f"v4-{kv_store}-{numerics}-{digest}",
        # A model of window layers only has nothing to page, but blocks still have identities and somebody's memory.
        block_bytes=offset or GROUP_ALIGNMENT,
        groups=tuple(groups),
        state_bytes=layout.max_bytes,
        numerics=numerics,
        keep_rows=0,
        replay_rows=exact if numerics == "exact" else max(BOUNDED_WINDOWS * config.sliding_window, overlap),
        block_tokens=BLOCK_TOKENS,
    )


# ------------------------------------------------------------------ packed state


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Shape of a packed state at `position`: header, window records [layers, rows, record] of positions [first row, position),
    at most window - 1 of them, then of each compressor its pending projections fp32 [rows, 2, width].

    Header: magic, version, position, first row, payload bytes, then 16 bytes each of the layout's and the payload's digest.
    """

    MAGIC = b"HRV4"
    VERSION = 1
    HEADER = struct.Struct("<4sHxxQQI16s16s")

    layers: int
    window: int
    record: int  # bytes
    series: tuple[Series, ...]

    @property
    def max_bytes(self) -> int:
        rows = sum((s.span - 1) * 2 * s.width * 4 for s in self.series)
        return self.HEADER.size + self.layers * (self.window - 1) * self.record + rows

    def payload_bytes(self, position: int, first: int) -> int:
        pending = 0
        for one in self.series:
            start, stop = one.pending(position)
            pending += (stop - start) * 2 * one.width * 4
        return self.layers * (position - first) * self.record + pending

    def header(self, layout_id: str, position: int, first: int, payload: bytes) -> bytes:
        return self.HEADER.pack(
            self.MAGIC, self.VERSION, position, first, len(payload), _digest(layout_id.encode()), _digest(payload)
        )

    def check(self, layout_id: str, position: int, data: memoryview) -> tuple[int, memoryview]:
        """-> (first window row, payload). ValueError says what is wrong."""
        if len(data) < self.HEADER.size:
            raise ValueError(f"a state of {len(data)} bytes is shorter than its header of {self.HEADER.size}")
        magic, version, at, first, size, layout, digest = self.HEADER.unpack_from(data)
        if (magic, version) != (self.MAGIC, self.VERSION):
            raise ValueError(f"not a packed state: magic {magic!r} version {version}, not {self.MAGIC!r} {self.VERSION}")
        own = _digest(layout_id.encode())
        if layout != own:
            raise ValueError(f"the state's layout is {layout.hex()}; this model has {layout_id} ({own.hex()})")
        if at != position:
            raise ValueError(f"the state is of position {at}, expected {position}")
        if not max(0, position - self.window + 1) <= first <= position:
            raise ValueError(f"window rows from {first} do not fit position {position} and window {self.window}")
        payload, expected = data[self.HEADER.size :], self.payload_bytes(position, first)
        if not len(payload) == size == expected:
            raise ValueError(f"the state has {len(payload)} bytes after its header, says {size}, needs {expected}")
        if _digest(payload) != digest:
            raise ValueError(f"the state's payload of {size} bytes does not match its digest {digest.hex()}")
        return first, payload


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


# ------------------------------------------------------------------ state slots


class StatePool:
    """State slots. A row of position p lies at p % ring; who reads it must know that it is valid.

    windows: fp32 [layers, slots, ring, D]; projections[name]: fp32 [slots, ring of the series, 2, width]. `first[slot]` is the
    oldest position with valid window rows, `next[slot]` the position after the newest.
    """

    def __init__(self, config: ModelConfig, spec: CacheSpec, kinds: Codecs, slots: int, ring: int | None = None) -> None:
        self.slots, self.spec, self.codec, self.window = slots, spec, kinds.window, config.sliding_window
        self.ring = ring or config.sliding_window + ROLLBACK
        if self.ring < self.window:
            raise ValueError(f"a ring of {self.ring} rows cannot hold a window of {self.window}")
        self.layout = StateLayout(config.num_hidden_layers, self.window, self.codec.entry_bytes, series(config))
        self.windows = torch.zeros(config.num_hidden_layers, slots, self.ring, config.head_dim)
        self.projections = {s.name: torch.zeros(slots, s.ring, 2, s.width) for s in self.layout.series}
        self.first, self.next = [UNSET] * slots, [0] * slots

    def reset(self, slot: int) -> None:
        self.first[slot], self.next[slot] = UNSET, 0

    def advance(self, slot: int, start: int, stop: int) -> int:
        """Rows [start, stop) are about to be computed; returns the oldest position whose window rows they may see. A gap before
        `start` (a replay) makes everything older invisible."""
        if self.first[slot] > start or self.next[slot] < start:
            self.first[slot] = start
        self.next[slot] = stop
        return self.first[slot]

    def rewind(self, slot: int, position: int) -> None:
        """ValueError when rows that `position` looks back on were overwritten."""
        back, most = self.next[slot] - position, min(self.ring - self.window, ROLLBACK)
        if back > most:
            raise ValueError(
                f"slot {slot} cannot step back {back} rows to {position}; its rings allow {most}"
            )
        self.next[slot] = min(self.next[slot], position)

    def copy(self, source: int, target: int) -> None:
        self.windows[:, target] = self.windows[:, source]
        for rows in self.projections.values():
            rows[target] = rows[source]
        self.first[target], self.next[target] = self.first[source], self.next[source]

    # -------------------------------------------------------------- the wire

    def pack(self, slot: int, position: int) -> bytes:
        if self.next[slot] != position:
            raise ValueError(f"slot {slot} is at position {self.next[slot]}, not {position}")
        first = max(0, position - self.window + 1, min(self.first[slot], position))
        parts = [self.codec.encode(self.windows[:, slot, _at(first, position, self.ring)])]
        for one in self.layout.series:
            rows = self.projections[one.name][slot, _at(*one.pending(position), one.ring)]
            parts.append(rows.contiguous().view(torch.uint8))
        payload = b"".join(part.numpy().tobytes() for part in parts)
        return self.layout.header(self.spec.layout_id, position, first, payload) + payload

    def unpack(self, slot: int, position: int, data: memoryview) -> None:
        first, payload = self.layout.check(self.spec.layout_id, position, memoryview(data).cast("B"))
        flat = torch.from_numpy(np.frombuffer(payload, np.uint8).copy())
        rows, record = position - first, self.codec.entry_bytes
        windows, flat = flat.split([self.layout.layers * rows * record, flat.numel() - self.layout.layers * rows * record])
        if rows:
            records = windows.view(self.layout.layers, rows, record)
            self.windows[:, slot, _at(first, position, self.ring)] = self.codec.decode(records)
        for one in self.layout.series:
            start, stop = one.pending(position)
            mine, flat = flat.split([(stop - start) * 2 * one.width * 4, flat.numel() - (stop - start) * 2 * one.width * 4])
            if stop > start:
                values = mine.clone().view(torch.float32).view(stop - start, 2, one.width)
                self.projections[one.name][slot, _at(start, stop, one.ring)] = values
        self.first[slot], self.next[slot] = first, position


def _at(start: int, stop: int, ring: int) -> torch.Tensor:
    return torch.arange(start, stop) % ring
