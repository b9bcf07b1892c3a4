"""Temperatures of the confidence head from what was served: how often drafts stood, by position and by what a logit promised.

Only a draft whose predecessors all stood says something of its own position, whoever chose that it be verified: given its
logit, that choice does not hang on whether it stands. So counts by logit are all that is kept, and a temperature is the one
that makes them likeliest. Pure Python; knows neither sequences nor policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

WIDTH, MOST = 0.25, 8.0  # of a bin of logits; logits beyond +-MOST are in the last ones
BINS = int(2 * MOST / WIDTH)
COLDEST, HOTTEST = 0.25, 8.0  # temperatures that are looked at
LEAST = 200  # drafts of a position that a temperature is made from; with fewer it is that of the position before
LOOKS = 30  # of the search: each leaves two thirds of what is left


class Calibration:
    """Counts of one draft's positions."""

    def __init__(self, block: int) -> None:
        self.seen = [[0] * BINS for _ in range(block)]
        self.stood = [[0] * BINS for _ in range(block)]

    def observe(self, logits: Sequence[float], verified: int, accepted: int) -> None:
        """A block of which `verified` drafts were looked at and the first `accepted` stood."""
        for place in range(min(accepted + 1, verified)):
            at = min(max(int((logits[place] + MOST) / WIDTH), 0), BINS - 1)
            self.seen[place][at] += 1
            self.stood[place][at] += place < accepted

    def temperatures(self) -> list[float]:
        """One a position, for a file that `EngineConfig.draft_calibration` names."""
        out: list[float] = []
        for seen, stood in zip(self.seen, self.stood, strict=True):
            out.append(_fit(seen, stood) if sum(seen) >= LEAST else out[-1] if out else 1.0)
        return out


def _fit(seen: Sequence[int], stood: Sequence[int]) -> float:
    """The log loss is convex in 1 / temperature: a search by thirds finds its lowest point."""
    bins = [((at + 0.5) * WIDTH - MOST, n, k) for at, (n, k) in enumerate(zip(seen, stood, strict=True)) if n]
    low, high = 1 / HOTTEST, 1 / COLDEST
    for _ in range(LOOKS):
        third = (high - low) / 3
        if _loss(bins, low + third) < _loss(bins, high - third):
            high -= third
        else:
            low += third
    return round(2 / (low + high), 4)


def _loss(bins: Sequence[tuple[float, int, int]], scale: float) -> float:
    """Nats of `k` of `n` drafts that stood, at probability sigmoid(scale * z)."""
    return sum(n * math.log1p(math.exp(scale * z)) - k * scale * z for z, n, k in bins)
