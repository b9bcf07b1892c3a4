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

# Kinds whose questions people also type without capitals or a sign at the end, and how often they do here.
TYPED = ("small_talk", "declined", "why", "capital", "element", "table", "story_chat", "add_subtract", "who_has")
IN_HASTE = 0.15


def draw(kind: str, seed: str | int, number: int, *, held_out: bool = False) -> Sample:
    """Sample `number` of a kind, from training or from the held-out side."""
    if kind not in KINDS:
        raise ValueError(f"no generator {kind!r}; there are {', '.join(KINDS)}")
    rng = random.Random(f"{seed}/{kind}/{number}")
    for _ in range(1000):
        sample = KINDS[kind](rng)
        if sample.held_out == held_out:
            return in_haste(sample, rng) if kind in TYPED and rng.random() < IN_HASTE else sample
    raise RuntimeError(f"{kind}: 1000 samples were all {'training' if held_out else 'held-out'} ones; it has too few slots")


def in_haste(sample: Sample, rng: random.Random) -> Sample:
    """The sample with its last question in small letters and, now and then, without a sign at its end; the answer stays."""
    question = sample.conversation.messages[-1]
    typed = question.content.lower()
    question.content = typed.rstrip("?.!") if rng.random() < 0.5 else typed
    return sample
