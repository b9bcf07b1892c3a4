"""Stories from authored plots with slots (`../plots/*.txt`).

A line is `title ~ text`. `{A}` and `{B}` are a hero and a friend with `{he} {him} {his} {himself}` and `{bhe} {bhim} {bhis}`;
`{pet} {thing} {food} {color} {place} {plant}` come from `words`; `[one|two]` is a choice. Known to the file only: how plots
read. Which slot values are held out is the split's business.
"""

from __future__ import annotations

import random
import re
from functools import lru_cache
from pathlib import Path

from .. import words
from ..sample import Sample, ask

FOLDER = Path(__file__).resolve().parent.parent / "plots"
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")

REQUESTS = (
    "Tell me a story about {title}.", "Write a short story about {title}.", "Can you tell me a story about {title}?",
    "Please write a story: {title}.", "A story about {title}, please.", "I would like to hear a story about {title}.",
    "Story time! Tell me about {title}.", "Make up a little story about {title}.",
)  # fmt: skip
OPEN_REQUESTS = (
    "Tell me a story.", "Write a short story.", "Tell me something nice before I go to sleep.", "I am bored. Tell me a story.",
    "Please tell me a short story.", "Can you write a story?", "Tell me a story with {name} in it.",
    "Write a story about {name}.", "Tell me a story about {name} and {friend}.", "I want a story with a {pet} in it.",
)  # fmt: skip
OPENINGS = ("", "", "", "Once upon a time, ", "One day, ", "Long ago, ", "This is a story about {title}. ")


@lru_cache
def plots() -> tuple[tuple[str, str], ...]:
    """(title, text) of every plot, in file order."""
    found = []
    for file in sorted(FOLDER.glob("*.txt")):
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
            if not line.strip():
                continue
            title, separator, text = line.partition(" ~ ")
            if not separator or not text.strip():
                raise ValueError(f"{file.name}:{number}: a plot is `title ~ text`, this line is {line[:60]!r}")
            found.append((title.strip(), text.strip()))
    return tuple(found)


def cast(rng: random.Random) -> dict[str, str]:
    """Values of all slots of one story."""
    slots: dict[str, str] = {}
    for person, prefix in (("A", ""), ("B", "b")):
        girl = rng.random() < 0.5
        name = rng.choice(words.GIRLS if girl else words.BOYS)
        while name == slots.get("A"):
            name = rng.choice(words.GIRLS if girl else words.BOYS)
        he, him, his = ("she", "her", "her") if girl else ("he", "him", "his")
        slots[person] = name
        for slot, value in {"he": he, "him": him, "his": his, "himself": "herself" if girl else "himself"}.items():
            slots[prefix + slot] = value
            slots[prefix.upper() + slot if prefix else slot.capitalize()] = value.capitalize()
    elder = rng.random() < 0.5
    slots |= {"bhe2": "she" if elder else "he", "bhim2": "her" if elder else "him", "it2": "it", "It2": "It"}
    slots |= {
        "pet": rng.choice(words.PETS),
        "thing": words.spoken(rng.choice(words.THINGS)),
        "food": rng.choice(words.FOODS),
        "color": rng.choice(words.COLORS),
        "place": rng.choice(words.PLACES),
        "plant": rng.choice(words.PLANTS),
        "job": rng.choice(words.JOBS),
        "day": rng.choice(words.DAYS),
    }
    return slots


def fill(template: str, slots: dict[str, str], rng: random.Random) -> str:
    """Choices are drawn, slots are put in, articles and sentence starts are made to fit."""
    while _CHOICE.search(template):
        template = _CHOICE.sub(lambda m: rng.choice(m.group(1).split("|")), template)
    text = _SLOT.sub(lambda m: slots[m.group(1)], template)
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    return re.sub(r"(^|[.!?] )([a-z])", lambda m: m.group(1) + m.group(2).upper(), text)


def tell(rng: random.Random) -> tuple[str, dict[str, str], str]:
    """(title, slots, story)."""
    title, text = rng.choice(plots())
    slots = cast(rng)
    slots["title"] = fill(title, slots, rng)
    slots["title"] = slots["title"][0].lower() + slots["title"][1:]
    opening = rng.choice(OPENINGS)
    if opening.endswith(", ") and not text.startswith(("{", "I ")):
        text = text[0].lower() + text[1:]
    return slots["title"], slots, fill(opening + text, slots, rng)


def identity(slots: dict[str, str]) -> str:
    """What decides the split: who and with what, not which wording."""
    return "|".join(slots[name] for name in ("A", "B", "thing", "pet"))


def document(rng: random.Random) -> Sample:
    """A story as plain text."""
    title, slots, story = tell(rng)
    head = f"{title[0].upper()}{title[1:]}\n\n" if rng.random() < 0.5 else ""
    return Sample("story", identity(slots), text=head + story)


def asked(rng: random.Random) -> Sample:
    """A story that a user asks for, by title or in general."""
    title, slots, story = tell(rng)
    if rng.random() < 0.7:
        request = rng.choice(REQUESTS).format(title=title)
    else:
        request = rng.choice(OPEN_REQUESTS).format(name=slots["A"], friend=slots["B"], pet=slots["pet"])
        if slots["A"] not in story or slots["B"] not in story or slots["pet"] not in story:
            request = rng.choice(OPEN_REQUESTS[:6])
    thinking = rng.random() < 0.5
    reasoning = f"The user wants a story. I will tell one about {title}." if thinking else ""
    return Sample(
        "story_chat", identity(slots), conversation=ask(request, thinking=thinking), reasoning=reasoning, answer=story
    )


KINDS = {"story": document, "story_chat": asked}
