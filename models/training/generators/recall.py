"""Needles: a fact inside a long text, asked for at its end; and bindings: many facts, many questions. Shows whether far context
is really read, and whether a name leads to what was said of it.

The hay is made of stories and of other facts, often of the same form, so that a needle cannot be found by its shape alone.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.recipe import Conversation, Message

from .. import words
from ..sample import Sample, ask, held_out
from .stories import cast, tell


def _thing(rng: random.Random) -> str:
    return words.spoken(rng.choice(words.THINGS))


def _city(rng: random.Random) -> str:
    return rng.choice(words.CITIES)


def _password(rng: random.Random) -> str:
    return "".join(rng.choice(string.ascii_lowercase + string.digits) for _ in range(rng.randint(4, 8)))


Value = Callable[[random.Random], str]
_FORMS: tuple[tuple[str, str, str, Value], ...] = (  # a statement, the question about it, its answer, what is said
    ("The secret number of {k} is {v}.", "What is the secret number of {k}?", "The secret number of {k} is {v}.",
     lambda rng: str(rng.randint(100, 9999))),
    ("The code word of {k} is {v}.", "What is the code word of {k}?", "The code word of {k} is {v}.", _thing),
    ("{k} keeps the {v} in the cellar.", "What does {k} keep in the cellar?", "{k} keeps the {v} in the cellar.",
     lambda rng: f"{rng.choice(words.COLORS)} {_thing(rng)}"),
    ("{k} was born in {v}.", "Where was {k} born?", "{k} was born in {v}.", _city),
    ("The password for {k} is {v}.", "What is the password for {k}?", "The password for {k} is {v}.", _password),
    ("{k} lives in {v}.", "Where does {k} live?", "{k} lives in {v}.", _city),
    ("{k} likes {v}.", "What does {k} like?", "{k} likes {v}.", lambda rng: rng.choice(words.FOODS)),
    ("{k} bought the {v}.", "What did {k} buy?", "{k} bought the {v}.", _thing),
)  # fmt: skip


ALIKE = 0.5  # of needles lie among facts of their own form only


def needle(rng: random.Random, characters: int | None = None, alike: float = ALIKE) -> Sample:
    """A haystack of about `characters` (default: 3,000 to 7,000, which is 0.8 to 1.8 thousand tokens). alike: how often
    all facts have the form of the one that is asked for, so that its name alone says which it is."""
    characters = characters or rng.randint(3000, 7000)
    same = rng.randrange(len(_FORMS)) if alike and rng.random() < alike else None
    facts: dict[str, tuple[int, str]] = {}
    for name in rng.sample(words.GIRLS + words.BOYS, rng.randint(2, 6)):
        form = rng.randrange(len(_FORMS)) if same is None else same
        facts[name] = (form, _FORMS[form][3](rng))
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


_HAS = ("{k} has the {v}.", "The {v} belongs to {k}.", "{k} holds the {v}.")


def who_has(rng: random.Random) -> Sample:
    """Two to four people hold things; one is asked for."""
    people = rng.sample(words.GIRLS + words.BOYS, rng.randint(2, 4))
    things = [words.spoken(t) for t in rng.sample(words.THINGS, len(people))]
    held = list(zip(people, things, strict=True))
    told = " ".join(rng.choice(_HAS).format(k=p, v=t) for p, t in held)
    if rng.random() < 0.3:  # in one sentence
        verb = rng.choice((" has", " has", ""))  # "Ben has the kite and Anna the ball", or "and Anna has the ball"
        rest = [f"{p}{verb} the {t}" for p, t in held[1:]]
        told = f"{', '.join([f'{people[0]} has the {things[0]}', *rest[:-1]])} and {rest[-1]}."
    at = rng.randrange(len(people))
    if rng.random() < 0.5:
        question, answer, value = f"Who has the {things[at]}?", f"{people[at]} has the {things[at]}.", people[at]
    else:
        question, answer, value = f"What does {people[at]} have?", f"{people[at]} has the {things[at]}.", things[at]
    slots = cast(rng)
    start = f"{slots['A']} looks on. " if rng.random() < 0.2 else ""
    return Sample("who_has", f"{people[at]}|{things[at]}", conversation=ask(f"{start}{told} {question}"),
                  answer=answer, check={"text": value})  # fmt: skip


# ------------------------------------------------------------------ bindings

@dataclass(frozen=True, slots=True)
class Fact:
    """What was said of a name. form: of `_FORMS`, or the next number: somebody has a thing."""

    form: int
    name: str
    value: str

    def said(self, rng: random.Random) -> str:
        """The statement, in one of its wordings."""
        wording = _FORMS[self.form][0] if self.form < len(_FORMS) else rng.choice(_HAS)
        return wording.format(k=self.name, v=self.value)

    def asked(self, rng: random.Random) -> tuple[str, str, str]:
        """(question, answer, what the answer must hold)."""
        if self.form < len(_FORMS):
            _, question, answer, _ = _FORMS[self.form]
        elif rng.random() < 0.5:
            return f"Who has the {self.value}?", f"{self.name} has the {self.value}.", self.name
        else:
            question, answer = "What does {k} have?", _HAS[0]
        return question.format(k=self.name), answer.format(k=self.name, v=self.value), self.value


def _on_side(fact: Fact, side: bool) -> bool:
    """Whether a bound pair may be in training (no kind holds it out, whatever its form), or the kind of its form holds it
    out."""
    needle, has = (held_out(kind, f"{fact.name}|{fact.value}") for kind in ("needle", "who_has"))
    if side:
        return needle if fact.form < len(_FORMS) else has
    return not (needle or has)


def _facts(rng: random.Random, count: int, side: bool) -> list[Fact]:
    """Facts about so many names, of one to three forms; no two have the same value."""
    forms = rng.sample(range(len(_FORMS) + 1), rng.choice((1, 1, 2, 3)))
    found, values = [], set()
    for name in rng.sample(words.GIRLS + words.BOYS, count):
        form = rng.choice(forms)
        for _ in range(200):
            value = _thing(rng) if form == len(_FORMS) else _FORMS[form][3](rng)
            fact = Fact(form, name, value)
            if value not in values and _on_side(fact, side):
                values.add(value)
                found.append(fact)
                break
    return found


def _text(rng: random.Random, facts: Iterable[Fact], characters: int) -> str:
    """The facts in stories of about so many characters: scattered, or all of them before, or all in one place."""
    said = [fact.said(rng) for fact in facts]
    hay: list[str] = []
    while sum(map(len, hay)) < characters:
        hay.append(tell(rng)[2])
    shape = rng.randrange(3)
    if not hay or shape == 0:
        return "\n\n".join([rng.choice((" ", "\n")).join(said), *hay])
    if shape == 1:
        hay.insert(rng.randint(0, len(hay)), " ".join(said))
        return "\n\n".join(hay)
    for sentence in said:
        hay.insert(rng.randint(0, len(hay)), sentence)
    return "\n\n".join(hay)


def _size(rng: random.Random) -> tuple[int, int]:
    """(facts, characters of stories): half are short, so that binding is learnt where it is easy, the others far apart."""
    if rng.random() < 0.5:
        return rng.randint(2, 12), rng.choice((0, 0, rng.randint(0, 700)))
    return rng.randint(4, 24), rng.randint(700, 6000)


def bindings(rng: random.Random) -> Sample:
    """Several facts in a text, and three to fourteen questions about them, each a turn; all answers count."""
    count, characters = _size(rng)
    side = rng.random() < 0.1
    facts = _facts(rng, count, side)
    asked = rng.sample(facts, min(len(facts), rng.randint(3, 14)))
    messages: list[Message] = []
    text = _text(rng, facts, characters)
    for number, fact in enumerate(asked):
        question, answer, value = fact.asked(rng)
        if number == 0:
            form = ("{t}\n\n{q}", "{t} {q}", "Read this text.\n\n{t}\n\nNow answer: {q}", "{q}\n\n{t}\n\n{q}")
            question = rng.choice(form).format(t=text, q=question)
        messages += [Message("user", question), Message("assistant", answer)]
    slots = "|".join(f"{fact.name}|{fact.value}" for fact in asked)
    return Sample("bindings", slots, conversation=Conversation(messages[:-1], thinking_mode=False), answer=answer,
                  check={"text": value}, side=side, taught=True)  # fmt: skip


def pairs(rng: random.Random) -> Sample:
    """A document of facts that are said, and said again in another order: nearly every sentence has one thing to recall."""
    count, characters = _size(rng)
    side = rng.random() < 0.1
    facts = _facts(rng, min(40, count + rng.randint(0, 16)), side)
    again = [fact for _ in range(rng.randint(1, 2)) for fact in rng.sample(facts, len(facts))]
    shape = rng.randrange(3)
    if shape == 0:  # as short as can be
        sign, end = rng.choice(((": ", "\n"), (" - ", "\n"), (": ", ", "), (" = ", "; ")))
        parts = [end.join(f"{fact.name}{sign}{fact.value}" for fact in some) for some in (facts, again)]
        text = "\n\n".join(parts)
    else:
        told = _text(rng, facts, rng.choice((0, 0, min(characters, 1200))))  # far context is the business of `bindings`
        if shape == 1:
            behind = rng.choice((" ", "\n")).join(fact.said(rng) for fact in again)
        else:
            behind = "\n".join("{} {}".format(*fact.asked(rng)) for fact in again)
        text = f"{told}\n\n{behind}"
    return Sample("pairs", "|".join(f"{fact.name}|{fact.value}" for fact in facts), text=text, side=side)


KINDS = {
    "needle": needle, "short_needle": short_needle, "repeat": repeat, "spelling": spelled, "who_has": who_has,
    "bindings": bindings, "pairs": pairs,
}  # fmt: skip
