"""The V4.1 cache: what a block holds, what a state slot holds, and how a state travels.

Paged groups, per layer that owns compressed KV: "main.L" (the latent, key and value at once) and "index.L" (the
indexer's key), one entry per `ratio` tokens. Two stores with one interface: `quantized` has the model's own FP8/FP4
records (528, 288 and 68 bytes at the released dimensions), `fp32` keeps plain values and applies no quantisation
anywhere (parity).

A state slot holds every layer's window ring, a ring of main KV for each draft stage, and the ratio-2 compressors' last
rows. Rings hold fp32 values that are
exactly representable as window records; records are what `pack` writes.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from headrace.kernels import quantize as formats

from ...cache import CacheSpec, KVPool, PagedGroup
from .config import ModelConfig

BLOCK_TOKENS = 128
PHASES = ENCODER, DECODER, DRAFT = 0, 1, 2  # layers whose window rows are valid from a position of their own
GROUP_ALIGNMENT = 64  # bytes; every group of the released configuration is a multiple of 256 anyway
ROLLBACK = 12  # positions a sequence may step back (rejected drafts of two steps in flight) and still find its window


# ------------------------------------------------------------------ entry formats


class Codec:
    """One kind of entry: fp32 [..., dim] <-> uint8 [..., entry_bytes]. This one stores plain fp32."""

    parts: tuple[int, int] | None = None  # bytes of values and of scales, where a block holds all entries' values, then scales

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.entry_bytes = 4 * dim

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values.float().contiguous().view(torch.uint8)

    def decode(self, entries: torch.Tensor) -> torch.Tensor:
        return entries.contiguous().view(torch.float32)

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """What a value becomes when it is stored."""
        return values


class RecordCodec(Codec):
    """Quantised records; `kind` is "window" (FP8), "main" (FP4, E4M3 scales) or "index" (FP4, UE8M0 scales)."""

    def __init__(self, dim: int, kind: str) -> None:
        super().__init__(dim)
        self.kind = kind
        self.encode = getattr(formats, f"pack_{kind}_record")
        self.decode = getattr(formats, f"unpack_{kind}_record")
        self.entry_bytes = {"window": dim + dim // 32, "main": dim // 2 + dim // 16, "index": dim // 2 + dim // 32}[
            kind
        ]
        self.parts = (dim // 2, dim // 32) if kind == "index" else None

    def round(self, values: torch.Tensor) -> torch.Tensor:
        match self.kind:  # the same bits as decode(encode(values)), in a third of the time
            case "window":
                return formats.round_fp8_ue8m0(values)
            case "index":
                return formats.round_fp4_ue8m0(values)
            case _:
                return self.decode(self.encode(values)).to(values.dtype)


@dataclass(frozen=True, slots=True)
class Codecs:
    window: Codec
    main: Codec
    index: Codec


def codecs(config: ModelConfig, kv_store: str) -> Codecs:
    dims = {"window": config.head_dim, "main": config.head_dim, "index": config.index_head_dim}
    if kv_store == "fp32":
        return Codecs(**{kind: Codec(dim) for kind, dim in dims.items()})
    if kv_store == "quantized":
        return Codecs(**{kind: RecordCodec(dim, kind) for kind, dim in dims.items()})
    raise ValueError(f"kv_store is {kv_store!r}; choose 'quantized' or 'fp32'")


# ------------------------------------------------------------------ declaration


def cache_spec(
    config: ModelConfig, kv_store: str, numerics: str, batch_invariant: bool = False, keep_rows: int | None = None
) -> CacheSpec:
    """Groups at fixed offsets, all main groups first. At the released dimensions a block has 113,920 bytes = 890 a
    token."""
    if numerics not in ("bounded", "exact"):
        raise ValueError(f"numerics is {numerics!r}; choose 'bounded' or 'exact'")
    reach = config.sliding_window - 1
    if numerics == "exact":
        # A replayed row is exact in layer L once L windows lie behind it.
        # The draft looks back one row further than a window, at inputs of the last layer.
        keep, replay = 0, _even(config.num_hidden_layers * reach + (config.num_nextn_predict_layers > 0))
    else:
        keep = replay = _even(keep_rows if keep_rows is not None else config.sliding_window + ROLLBACK)
        if keep < config.sliding_window:
            raise ValueError(
                f"keep_rows {keep} is less than the window of {config.sliding_window}: decode would miss window KV"
            )
    kinds = codecs(config, kv_store)
    groups, offset = [], 0
    for kind, codec in (("main", kinds.main), ("index", kinds.index)):
        for layer in config.kv_source_layer_ids:
            ratio = config.compress_ratios[layer]
            groups.append(PagedGroup(f"{kind}.{layer}", layer, offset, codec.entry_bytes, ratio))
            offset += -(-(BLOCK_TOKENS // ratio * codec.entry_bytes) // GROUP_ALIGNMENT) * GROUP_ALIGNMENT
    state = StateLayout.of(config, kinds)
    meaning = {
        "family": "deepseek_v41",
        "kv_store": kv_store,
        "numerics": numerics,
        "batch_invariant": batch_invariant,
        "keep_rows": keep,
        "window": config.sliding_window,
        "block_tokens": BLOCK_TOKENS,
        "block_bytes": offset,
        "groups": [asdict(group) for group in groups],
        "index": "planar",  # values of a block's entries, then their scales
        "state": asdict(state),
    }
    digest = hashlib.blake2b(json.dumps(meaning, sort_keys=True).encode(), digest_size=12).hexdigest()
    return CacheSpec(
        layout_id=f"v41-{kv_store}-{numerics}-{digest}",
        block_bytes=offset,
        groups=tuple(groups),
        state_bytes=state.max_bytes,
        numerics=numerics,
        keep_rows=keep,
        replay_rows=replay,
        block_tokens=BLOCK_TOKENS,
    )


def _even(rows: int) -> int:
    return rows + rows % 2  # a replay starts on a ratio-2 group


class Entries:
    """One paged group of a pool: values in, values out."""

    def __init__(self, kv: KVPool, group: PagedGroup, codec: Codec) -> None:
        self.codec, self.per_block, self.entry_bytes = codec, kv.spec.entries_per_block(group), group.entry_bytes
        self._entries = kv.entries(group)  # [blocks, per_block, entry_bytes]
        self._blocks = self._entries.flatten(1)
        self._offset, self._stride = group.offset, kv.spec.block_bytes
        # Every byte of the pool starts a row of this overlapping view: selecting its rows is one copy per entry, where
        # indexing [block, place] would copy byte by byte.
        flat = kv.data.view(-1)
        self._rows = flat.as_strided((flat.numel() - group.entry_bytes + 1, group.entry_bytes), (1, 1))

    def write(self, block: torch.Tensor, place: torch.Tensor, values: torch.Tensor) -> None:
        """Store values [E, dim] as entries `place` [E] of blocks [E]."""
        self._entries[block, place] = self.codec.encode(values)

    def read(self, block: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Single entries: block, place int64 [...] -> fp32 [..., dim]."""
        address = block * self._stride + (place * self.entry_bytes + self._offset)
        raw = self._rows.index_select(0, address.flatten())
        return self.codec.decode(raw.view(*address.shape, self.entry_bytes))

    def read_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Whole blocks int64 [S, B] -> fp32 [S, B * per_block, dim]."""
        raw = self._blocks.index_select(0, blocks.flatten())
        return self.codec.decode(raw.view(blocks.shape[0], -1, self.entry_bytes))


class PlanarEntries(Entries):
    """Records of a block in parts: the values of all entries, then the scales of all, as the kernels read them."""

    def __init__(self, kv: KVPool, group: PagedGroup, codec: Codec) -> None:
        super().__init__(kv, group, codec)
        self._parts = [
            part.unflatten(1, (self.per_block, -1))
            for part in self._blocks.split([self.per_block * size for size in codec.parts], dim=1)
        ]  # views [blocks, per_block, bytes]
        flat, begin = kv.data.view(-1), group.offset
        self._rows_of_parts = []  # (rows as in `Entries`, of the part's first byte in a block, bytes)
        for size in codec.parts:
            self._rows_of_parts.append((flat.as_strided((flat.numel() - size + 1, size), (1, 1)), begin, size))
            begin += self.per_block * size

    def write(self, block: torch.Tensor, place: torch.Tensor, values: torch.Tensor) -> None:
        record = self.codec.encode(values)
        for part, data in zip(self._parts, record.split([p.shape[2] for p in self._parts], dim=-1), strict=True):
            part[block, place] = data

    def read(self, block: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        parts = []
        for rows, begin, size in self._rows_of_parts:
            address = block * self._stride + (place * size + begin)
            parts.append(rows.index_select(0, address.flatten()).view(*address.shape, size))
        return self.codec.decode(torch.cat(parts, dim=-1))

    def read_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        picked = [part.index_select(0, blocks.flatten()) for part in self._parts]
        return self.codec.decode(torch.cat(picked, dim=-1).view(blocks.shape[0], -1, self.entry_bytes))


def paged_entries(kv: KVPool, kinds: Codecs) -> dict[str, Entries]:
    """Every group of the pool by its name, for example "main.2"."""
    result = {}
    for group in kv.spec.groups:
        codec = getattr(kinds, group.name.split(".")[0])
        result[group.name] = (PlanarEntries if codec.parts else Entries)(kv, group, codec)
    return result


# ------------------------------------------------------------------ packed state


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Shape of a packed state: header, window rows of encoder, decoder and draft, one pending compressor row per
    ratio-2 source.

    Header: magic, version, position, first encoder, decoder and draft row, payload bytes, then 16 bytes each of the
    layout's and the payload's blake2b digest. Window rows are [layers, rows, record] for positions [first row,
    position): at most window - 1 of the backbone's, and window of the draft's, whose next block begins at `position`
    and sees only what is before it.
    """

    MAGIC = b"HRST"
    VERSION = 2
    HEADER = struct.Struct("<4sHxxQQQQI16s16s")

    encoder_layers: int
    decoder_layers: int
    draft_layers: int
    window: int
    window_record: int  # bytes
    pending_layers: int
    pending_row: int  # bytes: (kv, score) fp32

    @classmethod
    def of(cls, config: ModelConfig, kinds: Codecs) -> StateLayout:
        return cls(
            encoder_layers=config.cut_layer,
            decoder_layers=config.num_hidden_layers - config.cut_layer,
            draft_layers=config.num_nextn_predict_layers,
            window=config.sliding_window,
            window_record=kinds.window.entry_bytes,
            pending_layers=len(pending_layers(config)),
            pending_row=2 * config.head_dim * 4,
        )

    @property
    def layers(self) -> tuple[int, int, int]:
        """Layers of each phase: encoder, decoder, draft."""
        return self.encoder_layers, self.decoder_layers, self.draft_layers

    def oldest(self, phase: int, position: int) -> int:
        """Of the window rows of a phase, the first that somebody at `position` may look at."""
        return max(0, position - self.window + (phase != DRAFT))

    @property
    def max_bytes(self) -> int:
        far = 2 * self.window
        return self.HEADER.size + self._rows_bytes(far, tuple(self.oldest(phase, far) for phase in PHASES)) + (
            self.pending_layers * self.pending_row
        )

    def _rows_bytes(self, position: int, first: tuple[int, ...]) -> int:
        return sum(n * (position - start) for n, start in zip(self.layers, first, strict=True)) * self.window_record

    def payload_bytes(self, position: int, first: tuple[int, ...]) -> int:
        rows = self._rows_bytes(position, first)
        return rows + (self.pending_layers * self.pending_row if position % 2 else 0)

    def header(self, layout_id: str, position: int, first: tuple[int, ...], payload: bytes) -> bytes:
        return self.HEADER.pack(
            self.MAGIC, self.VERSION, position, *first, len(payload), _digest(layout_id.encode()), _digest(payload)
        )

    def check(self, layout_id: str, position: int, data: memoryview) -> tuple[tuple[int, ...], memoryview]:
        """-> (first row of each phase, payload). ValueError says what is wrong."""
        if len(data) < self.HEADER.size:
            raise ValueError(f"a state of {len(data)} bytes is shorter than its header of {self.HEADER.size}")
        magic, version, at, *first, size, layout, digest = self.HEADER.unpack_from(data)
        if magic != self.MAGIC or version != self.VERSION:
            raise ValueError(
                f"not a packed state: it starts with {magic!r} version {version}, not {self.MAGIC!r} {self.VERSION}"
            )
        if layout != _digest(layout_id.encode()):
            own = _digest(layout_id.encode()).hex()
            raise ValueError(f"the state's layout is {layout.hex()}; this model has {layout_id} ({own})")
        if at != position:
            raise ValueError(f"the state is of position {at}, expected {position}")
        if not all(self.oldest(phase, position) <= first[phase] <= position for phase in PHASES):
            raise ValueError(f"window rows from {first} do not fit position {position} and window {self.window}")
        payload = data[self.HEADER.size : self.HEADER.size + size]
        expected = self.payload_bytes(position, tuple(first))
        if len(payload) != size or size != expected:
            raise ValueError(
                f"the state has {len(data) - self.HEADER.size} bytes after its header, says {size}, needs {expected}"
            )
        if _digest(payload) != digest:
            raise ValueError(f"the state's payload of {size} bytes does not match its digest {digest.hex()}")
        return tuple(first), payload


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def pending_layers(config: ModelConfig) -> tuple[int, ...]:
    """Sources whose compressor may wait for the second token of a pair."""
    return tuple(layer for layer in config.kv_source_layer_ids if config.compress_ratios[layer] == 2)


# ------------------------------------------------------------------ state slots

UNSET = 1 << 62  # no row is valid


class V41StatePool:
    """State slots on the device. A row of position p lies at p % ring; who reads it must know that it is valid.

    `first[phase][slot]` is the oldest position with valid window rows in encoder, decoder and draft layers; rows
    below it, of an earlier tenant or never computed, are visible to nobody. `next[phase][slot]` is the position after
    the newest. Rings of draft stages lie behind those of the backbone's layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: CacheSpec,
        kinds: Codecs,
        slots: int,
        ring: int | None = None,
        device: str = "cpu",
    ) -> None:
        self.slots, self.spec = slots, spec
        self.window, self.codec = config.sliding_window, kinds.window
        self.ring = ring or config.sliding_window + ROLLBACK
        if self.ring < self.window:
            raise ValueError(f"a ring of {self.ring} rows cannot hold a window of {self.window}")
        self.layout = StateLayout.of(config, kinds)
        self.windows = torch.zeros(sum(self.layout.layers), slots, self.ring, config.head_dim, device=device)
        self.pending_index = {layer: i for i, layer in enumerate(pending_layers(config))}
        self.pending_ring = ROLLBACK + 2
        self.pending = torch.zeros(len(self.pending_index), slots, self.pending_ring, 2, config.head_dim, device=device)
        self.first = [[UNSET] * slots for _ in PHASES]
        self.next = [[0] * slots for _ in PHASES]

    def reset(self, slot: int) -> None:
        for phase in PHASES:
            self.first[phase][slot], self.next[phase][slot] = UNSET, 0

    def advance(self, phase: int, slot: int, start: int, stop: int) -> int:
        """Rows [start, stop) are about to be computed; returns the oldest position whose window rows they may see.

        A gap before `start` (a replay, or decoder layers that skipped a prompt's body) makes everything older
        invisible.
        """
        return self.advance_all(phase, [slot], [start], [stop])[0]

    def advance_all(self, phase: int, slots: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> list[int]:
        """The same of many slots, each of them once."""
        oldest, firsts, nexts = self.oldest(phase, slots, starts), self.first[phase], self.next[phase]
        for slot, first, stop in zip(slots, oldest, stops, strict=True):
            firsts[slot], nexts[slot] = first, stop
        return oldest

    def oldest(self, phase: int, slots: Sequence[int], starts: Sequence[int]) -> list[int]:
        """What `advance` would say of rows from these positions on."""
        firsts, nexts = self.first[phase], self.next[phase]
        return [
            start if firsts[slot] > start or nexts[slot] < start else firsts[slot]
            for slot, start in zip(slots, starts, strict=True)
        ]

    def rewind(self, slot: int, position: int) -> None:
        """Rings keep more rows than a window, so what the rejected rows overwrote is older than anybody at `position` looks.
        ValueError when that is not so."""
        back = self.next[ENCODER][slot] - position
        if back > min(self.ring - self.window, self.pending_ring - 2):
            raise ValueError(f"slot {slot} cannot step back {back} rows to {position}: its ring has {self.ring} rows")
        for phase in PHASES:
            self.next[phase][slot] = min(self.next[phase][slot], position)

    def first_draft(self, slot: int, position: int) -> int:
        """The oldest position whose main KV a block at `position` may see. ValueError when the slot cannot draft there:
        rows before it are missing, or were overwritten by more than a rollback's."""
        newest = self.next[DRAFT][slot]
        if not position <= newest <= position + self.ring - self.window:
            raise ValueError(
                f"slot {slot} cannot draft at position {position}: its rows end at {newest}, and its ring of {self.ring} "
                f"rows reaches back over {self.ring - self.window} more than a window"
            )
        return self.first[DRAFT][slot]

    def copy(self, source: int, target: int) -> None:
        self.windows[:, target] = self.windows[:, source]
        self.pending[:, target] = self.pending[:, source]
        for phase in PHASES:
            self.first[phase][target], self.next[phase][target] = self.first[phase][source], self.next[phase][source]

    # -------------------------------------------------------------- the wire

    def pack(self, slot: int, position: int) -> bytes:
        if self.next[0][slot] != position:
            raise ValueError(f"slot {slot} is at position {self.next[0][slot]}, not {position}")
        first = tuple(self._oldest(phase, slot, position) for phase in PHASES)
        parts = [self._window_bytes(phase, slot, first[phase], position) for phase in PHASES]
        if position % 2:
            parts.append(self._pending_row(slot, position - 1).contiguous().view(torch.uint8))
        payload = b"".join(part.cpu().numpy().tobytes() for part in parts)
        return self.layout.header(self.spec.layout_id, position, first, payload) + payload

    def unpack(self, slot: int, position: int, data: memoryview) -> None:
        data = memoryview(data).cast("B")
        first, payload = self.layout.check(self.spec.layout_id, position, data)
        flat = torch.from_numpy(np.frombuffer(payload, np.uint8).copy())
        start = 0
        for phase, layers in enumerate(self.layout.layers):
            rows = position - first[phase]
            size = layers * rows * self.codec.entry_bytes
            if size:
                records = flat[start : start + size].view(layers, rows, self.codec.entry_bytes)
                self._put_window_bytes(phase, slot, first[phase], position, records)
            start += size
            self.first[phase][slot], self.next[phase][slot] = first[phase], position
        if position % 2:
            tail = flat[start:].clone().view(torch.float32).view(len(self.pending_index), 2, -1)
            self._put_pending_row(slot, position - 1, tail)

    # What a pool with other memory has otherwise: records [layers, rows, record] uint8, pending rows fp32 [sources, 2, D].

    def _window_bytes(self, phase: int, slot: int, start: int, stop: int) -> torch.Tensor:
        return self.codec.encode(self._window(phase)[:, slot, self._at(start, stop)])

    def _put_window_bytes(self, phase: int, slot: int, start: int, stop: int, records: torch.Tensor) -> None:
        self._window(phase)[:, slot, self._at(start, stop)] = self.codec.decode(records).to(self.windows.device)

    def _pending_row(self, slot: int, position: int) -> torch.Tensor:
        return self.pending[:, slot, position % self.pending_ring]

    def _put_pending_row(self, slot: int, position: int, values: torch.Tensor) -> None:
        self.pending[:, slot, position % self.pending_ring] = values.to(self.pending.device)

    def _oldest(self, phase: int, slot: int, position: int) -> int:
        if self.next[phase][slot] != position:  # decoder layers that have not run up to here have nothing to tell
            return position
        return max(self.layout.oldest(phase, position), min(self.first[phase][slot], position))

    def _window(self, phase: int) -> torch.Tensor:
        return self.windows.split(self.layout.layers)[phase]

    def _at(self, start: int, stop: int) -> torch.Tensor:
        return torch.arange(start, stop, device=self.windows.device) % self.ring
