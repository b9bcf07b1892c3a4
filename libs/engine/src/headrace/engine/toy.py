"""A model of integers that keeps the engine honest: it has no weights, and its answer depends on every byte it was given.

It implements `batch.Model` as a real family does: one paged group, a state slot, chunks at any boundary, replay, decoder rows.
Values are u64 hashes, so a lost block, a stale state row, a wrong position or a wrong look-back changes the next token, and two
paths that should agree agree in all bits or not at all. Steps take microseconds: property tests run thousands.

    a[t] = mix(ids[t-3..t], t)                               look-back
    b[t] = mix(a[t], sum of a[t-W+1 .. t])                   window layer 1 (encoder)
    c[t] = mix(b[t], sum of b[t-W+1 .. t])                   window layer 2 (encoder)
    kv[t] = mix(c[t])                                        paged, 8 bytes a token, written from write_floor on
    d[t] = mix(c[t], sum of kv[j] * odd(j) for j <= t)       decoder, rows >= decoder_floor
    e[t] = mix(d[t], sum of d[t-W+1 .. t])                   window layer 3 (decoder)
    hidden = e[t] as four 16-bit numbers;  logit v = 24 bits of mix(e[t], v)

Windows see nothing below window_floor, and d nothing below decoder_floor, so that an approximate replay really is one. Exact
replay takes W - 1 rows for each of the three windows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch

from .batch import Segment
from .cache import CacheSpec, KVPool, PagedGroup

WINDOW = 4
EXACT_REPLAY = 3 * (WINDOW - 1)
_HEADER = struct.Struct("<4sIQ")  # magic, position, sum over the rows (so that a damaged state is refused)
_ODD = np.uint64(0x9E3779B97F4A7C15)


def _mix(value: np.ndarray) -> np.ndarray:
    value = np.asarray(value, dtype=np.uint64)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class ToyStates:
    """Per slot the last W - 1 values of a, b and d by absolute position: rows [slots, 3, W - 1], position p at p % (W - 1)."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.rows = np.zeros((slots, 3, WINDOW - 1), dtype=np.uint64)
        self.at = np.full((slots, 3, WINDOW - 1), -1, dtype=np.int64)  # the position that each row holds
        self.next = [0] * slots

    def reset(self, slot: int) -> None:
        self.at[slot] = -1
        self.next[slot] = 0

    def pack(self, slot: int, position: int) -> bytes:
        assert self.next[slot] == position, f"slot {slot} is at {self.next[slot]}, not at {position}"
        rows, held = [], []
        for p in range(position - WINDOW + 1, position):
            held.append(self.at[slot, :, p % (WINDOW - 1)] == p)
            rows.append(np.where(held[-1], self.rows[slot, :, p % (WINDOW - 1)], np.uint64(0)))
        body = np.array(rows, dtype=np.uint64).tobytes() + np.array(held, dtype=np.uint8).tobytes()
        return _HEADER.pack(b"TOY1", position, sum(body)) + body

    def unpack(self, slot: int, position: int, data: memoryview) -> None:
        if len(data) != state_bytes():
            raise ValueError(f"a toy state has {state_bytes()} bytes; got {len(data)}")
        magic, at, total = _HEADER.unpack_from(data)
        body = bytes(data[_HEADER.size :])
        if magic != b"TOY1" or at != position or sum(body) != total:
            raise ValueError(f"not a toy state at position {position}: magic {magic!r}, position {at}")
        rows = np.frombuffer(body, dtype=np.uint64, count=3 * (WINDOW - 1)).reshape(WINDOW - 1, 3)
        held = np.frombuffer(body, dtype=np.uint8, offset=rows.nbytes).reshape(WINDOW - 1, 3)
        self.reset(slot)
        self.next[slot] = position
        for i, p in enumerate(range(position - WINDOW + 1, position)):
            self.rows[slot, :, p % (WINDOW - 1)] = rows[i]
            self.at[slot, :, p % (WINDOW - 1)] = np.where(held[i], p, -1)

    def copy(self, source: int, target: int) -> None:
        self.rows[target], self.at[target], self.next[target] = self.rows[source], self.at[source], self.next[source]


def state_bytes() -> int:
    return _HEADER.size + (WINDOW - 1) * 3 * 9


class ToyModel:
    """`numerics` "exact": the decoder runs on all rows. `block_tokens` may be small, so that tests cross many blocks."""

    kind = "toy"
    dtype = torch.float32
    hidden_size = 4
    checkpoint_digest = "toy"

    def __init__(
        self,
        numerics: str = "exact",
        block_tokens: int = 128,
        vocab_size: int = 97,
        max_model_len: int = 4096,
        keep_rows: int = 6,
    ) -> None:
        bounded = numerics == "bounded"
        self.spec = CacheSpec(
            layout_id=f"toy-{numerics}-{block_tokens}",
            block_bytes=8 * block_tokens,
            groups=(PagedGroup("kv", 0, 0, 8, 1),),
            state_bytes=state_bytes(),
            numerics=numerics,
            keep_rows=keep_rows if bounded else 0,
            replay_rows=keep_rows if bounded else EXACT_REPLAY,
            block_tokens=block_tokens,
        )
        self.vocab_size, self.max_model_len, self.eos_token_ids = vocab_size, max_model_len, (1,)

    def new_states(self, slots: int) -> ToyStates:
        return ToyStates(slots)

    def forward(self, segments: Sequence[Segment], kv: KVPool, states: ToyStates) -> torch.Tensor:
        hidden = [vector for segment in segments for vector in self._segment(segment, kv, states)]
        return torch.stack(hidden) if hidden else torch.empty(0, self.hidden_size)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = hidden.numpy().astype(np.uint64)  # [R, 4]
        value = parts[:, 0] | parts[:, 1] << np.uint64(16) | parts[:, 2] << np.uint64(32) | parts[:, 3] << np.uint64(48)
        noise = _mix(value[:, None] + np.arange(1, self.vocab_size + 1, dtype=np.uint64) * _ODD) >> np.uint64(40)
        return torch.from_numpy(noise.astype(np.float32) * np.float32(8.0 / (1 << 24)))

    def _segment(self, segment: Segment, kv: KVPool, states: ToyStates) -> list[torch.Tensor]:
        slot, start, stop = segment.slot, segment.start, segment.stop
        assert stop <= len(segment.block_table) * self.spec.block_tokens, "the block table is too short"
        fresh = segment.window_floor == start and states.next[slot] == 0
        assert fresh or states.next[slot] == start, f"slot {slot} is at {states.next[slot]}; rows begin at {start}"
        ids = np.array([*segment.prev_ids, *segment.ids], dtype=np.uint64)
        back = len(segment.prev_ids)
        assert back == min(3, start), "look-back ids are missing"
        entries = kv.entries(self.spec.groups[0]).numpy()  # [blocks, block_tokens, 8]
        bt, table = self.spec.block_tokens, np.array(segment.block_table)
        out = []
        with np.errstate(over="ignore"):
            for i, t in enumerate(range(start, stop)):
                look = [ids[back + i - k] if back + i - k >= 0 else np.uint64(0) for k in range(4)]
                a = _mix(sum(_mix(x * _ODD + np.uint64(k)) for k, x in enumerate(look)) + np.uint64(t))
                b = _mix(a + _mix(a + self._window(states, slot, 0, t, segment.window_floor)))
                c = _mix(b + _mix(b + self._window(states, slot, 1, t, segment.window_floor)))
                if t >= segment.write_floor:
                    entries[table[t // bt], t % bt] = np.frombuffer(_mix(c).tobytes(), dtype=np.uint8)
                self._store(states, slot, 0, t, a)
                self._store(states, slot, 1, t, b)
                if t >= segment.decoder_floor:
                    rows = entries[table].reshape(-1, 8)[: t + 1].copy().view(np.uint64).reshape(-1)
                    everything = (rows * (np.arange(t + 1, dtype=np.uint64) * np.uint64(2) + np.uint64(1))).sum(dtype=np.uint64)
                    d = _mix(c + _mix(everything))
                    e = _mix(d + _mix(d + self._window(states, slot, 2, t, max(segment.window_floor, segment.decoder_floor))))
                    self._store(states, slot, 2, t, d)
                    if t in segment.outputs:
                        out.append(torch.tensor([int(e) >> s & 0xFFFF for s in (0, 16, 32, 48)], dtype=torch.float32))
                else:
                    assert t not in segment.outputs, "a row below decoder_floor has no output"
        states.next[slot] = stop
        return out

    def _window(self, states: ToyStates, slot: int, layer: int, t: int, floor: int) -> np.uint64:
        """Sum over the visible rows before t."""
        positions = range(max(floor, t - WINDOW + 1, 0), t)
        visible = [p for p in positions if states.at[slot, layer, p % (WINDOW - 1)] == p]
        return np.uint64(sum(int(states.rows[slot, layer, p % (WINDOW - 1)]) for p in visible) & (1 << 64) - 1)

    def _store(self, states: ToyStates, slot: int, layer: int, t: int, value: np.uint64) -> None:
        states.rows[slot, layer, t % (WINDOW - 1)] = value
        states.at[slot, layer, t % (WINDOW - 1)] = t
