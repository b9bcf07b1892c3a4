"""Step times of this machine, measured before the first request: what a row more costs.

Runs the model on made-up sequences in free memory, for a growing number of rows. Knows rows and seconds; does not know what is
made of them (`speculation.StepCurve`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from .batch import Segment
from .runner import Runner
from .windows import LOOK_BACK

REPEATS = 5  # timed runs of a size, after one that is not; the fastest counts: others have a share of somebody else's work
# Seconds for a curve, behind its first run (a machine's very first one compiles the CPU's loops): sizes that do not fit in are
# left to the last line of the curve.
LIMIT = 3.0


@torch.inference_mode()
def measure(runner: Runner, slots: int, most_rows: int, block: int) -> tuple[dict[int, float], dict[int, float]]:
    """(rows -> seconds of a forward pass and its logits, sequences -> seconds of a draft step)."""
    rows = _sizes(min(slots * (block + 1), most_rows))
    forward = _curve(rows, lambda size: _forward(runner, slots, size), LIMIT, runner.clock)
    sequences = [size for size in _sizes(slots) if size <= max(forward)]
    _forward(runner, slots, max(sequences))  # one row each
    draft = _curve(sequences, lambda size: _draft(runner, size), LIMIT, runner.clock)
    for slot in range(slots):
        runner.states.reset(slot)
    return forward, draft


def _sizes(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16 ... most."""
    sizes, step = {1, most}, 2
    while step < most:
        sizes |= {step, min(step + step // 2, most)}
        step *= 2
    return sorted(sizes)


def _curve(sizes: list[int], work: Callable[[int], None], limit: float, clock: Callable[[], float]) -> dict[int, float]:
    """The sizes take turns, so that a slow moment of the machine meets all of them; and more never takes less, so what is above
    the time of a larger size is noise."""
    out: dict[int, float] = {}

    def timed(size: int) -> float:
        began = clock()
        work(size)
        return clock() - began

    work(sizes[0])
    end = time.monotonic() + limit
    for size in sizes:
        work(size)
        out[size] = timed(size)
        if time.monotonic() > end:
            break
    for _ in range(REPEATS - 1):
        for size in out:
            if time.monotonic() <= end:
                out[size] = min(out[size], timed(size))
    least = math.inf
    for size in sorted(out, reverse=True):
        least = out[size] = min(least, out[size])
    return out


def _forward(runner: Runner, slots: int, rows: int) -> None:
    """`rows` rows of up to `slots` sequences near the end of a block, so that there is context to read: all of them in block 0
    of the pool, which is free."""
    used, start = min(slots, rows), _start(runner, -(-rows // slots))
    for slot in range(used):
        runner.states.reset(slot)
    segments = []
    for slot in range(used):
        count = rows // used + (slot < rows % used)
        before = (3,) * min(LOOK_BACK, start)
        outputs = range(start, start + count)
        segments.append(Segment(slot, start, [3] * count, before, (0,), window_floor=start, outputs=outputs))
    runner.model.logits(runner.model.forward(segments, runner.kv, runner.states))
    runner.wait()


def _draft(runner: Runner, sequences: int) -> None:
    """Behind the one row that each sequence has."""
    positions = [_start(runner, 1) + 1] * sequences
    runner.model.draft(range(sequences), [3] * sequences, positions, runner.states, lambda _, logits: logits.argmax(-1))
    runner.wait()


def _start(runner: Runner, rows: int) -> int:
    return max(0, runner.model.spec.block_tokens - rows)
