"""Carries out a plan: states in, rows through the model, states out, tokens chosen. Policy is the scheduler's.

The only file between `Plan` (positions, slots, block numbers) and tensors. A step is five things in a fixed order:

    save preempted sequences -> restore states and blocks -> forward -> pack states, hidden vectors -> logits and sample
"""

from __future__ import annotations

import time
from array import array

import torch

from .batch import Model
from .cache import KVPool
from .sampler import Draw, sample
from .sequence import Image, Plan, Result, Sample, Sequence


class Runner:
    """Owns the model's memory. `execute` is the one method that runs in the model's thread."""

    def __init__(self, model: Model, num_blocks: int, slots: int, kv_buffer=None) -> None:
        self.model = model
        self.kv = KVPool(model.spec, num_blocks, kv_buffer, device=str(getattr(model, "device", "cpu")))
        self.states = model.new_states(slots)

    @torch.inference_mode()
    def execute(self, plan: Plan) -> Result:
        result, clock = Result(), _Laps()
        for sequence in plan.preempt:
            result.images[sequence] = self._save(sequence)
        self._restore(plan, result)
        clock.lap(result, "restore")
        rows = [(i, row) for i, row in enumerate(plan.rows) if row.sequence not in result.failed]
        hidden, place = None, {}
        if rows:
            segments = [row.segment for _, row in rows]
            hidden = self.model.forward(segments, self.kv, self.states)
            wanted = [i for i, row in rows if row.segment.outputs]
            place = {i: at for at, i in enumerate(wanted)}
        clock.lap(result, "forward")
        for i, row in rows:
            if row.pack:
                result.packed[i] = self.states.pack(row.segment.slot, row.segment.stop)
            if row.hidden:
                result.hidden[i] = _to_bytes(hidden[place[i]])
        for sequence in plan.fork:
            if sequence not in result.failed:
                result.images[sequence] = self._save(sequence, sequence.prompt_len)
        clock.lap(result, "pack")
        self._sample(plan, result, hidden, place, clock)
        return result

    # ------------------------------------------------------------ states and blocks

    def _save(self, sequence: Sequence, position: int | None = None) -> Image:
        """A sequence's memory as host bytes."""
        position = sequence.computed if position is None else position
        state = sequence.state if sequence.state is not None else self.states.pack(sequence.slot, position)
        rows = max(position, sequence.write_floor)
        filled = -(-rows // self.kv.spec.block_tokens)
        blocks = [bytes(self.kv.data[block].cpu().numpy()) for block in sequence.block_table[:filled]]
        return Image(position, state, blocks + [b""] * (len(sequence.block_table) - filled))

    def _restore(self, plan: Plan, result: Result) -> None:
        for restore in plan.restore:
            slot = restore.sequence.slot
            for block, data in restore.blocks:
                self.kv.data[block] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self.states.reset(slot)
            if restore.state is not None:
                try:
                    self.states.unpack(slot, restore.position, memoryview(restore.state))
                except ValueError as error:
                    result.failed[restore.sequence] = str(error)

    # ------------------------------------------------------------ tokens

    def _sample(self, plan: Plan, result: Result, hidden: torch.Tensor | None, place: dict[int, int], clock: _Laps) -> None:
        """One batch for all: rows of this step and vectors handed over from another node go through the same logits call."""
        result.tokens = [None] * len(plan.samples)
        wanted = [i for i, s in enumerate(plan.samples) if s.sequence not in result.failed]
        if not wanted:
            return
        samples = [plan.samples[i] for i in wanted]
        logits = self.model.logits(self._gather(samples, hidden, place))
        clock.lap(result, "logits")
        draws = [_draw(s) for s in samples]
        for i, chosen in zip(wanted, sample(logits, draws, self.model.eos_token_ids), strict=True):
            result.tokens[i] = chosen
        clock.lap(result, "sample")

    def _gather(self, samples: list[Sample], hidden: torch.Tensor | None, place: dict[int, int]) -> torch.Tensor:
        """[len(samples), hidden_size] in the order of `samples`."""
        if hidden is not None and [place.get(s.row) for s in samples] == list(range(len(hidden))):
            return hidden
        parts = []
        for s in samples:
            parts.append(hidden[place[s.row]] if s.row is not None else self._from_bytes(s.sequence.hidden, hidden))
        return torch.stack(parts)

    def _from_bytes(self, data: bytes, like: torch.Tensor | None) -> torch.Tensor:
        """A handed hidden vector in the compute dtype: fp32 holds every value of a narrower one, so nothing is lost."""
        dtype = like.dtype if like is not None else getattr(self.model, "dtype", torch.float32)
        return torch.frombuffer(bytearray(data), dtype=torch.float32).to(device=self.kv.data.device, dtype=dtype)


class _Laps:
    """Adds the seconds since the last lap to a name."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self, result: Result, name: str) -> None:
        now = time.perf_counter()
        result.seconds[name] = result.seconds.get(name, 0.0) + now - self._last
        self._last = now


def _draw(s: Sample) -> Draw:
    sequence = s.sequence
    return Draw(sequence.request.sampling, sequence.choice, s.position, sequence.ids, sequence.prompt_len)


def _to_bytes(vector: torch.Tensor) -> bytes:
    """fp32 little-endian."""
    return array("f", vector.float().tolist()).tobytes()
