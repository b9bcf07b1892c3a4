"""Needles: a fact inside a long text, asked for at its end. Shows whether far context is really read.

The hay is made of stories and of other facts of the same form, so that the needle cannot be found by its shape alone.
"""

from __future__ import annotations

import random
import string

from .. import words
from ..sample import Sample, ask
from .stories import cast, tell

_FORMS = (
    ("The secret number of {k} is {v}.", "What is the secret number of {k}?", "The secret number of {k} is {v}."),
    ("The code word of {k} is {v}.", "What is the code word of {k}?", "The code word of {k} is {v}."),
    ("{k} keeps the {v} in the cellar.", "What does {k} keep in the cellar?", "{k} keeps the {v} in the cellar."),
    ("{k} was born in {v}.", "Where was {k} born?", "{k} was born in {v}."),
    ("The password for {k} is {v}.", "What is the password for {k}?", "The password for {k} is {v}."),
)  # fmt: skip


def _value(form: int, rng: random.Random) -> str:
    if form == 0:
        return str(rng.randint(100, 9999))
    if form == 1:
        return words.spoken(rng.choice(words.THINGS))
    if form == 2:
        return f"{rng.choice(words.COLORS)} {words.spoken(rng.choice(words.THINGS))}"
    if form == 3:
        return rng.choice(words.CITIES)
    return "".join(rng.choice(string.ascii_lowercase + string.digits) for _ in range(rng.randint(4, 8)))


def needle(rng: random.Random, characters: int | None = None) -> Sample:
    """A haystack of about `characters` (default: 3,000 to 12,000, which is 1 to 4 thousand tokens)."""
    characters = characters or rng.randint(3000, 12000)
    facts: dict[str, tuple[int, str]] = {}
    for name in rng.sample(words.GIRLS + words.BOYS, rng.randint(2, 6)):
        form = rng.randrange(len(_FORMS))
        facts[name] = (form, _value(form, rng))
    pieces: list[str] = []
    while sum(map(len, pieces)) < characters:
        story = tell(rng)[2]
        pieces.append(story)
    name = rng.choice(list(facts))
    for other, (form, value) in facts.items():
        # The one that is asked for lies far from the end, others anywhere.
        last = int(len(pieces) * 0.7) if other == name else len(pieces)
        pieces.insert(rng.randint(0, max(0, last)), _FORMS[form][0].format(k=other, v=value))
    form, value = facts[name]
    question = _FORMS[form][1].format(k=name)
    text = "\n\n".join(pieces)
    prompt = rng.choice(("{t}\n\n{q}", "Read this text.\n\n{t}\n\nNow answer: {q}", "{q}\n\n{t}\n\n{q}")).format(
        t=text, q=question
    )
    return Sample("needle", f"{name}|{value}", conversation=ask(prompt), answer=_FORMS[form][2].format(k=name, v=value),
                  check={"text": value})  # fmt: skip


def short_needle(rng: random.Random) -> Sample:
    """The same within a few hundred tokens."""
    return needle(rng, rng.randint(200, 1500))


def repeat(rng: random.Random) -> Sample:
    """Copy: random strings, numbers or lists come back exactly."""
    shape = rng.randrange(3)
    if shape == 0:
        value = "".join(rng.choice(string.ascii_letters + string.digits) for _ in range(rng.randint(3, 16)))
    elif shape == 1:
        value = " ".join(rng.choice(words.THINGS + words.FOODS + words.CITIES) for _ in range(rng.randint(2, 8)))
        value = words.spoken(value)
    else:
        value = str(rng.randrange(10 ** rng.randint(2, 12)))
    question = rng.choice(("Repeat: {v}", "Say exactly this: {v}", "Copy this text: {v}", 'Please repeat "{v}".')).format(
        v=value
    )
    return Sample("repeat", value, conversation=ask(question, thinking=False), answer=value, check={"text": value})


def spelled(rng: random.Random) -> Sample:
    """Letters of a word, its length, its first or last letter, backwards."""
    word = rng.choice(words.FOODS + words.PETS + words.JOBS + [c.lower() for c in words.CITIES])
    letters = list(word)
    shape = rng.randrange(4)
    spelling = "-".join(letters)
    question, answer = (
        (f"How do you spell {word}?", spelling),
        (f"How many letters does the word {word} have?", f"The word {word} has {len(word)} letters."),
        (f"What is the first letter of {word}?", f"The first letter of {word} is {word[0]}."),
        (f"Write {word} backwards.", word[::-1]),
    )[shape]
    reasoning = {1: f"{spelling}: that are {len(word)}.", 2: spelling, 3: f"{spelling}, backwards {'-'.join(letters[::-1])}."}
    thinking = shape in reasoning
    return Sample("spelling", f"{word}|{shape}", conversation=ask(question, thinking=thinking),
                  reasoning=reasoning.get(shape, ""), answer=answer, check={"text": answer})  # fmt: skip


def who_has(rng: random.Random) -> Sample:
    """Two or three people hold things; one is asked for."""
    people = rng.sample(words.GIRLS + words.BOYS, rng.randint(2, 4))
    things = [words.spoken(t) for t in rng.sample(words.THINGS, len(people))]
    facts = [rng.choice(("{p} has the {t}.", "The {t} belongs to {p}.", "{p} holds the {t}.")).format(p=p, t=t)
             for p, t in zip(people, things, strict=True)]  # fmt: skip
    at = rng.randrange(len(people))
    if rng.random() < 0.5:
        question, answer, value = f"Who has the {things[at]}?", f"{people[at]} has the {things[at]}.", people[at]
    else:
        question, answer, value = f"What does {people[at]} have?", f"{people[at]} has the {things[at]}.", things[at]
    slots = cast(rng)
    start = f"{slots['A']} looks on. " if rng.random() < 0.2 else ""
    return Sample("who_has", f"{people[at]}|{things[at]}", conversation=ask(f"{start}{' '.join(facts)} {question}"),
                  answer=answer, check={"text": value})  # fmt: skip


KINDS = {"needle": needle, "short_needle": short_needle, "repeat": repeat, "spelling": spelled, "who_has": who_has}
