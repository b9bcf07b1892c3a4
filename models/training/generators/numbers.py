"""Arithmetic with reasoning, word problems, units and dates. Every answer is computed, none is written down.

Digits are single tokens, so column arithmetic can be spelled out: the reasoning works from the ones upwards, which is the
order in which carries are known.
"""

from __future__ import annotations

import random
from fractions import Fraction

from .. import words
from ..sample import Sample, ask

_COLUMNS = ("ones", "tens", "hundreds", "thousands")

ASK = (
    "What is {x}?", "Calculate {x}.", "{x} = ?", "How much is {x}?", "Compute {x}.", "{x}", "Please calculate {x}.",
    "Can you tell me what {x} is?", "Solve {x}.",
)  # fmt: skip
ANSWER = ("{x} = {y}.", "The answer is {y}.", "{y}", "{x} is {y}.")


def add_steps(a: int, b: int) -> str:
    """Column addition, ones first: `7+8=15 write 5 carry 1.`"""
    lines, carry, x, y = [], 0, str(a)[::-1], str(b)[::-1]
    for column in range(max(len(x), len(y))):
        p, q = (int(d[column]) if column < len(d) else 0 for d in (x, y))
        total = p + q + carry
        carried = f"+{carry}" if carry else ""
        lines.append(f"{_COLUMNS[column]}: {p}+{q}{carried}={total}, write {total % 10}, carry {total // 10}.")
        carry = total // 10
    return "\n".join(lines) + f"\nSo {a}+{b}={a + b}."


def subtract_steps(a: int, b: int) -> str:
    """Column subtraction of b <= a, ones first; a larger b is swapped and the sign said."""
    if b > a:
        return f"{b} is larger, so the result is negative.\n{subtract_steps(b, a)}\nSo {a}-{b}={a - b}."
    lines, borrow, x, y = [], 0, str(a)[::-1], str(b)[::-1]
    for column in range(len(x)):
        p, q = int(x[column]), int(y[column]) if column < len(y) else 0
        value = p - q - borrow
        took = f"-{borrow}" if borrow else ""
        if value < 0:
            lines.append(f"{_COLUMNS[column]}: 1{p}-{q}{took}={value + 10}, write {value + 10}, borrow 1.")
        else:
            lines.append(f"{_COLUMNS[column]}: {p}-{q}{took}={value}, write {value}, borrow 0.")
        borrow = int(value < 0)
    return "\n".join(lines) + f"\nSo {a}-{b}={a - b}."


def multiply_steps(a: int, b: int) -> str:
    """Partial products of the second number's digits."""
    parts = [(int(d) * 10**i) for i, d in enumerate(reversed(str(b))) if d != "0"]
    lines = [f"{a}*{part}={a * part}." for part in parts]
    total = 0
    for part in parts:
        if total:
            lines.append(f"{total}+{a * part}={total + a * part}.")
        total += a * part
    return "\n".join(lines) + f"\nSo {a}*{b}={a * b}."


def _arithmetic(kind: str, a: int, b: int, sign: str, value: int, steps: str, rng: random.Random) -> Sample:
    gap = rng.choice(("", " "))
    shown = sign if sign != "*" else rng.choice(("*", "x", "times")) if gap else "*"
    words_of = {"+": "plus", "-": "minus"}.get(sign)
    if gap and words_of and rng.random() < 0.15:
        shown = words_of
    expression = f"{a}{gap}{shown}{gap}{b}"
    question = rng.choice(ASK).format(x=expression)
    answer = rng.choice(ANSWER).format(x=f"{a} {sign} {b}", y=value)
    conversation = ask(question, thinking=rng.random() < 0.85)
    reasoning = steps if conversation.thinking_mode else ""
    check = {"number": value}
    return Sample(kind, f"{a}{sign}{b}", conversation=conversation, reasoning=reasoning, answer=answer, check=check)


def _digits(rng: random.Random, most: int) -> int:
    return rng.randrange(10 ** rng.randint(1, most))


def add_subtract(rng: random.Random) -> Sample:
    """Up to three digits."""
    a, b = _digits(rng, 3), _digits(rng, 3)
    if rng.random() < 0.5:
        return _arithmetic("arithmetic", a, b, "+", a + b, add_steps(a, b), rng)
    a, b = (max(a, b), min(a, b)) if rng.random() < 0.85 else (a, b)
    return _arithmetic("arithmetic", a, b, "-", a - b, subtract_steps(a, b), rng)


def three_digits(rng: random.Random) -> Sample:
    """Three digits on both sides, with thinking: what the evaluation measures."""
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    if rng.random() < 0.5:
        sample = _arithmetic("arithmetic", a, b, "+", a + b, add_steps(a, b), rng)
    else:
        a, b = max(a, b), min(a, b)
        sample = _arithmetic("arithmetic", a, b, "-", a - b, subtract_steps(a, b), rng)
    sample.conversation.thinking_mode = True
    sample.reasoning = sample.reasoning or (add_steps if sample.slots == f"{a}+{b}" else subtract_steps)(a, b)
    return sample


def multiply(rng: random.Random) -> Sample:
    """Up to three digits times up to two; small tables often."""
    a, b = (rng.randint(2, 12), rng.randint(2, 12)) if rng.random() < 0.5 else (_digits(rng, 3) + 1, _digits(rng, 2) + 1)
    return _arithmetic("multiply", a, b, "*", a * b, multiply_steps(a, b), rng)


def divide(rng: random.Random) -> Sample:
    """Division with a remainder."""
    b, q = rng.randint(2, 12), rng.randint(1, 40)
    r = rng.randrange(b) if rng.random() < 0.5 else 0
    a = b * q + r
    reasoning = f"{b}*{q}={b * q}.\n{a}-{b * q}={r}."
    answer = f"{a} / {b} = {q}" + (f" with a remainder of {r}." if r else ".")
    question = rng.choice(("What is {a} divided by {b}?", "{a} / {b} = ?", "Divide {a} by {b}.")).format(a=a, b=b)
    return Sample("divide", f"{a}/{b}", conversation=ask(question, thinking=True), reasoning=reasoning, answer=answer,
                  check={"number": q})  # fmt: skip


def compare(rng: random.Random) -> Sample:
    """Which number is larger, order a few numbers, even or odd."""
    a, b = rng.randrange(1000), rng.randrange(1000)
    shape = rng.randrange(3)
    if shape == 0:
        while a == b:
            b = rng.randrange(1000)
        question = rng.choice(("Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?")).format(a=a, b=b)
        big, small = max(a, b), min(a, b)
        n, m = len(str(big)), len(str(small))
        if n != m:
            reasoning = f"{big} has {n} digits, {small} has {m}. So {big} is larger."
        else:
            at = next(i for i in range(n) if str(big)[i] != str(small)[i])
            reasoning = f"Digit {at + 1}: {str(big)[at]} > {str(small)[at]}. So {big} is larger."
        return Sample("compare", f"{a}|{b}", conversation=ask(question, thinking=True), reasoning=reasoning,
                      answer=f"{big} is larger than {small}.", check={"number": big})  # fmt: skip
    if shape == 1:
        kind = "even" if a % 2 == 0 else "odd"
        reasoning = f"The last digit of {a} is {a % 10}. {a % 10} is {kind}."
        question = rng.choice((f"Is {a} even or odd?", f"Is {a} an even number?"))
        lead = "" if "or" in question else ("Yes, " if kind == "even" else "No, ")
        return Sample("compare", f"parity{a}", conversation=ask(question, thinking=True), reasoning=reasoning,
                      answer=f"{lead}{a} is {kind}.", check={"word": kind})  # fmt: skip
    values = rng.sample(range(100), rng.randint(3, 5))
    up = rng.random() < 0.6
    result = sorted(values, reverse=not up)
    way = "smallest to largest" if up else "largest to smallest"
    question = f"Sort these numbers from {way}: {', '.join(map(str, values))}"
    return Sample("compare", "|".join(map(str, values)), conversation=ask(question), answer=", ".join(map(str, result)),
                  check={"text": ", ".join(map(str, result))})  # fmt: skip


# ------------------------------------------------------------------ word problems

_PROBLEMS = (
    ("{A} has {a} {things}. {B} gives {him} {b} more. How many {things} does {A} have now?", "+"),
    ("There are {a} {things} in one box and {b} {things} in another. How many {things} are there in all?", "+"),
    ("On {day} {A} sold {a} {things}, and the next day {b}. How many {things} did {he} sell altogether?", "+"),
    ("A shelf holds {a} {things}. {A} adds {b}. How many {things} are on the shelf?", "+"),
    ("{A} read {a} pages on {day} and {b} pages on the day after. How many pages did {he} read?", "+"),
    ("A train has {a} passengers. At the next station {b} get on. How many passengers are there now?", "+"),
    ("{A} had {a} {things} and gave {b} to {B}. How many {things} are left?", "-"),
    ("There were {a} {things} on the table. {A} took {b} away. How many {things} remain?", "-"),
    ("{A} wants to collect {a} {things} and already has {b}. How many {things} does {he} still need?", "-"),
    ("A baker made {a} rolls and sold {b}. How many rolls were not sold?", "-"),
    ("{A} is {a} kilometres from home and walks {b} kilometres towards it. How many kilometres are left?", "-"),
    ("{A} has {a} {things}, {B} has {b}. How many more {things} does {A} have than {B}?", "-"),
    ("One ticket costs {b} coins. How many coins do {a} tickets cost?", "*"),
    ("{A} packs {a} boxes with {b} {things} each. How many {things} are that?", "*"),
    ("A book has {a} chapters of {b} pages each. How many pages does the book have?", "*"),
    ("{A} walks {b} kilometres every day. How many kilometres are that in {a} days?", "*"),
    ("In {place} there are {a} houses with {b} windows each. How many windows are there?", "*"),
    ("{A} shares {a} {things} equally among {b} children. How many {things} does each child get?", "/"),
    ("{a} {things} are put into bags of {b}. How many bags are filled?", "/"),
    ("A rope of {a} metres is cut into {b} equal pieces. How many metres long is each piece?", "/"),
)  # fmt: skip


def word_problem(rng: random.Random) -> Sample:
    """One or two operations in a small situation."""
    from .stories import cast

    template, sign = rng.choice(_PROBLEMS)
    slots = cast(rng) | {"things": rng.choice(words.UNITS_OF_COUNT), "day": rng.choice(words.DAYS)}
    a, b = rng.randint(2, 99), rng.randint(2, 60)
    if sign == "-":
        a, b = max(a, b) + 1, min(a, b)
    elif sign == "*":
        a, b = rng.randint(2, 12), rng.randint(2, 20)
    elif sign == "/":
        b = rng.randint(2, 10)
        a = b * rng.randint(2, 20)
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
    question = template.format(a=a, b=b, **slots)
    reasoning, unit = f"{a}{sign}{b}={value}.", slots["things"] if "{things}" in template else ""
    if sign in "+-" and rng.random() < 0.25:
        c = rng.randint(2, 30)
        question = question[: question.rindex(".") + 1] + f" Then {c} more come." + question[question.rindex(".") + 1 :]
        reasoning, value = f"{reasoning} {value}+{c}={value + c}.", value + c
    answer = rng.choice(("The answer is {v}{u}.", "{v}{u}.", "It is {v}{u}.")).format(v=value, u=f" {unit}" if unit else "")
    return Sample("word_problem", f"{template[:12]}|{a}|{b}", conversation=ask(question, thinking=True), reasoning=reasoning,
                  answer=answer, check={"number": value})  # fmt: skip


# ------------------------------------------------------------------ units, time, dates

_UNITS = (
    ("kilometre", "metre", 1000), ("metre", "centimetre", 100), ("centimetre", "millimetre", 10), ("kilogram", "gram", 1000),
    ("tonne", "kilogram", 1000), ("litre", "millilitre", 1000), ("hour", "minute", 60), ("minute", "second", 60),
    ("day", "hour", 24), ("week", "day", 7), ("year", "month", 12), ("dozen", "piece", 12), ("euro", "cent", 100),
    ("dollar", "cent", 100), ("foot", "inch", 12), ("yard", "foot", 3), ("pound", "ounce", 16),
)  # fmt: skip
_PLURAL = {"foot": "feet", "inch": "inches", "century": "centuries", "dozen": "dozen"}


def _many(value: int | str, unit: str) -> str:
    return f"{value} {unit if str(value) == '1' else _PLURAL.get(unit, unit + 's')}"


def units(rng: random.Random) -> Sample:
    """From a large unit to a small one, or back where it divides."""
    large, small, factor = rng.choice(_UNITS)
    n = rng.randint(1, 40)
    if rng.random() < 0.6:
        question = rng.choice(
            ("How many {s} are {n}?", "Convert {n} to {s}.", "What is {n} in {s}?", "How many {s} are there in {n}?")
        ).format(s=_PLURAL.get(small, small + "s"), n=_many(n, large))
        value, reasoning = n * factor, f"1 {large} is {_many(factor, small)}. {n}*{factor}={n * factor}."
        answer = f"{_many(n, large)} {'is' if n == 1 else 'are'} {_many(value, small)}."
    else:
        question = f"How many {_PLURAL.get(large, large + 's')} are {_many(n * factor, small)}?"
        value, reasoning = n, f"{_many(factor, small)} are 1 {large}. {n * factor}/{factor}={n}."
        answer = f"{_many(n * factor, small)} are {_many(n, large)}."
    return Sample("units", f"{large}|{small}|{n}", conversation=ask(question, thinking=True), reasoning=reasoning,
                  answer=answer, check={"number": value})  # fmt: skip


def dates(rng: random.Random) -> Sample:
    """Days of the week, months, clock times."""
    shape = rng.randrange(4)
    if shape == 0:
        day, n = rng.randrange(7), rng.randint(1, 20)
        question = f"Today is {words.DAYS[day]}. Which day is it in {_many(n, 'day')}?"
        rest = n % 7
        walk = ", ".join(words.DAYS[(day + i) % 7] for i in range(rest + 1))
        reasoning = (f"{n} days are {n // 7} weeks and {rest} days. " if n >= 7 else "") + f"Counting on: {walk}."
        value = words.DAYS[(day + n) % 7]
        return Sample("dates", f"{day}|{n}", conversation=ask(question, thinking=True), reasoning=reasoning,
                      answer=f"In {_many(n, 'day')} it is {value}.", check={"word": value})  # fmt: skip
    if shape == 1:
        month = rng.randrange(12)
        days = words.MONTH_DAYS[month]
        extra = " (29 in a leap year)" if month == 1 else ""
        question = rng.choice(("How many days does {m} have?", "How many days are there in {m}?")).format(m=words.MONTHS[month])
        return Sample("dates", f"days{month}{question[:12]}", conversation=ask(question, thinking=rng.random() < 0.3),
                      answer=f"{words.MONTHS[month]} has {days} days{extra}.", check={"number": days})  # fmt: skip
    if shape == 2:
        month, step = rng.randrange(12), rng.choice((1, -1))
        question = f"Which month comes {'after' if step > 0 else 'before'} {words.MONTHS[month]}?"
        value = words.MONTHS[(month + step) % 12]
        return Sample("dates", f"month{month}{step}", conversation=ask(question),
                      answer=f"{value} comes {'after' if step > 0 else 'before'} {words.MONTHS[month]}.",
                      check={"word": value})  # fmt: skip
    hour, minute, plus = rng.randrange(24), rng.randrange(0, 60, 5), rng.randrange(5, 180, 5)
    total = hour * 60 + minute + plus
    value = f"{total // 60 % 24}:{total % 60:02}"
    question = f"It is {hour}:{minute:02}. What time is it in {plus} minutes?"
    steps = [f"{minute}+{plus}={minute + plus}"]
    if minute + plus >= 60:
        steps.append(f"{minute + plus} minutes are {_many((minute + plus) // 60, 'hour')} and {total % 60} minutes")
        over = f", minus 24 is {total // 60 % 24}" if total >= 24 * 60 else ""
        steps.append(f"{hour}+{(minute + plus) // 60}={total // 60}{over}")
    return Sample("dates", f"{hour}:{minute}+{plus}", conversation=ask(question, thinking=True),
                  reasoning=". ".join(steps) + ".", answer=f"It will be {value}.", check={"word": value})  # fmt: skip


def fractions(rng: random.Random) -> Sample:
    """Parts and percentages of whole numbers."""
    if rng.random() < 0.5:
        part = Fraction(rng.randint(1, 4), rng.randint(2, 5))
        part = part if 0 < part < 1 else Fraction(1, 2)
        whole = part.denominator * rng.randint(1, 20)
        value = int(part * whole)
        question = f"What is {part.numerator}/{part.denominator} of {whole}?"
        each = whole // part.denominator
        reasoning = f"{whole}/{part.denominator}={each}. {each}*{part.numerator}={value}."
        slots = f"{part}|{whole}"
    else:
        percent, whole = rng.choice((5, 10, 20, 25, 50, 75)), rng.randint(1, 40) * 20
        value = percent * whole // 100
        question = f"What is {percent}% of {whole}?"
        reasoning = f"{percent}*{whole}={percent * whole}. {percent * whole}/100={value}."
        slots = f"{percent}%{whole}"
    return Sample("fractions", slots, conversation=ask(question, thinking=True), reasoning=reasoning,
                  answer=f"It is {value}.", check={"number": value})  # fmt: skip


KINDS = {
    "add_subtract": add_subtract, "three_digits": three_digits, "multiply": multiply, "divide": divide, "compare": compare,
    "word_problem": word_problem, "units": units, "dates": dates, "fractions": fractions,
}  # fmt: skip
