"""Which kinds of data a stage sees, in which shares, and the one way to draw any of them.

A share counts tokens, not samples. Kinds whose corpus is not there leave their share to the others.
"""

from __future__ import annotations

import random

from . import corpora, generators
from .sample import Sample

# Everything, in general language first: the whole domain.
PRETRAIN = {
    "story": 14, "story_chat": 16, "books": 10, "code": 3, "wordnet": 4, "tldr": 3, "gsm8k": 3, "gym": 3,
    "add_subtract": 4, "three_digits": 4, "multiply": 1.5, "divide": 1, "compare": 1, "word_problem": 3, "units": 1.5,
    "dates": 1.5, "fractions": 1, "capital": 0.7, "element": 0.3, "table": 0.7, "why": 0.8, "small_talk": 1, "declined": 0.7,
    "system": 0.8, "remembered": 1, "lists": 0.7, "tool": 9, "tool_parallel": 2, "tool_none": 4, "tool_result": 3,
    "tool_second": 2, "json": 1.5, "json_list": 0.5, "needle": 5, "short_needle": 2, "repeat": 1, "spelling": 0.7,
    "who_has": 0.8, "picture": 2,
}  # fmt: skip
# What a user types: conversations, thinking, tools, recall.
ANNEAL = {
    "story_chat": 18, "books": 14, "wordnet": 3, "tldr": 3, "gsm8k": 4, "gym": 2,
    "add_subtract": 5, "three_digits": 8, "multiply": 2, "divide": 1, "compare": 1.5, "word_problem": 4, "units": 2, "dates": 2,
    "fractions": 1.5, "capital": 1, "element": 0.5, "table": 1, "why": 1.5, "small_talk": 3, "declined": 1.5, "system": 1,
    "remembered": 1.5, "lists": 1, "tool": 14, "tool_parallel": 4, "tool_none": 7, "tool_result": 4, "tool_second": 3,
    "json": 2, "json_list": 1, "repeat": 3, "spelling": 1, "picture": 9,
    "bindings": 20, "pairs": 13, "needle": 15, "short_needle": 8, "who_has": 13,  # a third: names are bound to things
}  # fmt: skip
# A model of a few million parameters that trains on a CPU: stories, small sums, simple calls, short talk.
NARROW = {
    "story": 8, "story_chat": 42, "add_subtract": 8, "three_digits": 6, "capital": 2, "table": 3, "why": 6, "small_talk": 6,
    "declined": 3, "system": 2, "remembered": 2, "repeat": 1, "who_has": 1, "tool_simple": 10,
}  # fmt: skip
MIXES = {"pretrain": PRETRAIN, "anneal": ANNEAL, "narrow": NARROW}


def all_kinds() -> list[str]:
    """Every generator and corpus."""
    return [*generators.KINDS, *corpora.KINDS]


def draw(kind: str, seed: str | int, number: int, *, held_out: bool = False) -> Sample:
    """Sample `number` of a kind. ValueError if there is no such kind or its corpus is missing."""
    if kind in generators.KINDS:
        return generators.draw(kind, seed, number, held_out=held_out)
    if kind not in corpora.KINDS:
        raise ValueError(f"no kind {kind!r}; there are {', '.join(all_kinds())}")
    sample = corpora.draw(kind, random.Random(f"{seed}/{kind}/{number}"), held_out=held_out)
    if sample is None:
        raise ValueError(f"corpus {kind!r} is not in {corpora.FOLDER}; `python -m models.training corpora` gathers it")
    return sample


def available(shares: dict[str, float]) -> dict[str, float]:
    """The shares of kinds that can be drawn here, adding up to 1."""
    there = {k: v for k, v in shares.items() if k in generators.KINDS or corpora.samples(k)}
    total = sum(there.values())
    return {kind: share / total for kind, share in there.items()}
