"""What travels beside the paged blocks of a hand-off, as bytes: one header, then ids, packed state, hidden vector.

Knows the layout of a slab slot. Every part starts at a multiple of 16 bytes, so that whoever reads it may map arrays onto it.
"""

from __future__ import annotations

import struct
from array import array

from headrace.engine.api import EngineInfo, Handoff

_HEADER = struct.Struct("<4sHHIIIIQ")  # magic, version, -, ids, state bytes, hidden bytes, decoder floor, -
_MAGIC, _VERSION = b"HRSL", 1
_ALIGN = 16


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def slot_bytes(info: EngineInfo) -> int:
    """Bytes of a slot that holds any hand-off of this engine."""
    return _HEADER.size + _up(4 * info.max_model_len) + _up(info.state_bytes) + _up(info.hidden_bytes)


def pack(handoff: Handoff) -> bytes:
    ids = handoff.ids if isinstance(handoff.ids, array) and handoff.ids.typecode == "I" else array("I", handoff.ids)
    parts = [ids.tobytes(), bytes(handoff.state), bytes(handoff.hidden)]
    header = _HEADER.pack(_MAGIC, _VERSION, 0, len(ids), len(parts[1]), len(parts[2]), handoff.decoder_floor, 0)
    return header + b"".join(part + bytes(_up(len(part)) - len(part)) for part in parts)


def unpack(data: memoryview) -> Handoff:
    """ValueError when these bytes are not a slab. `state` and `hidden` are views into `data`; `ids` are a copy."""
    if len(data) < _HEADER.size:
        raise ValueError(f"a slab is at least {_HEADER.size} bytes; got {len(data)}")
    magic, version, _, count, state, hidden, floor, _ = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise ValueError(f"not a slab of version {_VERSION}: magic {magic!r}, version {version}")
    start = _HEADER.size
    end = start + _up(4 * count) + _up(state) + _up(hidden)
    if len(data) < end:
        raise ValueError(f"the slab's header announces {end} bytes; it has {len(data)}")
    ids = array("I")
    ids.frombytes(data[start : start + 4 * count])
    start += _up(4 * count)
    return Handoff(ids, data[start : start + state], data[start + _up(state) :][:hidden], floor)
