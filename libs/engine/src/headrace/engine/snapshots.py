"""State snapshots: the packed state of a prefix at a block boundary, so that a later hit restores it instead of replaying rows.

An object class of its own beside the paged blocks: keyed by the chain hash of the prefix that ends there, bounded in bytes,
least recently used out first, and lost without harm (a hit without its snapshot replays).

A record is a 16-byte header and the packed state. The header holds the position and the decoder floor: in class `bounded` the
decoder layers have run only from there on, and a prompt that must see further back can't use the snapshot.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass

_HEADER = struct.Struct("<4sIII")  # magic, position, decoder floor, bytes of state
_MAGIC = b"HRS1"
HEADER_BYTES = _HEADER.size


def encode(position: int, decoder_floor: int, state: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, position, decoder_floor, len(state)) + state


@dataclass(frozen=True, slots=True)
class Snapshot:
    position: int  # rows before it are in the state
    decoder_floor: int  # decoder layers have run on rows from here on
    state: memoryview

    @classmethod
    def decode(cls, record: bytes | memoryview) -> Snapshot:
        """ValueError when the bytes are not a whole record."""
        if len(record) < HEADER_BYTES:
            raise ValueError(f"a snapshot has at least {HEADER_BYTES} bytes; got {len(record)}")
        magic, position, floor, size = _HEADER.unpack_from(record)
        if magic != _MAGIC or size != len(record) - HEADER_BYTES:
            raise ValueError(f"not a snapshot: magic {magic!r}, {size} bytes of state announced, {len(record)} in all")
        return cls(position, floor, memoryview(record)[HEADER_BYTES:])

    def serves(self, floor: int) -> bool:
        """Whether a prompt whose decoder layers begin at row `floor` finds all decoder rows that it must see."""
        return self.decoder_floor <= floor or self.position <= floor


class SnapshotStore:
    """Records by key, at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._records: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: bytes) -> bool:
        return key in self._records

    def add(self, key: bytes, record: bytes) -> None:
        """Keep `record`, at the expense of the least recently used ones. One above the limit is not kept."""
        self.discard(key)
        if len(record) > self.limit:
            return
        self._records[key] = record
        self.bytes += len(record)
        while self.bytes > self.limit:
            self.discard(next(iter(self._records)))

    def get(self, key: bytes) -> Snapshot | None:
        record = self._records.get(key)
        if record is None:
            return None
        self._records.move_to_end(key)
        return Snapshot.decode(record)

    def discard(self, key: bytes) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self.bytes -= len(record)
