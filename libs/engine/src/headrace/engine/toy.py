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

With a draft (`draft_block`), hidden has ids[t] too, and the token `_likely(ids[t])` gets a bonus, so that it often follows. The
draft knows this rule, and sums of d over the WINDOW rows before its anchor, kept in a ring of its own: a lost or stale row
changes what it proposes.

Windows see nothing below window_floor, and d nothing below decoder_floor, so that an approximate replay really is one. Exact
replay takes W - 1 rows for each of the three windows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .batch import Choose, Segment
from .cache import CacheSpec, KVPool, PagedGroup

WINDOW = 4
ROLLBACK = 8
RING = WINDOW + ROLLBACK
LAYERS = 4  # a, b, d, and the draft's d
BONUS = 6.0  # logits go from 0 to 8
EXACT_REPLAY = 3 * (WINDOW - 1)
_HEADER = struct.Struct("<4sIQ")  # magic, position, sum over the rows (so that a damaged state is refused)
_ODD = np.uint64(0x9E3779B97F4A7C15)
_DEAD = np.uint64(0xFFFFFFFFFFFFFFFF)  # look-back onto an image


def _mix(value: np.ndarray) -> np.ndarray:
    value = np.asarray(value, dtype=np.uint64)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class ToyStates:
    """Per slot the last values of each layer by absolute position: rows [slots, LAYERS, RING], position p at p % RING."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.rows = np.zeros((slots, LAYERS, RING), dtype=np.uint64)
        self.at = np.full((slots, LAYERS, RING), -1, dtype=np.int64)  # the position that each row holds
        self.next = [0] * slots

    def reset(self, slot: int) -> None:
        self.at[slot] = -1
        self.next[slot] = 0

    def pack(self, slot: int, position: int) -> bytes:
        assert self.next[slot] == position, f"slot {slot} is at {self.next[slot]}, not at {position}"
        rows, held = [], []
        for p in range(position - WINDOW, position):
            held.append(self.at[slot, :, p % RING] == p)
            rows.append(np.where(held[-1], self.rows[slot, :, p % RING], np.uint64(0)))
        body = np.array(rows, dtype=np.uint64).tobytes() + np.array(held, dtype=np.uint8).tobytes()
        return _HEADER.pack(b"TOY1", position, sum(body)) + body

    def unpack(self, slot: int, position: int, data: memoryview) -> None:
        if len(data) != state_bytes():
            raise ValueError(f"a toy state has {state_bytes()} bytes; got {len(data)}")
        magic, at, total = _HEADER.unpack_from(data)
        body = bytes(data[_HEADER.size :])
        if magic != b"TOY1" or at != position or sum(body) != total:
            raise ValueError(f"not a toy state at position {position}: magic {magic!r}, position {at}")
        rows = np.frombuffer(body, dtype=np.uint64, count=LAYERS * WINDOW).reshape(WINDOW, LAYERS)
        held = np.frombuffer(body, dtype=np.uint8, offset=rows.nbytes).reshape(WINDOW, LAYERS)
        self.reset(slot)
        self.next[slot] = position
        for i, p in enumerate(range(position - WINDOW, position)):
            self.rows[slot, :, p % RING] = rows[i]
            self.at[slot, :, p % RING] = np.where(held[i], p, -1)

    def rewind(self, slot: int, position: int) -> None:
        assert 0 <= self.next[slot] - position <= ROLLBACK
        self.next[slot] = min(self.next[slot], position)

    def copy(self, source: int, target: int) -> None:
        self.rows[target], self.at[target], self.next[target] = self.rows[source], self.at[source], self.next[source]


def state_bytes() -> int:
    return _HEADER.size + WINDOW * LAYERS * 9


class ToyDrafts(NamedTuple):
    """As `batch.Drafts`."""

    tokens: torch.Tensor
    logits: torch.Tensor
    confidence_logits: torch.Tensor


class ToyModel:
    """`numerics` "exact": the decoder runs on all rows. `block_tokens` may be small, so that tests cross many blocks."""

    kind = "toy"
    dtype = torch.float32
    checkpoint_digest = "toy"

    def __init__(
        self,
        numerics: str = "exact",
        block_tokens: int = 128,
        vocab_size: int = 97,
        max_model_len: int = 4096,
        keep_rows: int = 6,
        draft_block: int = 0,
        image_token_id: int | None = None,
    ) -> None:
        bounded = numerics == "bounded"
        self.draft_block, self.hidden_size = draft_block, 5 if draft_block else 4
        self.spec = CacheSpec(
            layout_id=f"toy-{numerics}-{block_tokens}{'-draft' * (draft_block > 0)}",
            block_bytes=8 * block_tokens,
            groups=(PagedGroup("kv", 0, 0, 8, 1),),
            state_bytes=state_bytes(),
            numerics=numerics,
            keep_rows=keep_rows if bounded else 0,
            replay_rows=keep_rows if bounded else EXACT_REPLAY + (draft_block > 0),
            block_tokens=block_tokens,
        )
        self.vocab_size, self.max_model_len, self.eos_token_ids = vocab_size, max_model_len, (1,)
        self.image_token_id = image_token_id

    def new_states(self, slots: int) -> ToyStates:
        return ToyStates(slots)

    def forward(self, segments: Sequence[Segment], kv: KVPool, states: ToyStates) -> torch.Tensor:
        hidden = [vector for segment in segments for vector in self._segment(segment, kv, states)]
        return torch.stack(hidden) if hidden else torch.empty(0, self.hidden_size)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = hidden.numpy().astype(np.uint64)  # [R, hidden_size]
        value = parts[:, 0] | parts[:, 1] << np.uint64(16) | parts[:, 2] << np.uint64(32) | parts[:, 3] << np.uint64(48)
        out = self._noise(value)
        if self.draft_block:
            out[np.arange(len(out)), self._likely(parts[:, 4])] += np.float32(BONUS)
        return torch.from_numpy(out)

    def draft(
        self, slots: Sequence[int], anchors: Sequence[int], positions: Sequence[int], states: ToyStates, choose: Choose
    ) -> ToyDrafts:
        """See `batch.DraftingModel.draft`."""
        seen = np.array([self._draft_window(states, *pair) for pair in zip(slots, positions, strict=True)], dtype=np.uint64)
        previous, tokens, logits = np.array(anchors), [], []
        rows = np.arange(len(anchors))
        for place in range(self.draft_block):
            here = self._noise(seen + np.uint64(place + 1))
            here[rows, self._likely(previous)] += np.float32(BONUS)
            logits.append(torch.from_numpy(here))
            tokens.append(choose(place, logits[-1]))
            previous = tokens[-1].numpy()
        confidence = self._noise(seen + np.uint64(99))[:, : self.draft_block] - np.float32(2.0)
        return ToyDrafts(torch.stack(tokens, 1), torch.stack(logits, 1), torch.from_numpy(confidence))

    def _noise(self, value: np.ndarray) -> np.ndarray:
        """u64 [R] -> fp32 [R, vocab_size], from 0 to 8."""
        noise = _mix(value[:, None] + np.arange(1, self.vocab_size + 1, dtype=np.uint64) * _ODD) >> np.uint64(40)
        return noise.astype(np.float32) * np.float32(8.0 / (1 << 24))

    def _likely(self, ids: np.ndarray) -> np.ndarray:
        return (ids.astype(np.int64) * 31 + 7) % self.vocab_size

    @staticmethod
    def _draft_window(states: ToyStates, slot: int, position: int) -> int:
        assert states.next[slot] == position, f"slot {slot} is at {states.next[slot]}; the draft begins at {position}"
        places = [p % RING for p in range(max(0, position - WINDOW), position) if states.at[slot, 3, p % RING] == p]
        return sum(int(states.rows[slot, 3, place]) for place in places) & (1 << 64) - 1

    def _segment(self, segment: Segment, kv: KVPool, states: ToyStates) -> list[torch.Tensor]:
        slot, start, stop = segment.slot, segment.start, segment.stop
        assert stop <= len(segment.block_table) * self.spec.block_tokens, "the block table is too short"
        assert min(segment.ids) >= 0, f"slot {slot} runs a token that is not known: {segment.ids}"
        fresh = segment.window_floor == start and states.next[slot] == 0
        assert fresh or states.next[slot] == start, f"slot {slot} is at {states.next[slot]}; rows begin at {start}"
        ids = np.array([*segment.prev_ids, *segment.ids], dtype=np.int64).view(np.uint64)
        own: dict[int, np.uint64] = {}  # what an image's row is instead of its id; as look-back it is nothing, in any chunk
        for part in segment.images:
            rows = np.frombuffer(part.embeddings, np.float32).reshape(part.stop - part.start, -1).view(np.uint32)
            own |= zip(range(part.start, part.stop), _mix(rows.astype(np.uint64).sum(1)), strict=True)
            at = len(segment.prev_ids) - start
            ids[at + part.start : at + part.stop] = _DEAD
        back = len(segment.prev_ids)
        assert back == min(3, start), "look-back ids are missing"
        entries = kv.entries(self.spec.groups[0]).numpy()  # [blocks, block_tokens, 8]
        bt, table = self.spec.block_tokens, np.array(segment.block_table)
        out = []
        with np.errstate(over="ignore"):
            for i, t in enumerate(range(start, stop)):
                look = [ids[back + i - k] if back + i - k >= 0 else np.uint64(0) for k in range(4)]
                look[0] = own.get(t, look[0])
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
                    self._store(states, slot, 3, t, d)
                    if t in segment.outputs:
                        parts = [int(e) >> s & 0xFFFF for s in (0, 16, 32, 48)] + [int(ids[back + i])] * (self.hidden_size - 4)
                        out.append(torch.tensor(parts, dtype=torch.float32))
                else:
                    assert t not in segment.outputs, "a row below decoder_floor has no output"
        states.next[slot] = stop
        return out

    def _window(self, states: ToyStates, slot: int, layer: int, t: int, floor: int) -> np.uint64:
        """Sum over the visible rows before t."""
        positions = range(max(floor, t - WINDOW + 1, 0), t)
        visible = [p for p in positions if states.at[slot, layer, p % RING] == p]
        return np.uint64(sum(int(states.rows[slot, layer, p % RING]) for p in visible) & (1 << 64) - 1)

    def _store(self, states: ToyStates, slot: int, layer: int, t: int, value: np.uint64) -> None:
        states.rows[slot, layer, t % RING] = value
        states.at[slot, layer, t % RING] = t
