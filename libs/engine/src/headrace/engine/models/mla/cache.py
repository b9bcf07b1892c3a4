"""The MLA cache: per token and layer one latent, shared by all heads, and nothing else.

An entry is the normed KV latent [kv_lora_rank] and behind it the rotated key part [qk_rope_head_dim], adjacent pairs.
Three stores:
  fp32  plain, for parity
  bf16  plain, what "quantized" means here (the released models cache BF16): 1,152 bytes at 512 + 64
  fp8   656 bytes: e4m3 x 512 | fp32 scale x 4 (per 128) | bf16 x 64, at 512 + 64 only

Nothing slides and nothing is pending, so a state is its position alone and a hit replays no rows.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict

import torch

from headrace.kernels.quantize import dequantize_fp8, quantize_fp8

from ...cache import CacheSpec, KVPool, PagedGroup
from .config import ModelConfig

BLOCK_TOKENS = 128
ALIGNMENT = 64  # bytes, of a group's offset
RECORD_RANK, RECORD_ROPE, RECORD_GROUP = 512, 64, 128
RECORD_BYTES = RECORD_RANK + RECORD_RANK // RECORD_GROUP * 4 + RECORD_ROPE * 2


def store_of(config: ModelConfig, kv_store: str) -> str:
    """The store that `kv_store` names. ValueError when there is none, or when its record does not fit the model."""
    store = {"quantized": "bf16"}.get(kv_store, kv_store)
    if store not in ("fp32", "bf16", "fp8"):
        raise ValueError(f"kv_store is {kv_store!r}; choose 'quantized' (bf16), 'bf16', 'fp8' or 'fp32'")
    dims = (config.kv_lora_rank, config.qk_rope_head_dim)
    if store == "fp8" and dims != (RECORD_RANK, RECORD_ROPE):
        raise ValueError(
            f"kv_store 'fp8' has records of {RECORD_RANK} + {RECORD_ROPE} elements; this model's kv_lora_rank + "
            f"qk_rope_head_dim is {dims[0]} + {dims[1]}: choose 'bf16'"
        )
    return store


def cache_spec(config: ModelConfig, store: str, batch_invariant: bool, dtype: torch.dtype) -> CacheSpec:
    """One group "latent.L" per layer. The numerics class is always `exact`: every layer sees every row."""
    size = {"fp32": 4 * config.latent_dim, "bf16": 2 * config.latent_dim, "fp8": RECORD_BYTES}[store]
    stride = -(-BLOCK_TOKENS * size // ALIGNMENT) * ALIGNMENT
    groups = tuple(
        PagedGroup(f"latent.{layer}", layer, layer * stride, size, 1) for layer in range(config.num_hidden_layers)
    )
    meaning = {
        "family": "mla",
        "store": store,
        "dims": [config.kv_lora_rank, config.qk_rope_head_dim],
        "dtype": str(dtype),  # of the computation: two of them do not give the same bits
        "batch_invariant": batch_invariant,
        "block_tokens": BLOCK_TOKENS,
        "groups": [asdict(group) for group in groups],
        "state": StatePool.VERSION,
    }
    digest = hashlib.blake2b(json.dumps(meaning, sort_keys=True).encode(), digest_size=12).hexdigest()
    return CacheSpec(
        layout_id=f"mla-{store}-exact-{digest}",
        block_bytes=stride * len(groups),
        groups=groups,
        state_bytes=StatePool.HEADER.size,
        numerics="exact",
        keep_rows=0,
        replay_rows=0,
        block_tokens=BLOCK_TOKENS,
    )


class Latents:
    """One layer's entries in a pool, as values of the model's dtype."""

    def __init__(self, kv: KVPool, group: PagedGroup, store: str, config: ModelConfig, dtype: torch.dtype) -> None:
        self.dim, self.store, self.dtype = config.latent_dim, store, dtype
        width = BLOCK_TOKENS * group.entry_bytes
        flat = kv.data[:, group.offset : group.offset + width]
        plain = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(store)
        self.blocks = flat if plain is None else flat.view(plain)  # [num_blocks, entries of a block, flat]
        self.entries = self.blocks.unflatten(1, (BLOCK_TOKENS, -1))  # [num_blocks, 128, entry]

    def write(self, block: torch.Tensor, place: torch.Tensor, values: torch.Tensor) -> None:
        """values [n, dim] at entries (block, place), int64 [n] each."""
        stored = _encode(values) if self.store == "fp8" else values.to(self.entries.dtype)
        self.entries[block, place] = stored

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero whole blocks. What lies behind a sequence's last entry is masked, but 0 * NaN would not be 0."""
        self.blocks.index_fill_(0, blocks, 0)

    def read(self, tables: torch.Tensor) -> torch.Tensor:
        """[S, n] block numbers -> [S, n * 128, dim]."""
        picked = self.blocks.index_select(0, tables.flatten())
        if self.store == "fp8":
            return _decode(picked.view(*tables.shape[:1], -1, RECORD_BYTES), self.dtype)
        return picked.view(tables.shape[0], -1, self.dim).to(self.dtype)


def _encode(values: torch.Tensor) -> torch.Tensor:
    """[..., 576] -> uint8 [..., 656]."""
    codes, scale = quantize_fp8(values[..., :RECORD_RANK].float(), RECORD_GROUP)
    rope = values[..., RECORD_RANK:].to(torch.bfloat16).contiguous()
    return torch.cat([codes.view(torch.uint8), scale.contiguous().view(torch.uint8), rope.view(torch.uint8)], dim=-1)


def _decode(records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [..., 656] -> [..., 576]."""
    codes, scale, rope = records.split([RECORD_RANK, RECORD_RANK // RECORD_GROUP * 4, RECORD_ROPE * 2], dim=-1)
    nope = dequantize_fp8(
        codes.contiguous().view(torch.float8_e4m3fn), scale.contiguous().view(torch.float32), RECORD_GROUP
    )
    return torch.cat([nope.to(dtype), rope.contiguous().view(torch.bfloat16).to(dtype)], dim=-1)


class StatePool:
    """Positions. A packed state is magic, version, position and the layout's digest: it says whose blocks it belongs to."""

    MAGIC, VERSION = b"HRMS", 1
    HEADER = struct.Struct("<4sHxxQ16s")

    def __init__(self, slots: int, layout_id: str) -> None:
        self.slots, self.next = slots, [0] * slots  # position after the newest row
        self._layout_id = layout_id
        self._layout = hashlib.blake2b(layout_id.encode(), digest_size=16).digest()

    def reset(self, slot: int) -> None:
        self.next[slot] = 0

    def rewind(self, slot: int, position: int) -> None:
        self.next[slot] = min(self.next[slot], position)

    def pack(self, slot: int, position: int) -> bytes:
        if self.next[slot] < position:
            raise ValueError(f"slot {slot} is at position {self.next[slot]}, not yet at {position}")
        return self.HEADER.pack(self.MAGIC, self.VERSION, position, self._layout)

    def unpack(self, slot: int, position: int, data: memoryview) -> None:
        if len(data) < self.HEADER.size:
            raise ValueError(f"a state of {len(data)} bytes is shorter than {self.HEADER.size}")
        magic, version, at, layout = self.HEADER.unpack_from(data)
        if (magic, version) != (self.MAGIC, self.VERSION):
            raise ValueError(f"not a packed state: magic {magic!r} version {version}, not {self.MAGIC!r} {self.VERSION}")
        if layout != self._layout:
            raise ValueError(f"the state's layout is {layout.hex()}; this model has {self._layout_id} ({self._layout.hex()})")
        if at != position:
            raise ValueError(f"the state is of position {at}, expected {position}")
        self.next[slot] = position

    def copy(self, source: int, target: int) -> None:
        self.next[target] = self.next[source]
