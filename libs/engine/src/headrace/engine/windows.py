"""A sequence's next decode row and the drafts behind it, as rows of a step: how many may be verified, and where they lie.

The scheduler asks where it knows the position; where a step is planned ahead, `ahead.py` asks once the step before has told
it. Pure Python, and reads nothing of a sequence that changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .sequence import Row, Sample

LOOK_BACK = 3  # ids before a segment that a model may ask for (n-gram memory)


@dataclass(frozen=True, slots=True)
class Windows:
    """`block`: tokens of a block. `snapshots`: an output's state is packed at each boundary of blocks."""

    block: int
    snapshots: bool

    def most(self, first: int, blocks: int, max_len: int) -> int:
        """Drafts that may be verified, the first of them for position `first`: a token must be left to come behind them, their
        rows need memory (`blocks`), and none crosses the boundary where a snapshot is taken."""
        most = min(max_len - first - 1, blocks * self.block - first)
        return max(0, min(most, -first % self.block) if self.snapshots else most)

    def place(self, row: Row, sample: Sample, drafts: Sequence[int] = ()) -> None:
        """The row of the token before `sample.position` (the first and only id of its segment), and `drafts` behind it."""
        segment, first = row.segment, sample.position
        stop = first + len(drafts)
        segment.start, segment.ids, segment.outputs = first - 1, [segment.ids[0], *drafts], range(first - 1, stop)
        row.drafts, sample.drafts = len(drafts), list(drafts)
        row.pack = row.snapshot = self.snapshots and stop % self.block == 0
