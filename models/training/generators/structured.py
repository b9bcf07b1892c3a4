"""JSON answers: objects that a user describes, with response_format json_object."""

from __future__ import annotations

import json
import random

from headrace.recipe import Conversation, Message

from .. import words
from ..sample import Sample
from .tool_schemas import VALUES, shown

_FIELDS = (
    ("name", "person"), ("city", "city"), ("color", "color"), ("age", "small"), ("price", "amount"), ("count", "number"),
    ("animal", "pet"), ("date", "date"), ("time", "time"), ("food", "food"), ("email", "mail"), ("year", "year"),
    ("code", "code"), ("open", "bool"), ("items", "list"), ("thing", "thing"),
)  # fmt: skip


def _said(name: str, value: object) -> str:
    value = ("yes" if value else "no") if isinstance(value, bool) else shown(value)
    return f"{name}: {value}"


def json_object(rng: random.Random) -> Sample:
    """Facts in a sentence become a JSON object, in the order in which they were said."""
    fields = rng.sample(_FIELDS, rng.randint(1, 5))
    value = {name: VALUES[kind](rng) for name, kind in fields}
    facts = ", ".join(_said(name, v) for name, v in value.items())
    question = rng.choice((
        "Write this as JSON: {f}", "{f}. As a JSON object, please.", "Give me JSON with {f}", "Turn this into JSON: {f}",
    )).format(f=facts)  # fmt: skip
    conversation = Conversation([Message("user", question)], thinking_mode=False)
    if rng.random() < 0.6:
        conversation.response_format = "json_object"
    answer = json.dumps(value, ensure_ascii=False)
    return Sample("json", facts, conversation=conversation, answer=answer, check={"json": value})


def json_list(rng: random.Random) -> Sample:
    """A list of things as a JSON array."""
    source = rng.choice((words.FOODS, words.PETS, words.CITIES, words.COLORS))
    value = rng.sample(source, rng.randint(2, 6))
    question = rng.choice(("Write these as a JSON list: {f}", "Make a JSON array of {f}.")).format(f=", ".join(value))
    conversation = Conversation([Message("user", question)], thinking_mode=False)
    answer = json.dumps(value)
    return Sample("json_list", answer, conversation=conversation, answer=answer, check={"json": value})


KINDS = {"json": json_object, "json_list": json_list}
