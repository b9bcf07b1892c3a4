"""Everything that can be generated: `KINDS` maps a kind to a function of a random source.

A generator draws one `Sample`; `draw` asks again until the sample is on the wanted side of the held-out split. Equal seeds
give equal samples on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from ..sample import Sample
from . import chat, facts, numbers, pictures, recall, stories, structured, tools

Generator = Callable[[random.Random], Sample]

KINDS: dict[str, Generator] = {
    **stories.KINDS, **numbers.KINDS, **facts.KINDS, **chat.KINDS, **tools.KINDS, **structured.KINDS, **recall.KINDS,
    **pictures.KINDS,
}  # fmt: skip


def draw(kind: str, seed: str | int, number: int, *, held_out: bool = False) -> Sample:
    """Sample `number` of a kind, from training or from the held-out side."""
    if kind not in KINDS:
        raise ValueError(f"no generator {kind!r}; there are {', '.join(KINDS)}")
    rng = random.Random(f"{seed}/{kind}/{number}")
    for _ in range(1000):
        sample = KINDS[kind](rng)
        if sample.held_out == held_out:
            return sample
    raise RuntimeError(f"{kind}: 1000 samples were all {'training' if held_out else 'held-out'} ones; it has too few slots")
