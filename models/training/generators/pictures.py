"""Drawn pictures with questions: coloured shapes and digits on a plain ground, what is where, how many, which colour.

Every picture is SIZE x SIZE pixels, so no resizing happens on its way to the encoder; it is drawn from the same description
that the questions are asked about. Known here: drawing and asking; not known: patches, except how long a span is.
"""

from __future__ import annotations

import base64
import io
import random
from dataclasses import dataclass

from headrace.recipe import V41_TOKENS, Conversation, ImageSource, Message

from ..sample import Sample

SIZE = 126  # pixels a side: 9 x 9 patches of 14, 3 x 3 cells
SPAN = 3 * (3 + 1) + 2  # tokens of such an image

COLOURS = {
    "red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220), "yellow": (240, 210, 50), "orange": (245, 140, 40),
    "purple": (140, 60, 180), "black": (20, 20, 20), "brown": (130, 80, 40),
}  # fmt: skip
GROUNDS = ((255, 255, 255), (235, 235, 235), (210, 225, 240), (240, 235, 215))
SHAPES = ("circle", "square", "triangle", "cross", "diamond", "ring")
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "middle", "right")


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape or a digit in one of nine places."""

    what: str
    colour: str
    row: int
    column: int

    @property
    def place(self) -> str:
        row, column = ROWS[self.row], COLUMNS[self.column]
        if row == column == "middle":
            return "in the middle"
        if row == "middle":
            return f"on the {column}"
        return f"at the {row}" if column == "middle" else f"at the {row} {column}"

    @property
    def name(self) -> str:
        return f"digit {self.what}" if self.what.isdigit() else self.what


def scene(rng: random.Random) -> list[Thing]:
    """One to three things in different places, of different kinds and colours."""
    count = rng.choice((1, 1, 2, 2, 3))
    cells = rng.sample([(r, c) for r in range(3) for c in range(3)], count)
    kinds = rng.sample([*SHAPES, *(str(d) for d in range(10) if rng.random() < 0.4)], count)
    colours = rng.sample(list(COLOURS), count)
    return [Thing(kind, colour, *cell) for kind, colour, cell in zip(kinds, colours, cells, strict=True)]


def drawn(things: list[Thing], rng: random.Random) -> bytes:
    """PNG bytes."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (SIZE, SIZE), rng.choice(GROUNDS))
    pen = ImageDraw.Draw(image)
    for thing in things:
        half = rng.randint(13, 18)
        x, y = (SIZE // 6 * (2 * at + 1) + rng.randint(-2, 2) for at in (thing.column, thing.row))
        box, fill = (x - half, y - half, x + half, y + half), COLOURS[thing.colour]
        if thing.what == "circle":
            pen.ellipse(box, fill=fill)
        elif thing.what == "ring":
            pen.ellipse(box, outline=fill, width=6)
        elif thing.what == "square":
            pen.rectangle(box, fill=fill)
        elif thing.what == "triangle":
            pen.polygon([(x, y - half), (x - half, y + half), (x + half, y + half)], fill=fill)
        elif thing.what == "diamond":
            pen.polygon([(x, y - half), (x + half, y), (x, y + half), (x - half, y)], fill=fill)
        elif thing.what == "cross":
            pen.rectangle((x - half, y - 5, x + half, y + 5), fill=fill)
            pen.rectangle((x - 5, y - half, x + 5, y + half), fill=fill)
        else:
            pen.text((x, y), thing.what, fill=fill, anchor="mm", font=ImageFont.load_default(2 * half))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def described(things: list[Thing]) -> str:
    """All of a scene in a sentence, from top left on."""
    parts = [f"{_article(f'{t.colour} {t.name}')} {t.place}" for t in sorted(things, key=lambda t: (t.row, t.column))]
    text = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + f" and {parts[-1]}"
    return f"There is {text}."


def picture(rng: random.Random) -> Sample:
    """A picture and one question about it."""
    things = scene(rng)
    data = drawn(things, rng)
    one = rng.choice(things)
    shape = rng.randrange(5)
    if shape == 0 and not one.what.isdigit():
        question, value = f"What color is the {one.what}?", one.colour
        answer = f"The {one.what} is {one.colour}."
    elif shape == 1:
        question, value = f"Where is the {one.name}?", one.place
        answer = f"The {one.name} is {one.place}."
    elif shape == 2:
        question, value = f"What is {one.place}?", f"{one.colour} {one.name}"
        answer = f"There is {_article(f'{one.colour} {one.name}')}."
    elif shape == 3:
        number = ("one", "two", "three")[len(things) - 1]
        question, value = "How many things are in the picture?", number
        answer = f"There {'is' if number == 'one' else 'are'} {number}."
    else:
        question = rng.choice(("What is in the picture?", "Describe this image.", "What do you see?"))
        value = answer = described(things)
    thinking = rng.random() < 0.5
    seen = "I name what I see, from the top." if shape == 4 else described(things)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    message = Message(
        "user", V41_TOKENS.image + "\n\n" + question, image_sources=[ImageSource("data_url", url)], image_token=V41_TOKENS.image
    )
    slots = "|".join(f"{t.what}{t.colour}{t.row}{t.column}" for t in things)
    return Sample(
        "picture", slots, conversation=Conversation([message], thinking_mode=thinking), reasoning=seen if thinking else "",
        answer=answer, check={"text": value}, pictures=[data], span=SPAN,
    )  # fmt: skip


KINDS = {"picture": picture}
