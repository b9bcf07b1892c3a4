"""The output of one choice at the gateway, as a pure function: the table of docs/handoff.md, section 6, "output of a choice".

Knows which tokens are new, what a gap means, when a choice is over. Does not know ids, text or the bus: `Dispatcher` tells what
came and carries the effects out. There is a step for each message and choice, so states, events and effects are msgspec's
structs, which are compared by type and made in C: a frozen dataclass costs several times as much.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace


class Choice(Struct, frozen=True):
    """One of n outputs. `next`: index of the next token that is wanted, from whichever attempts. `kept`: tokens that count,
    once a text stop ended it here; decode goes on until it is told. `finished`: decode says that it is over, after `sampled`
    tokens that count. `asking`: lost output is being asked for; `behind`: more is missing than that question was about."""

    next: int = 0
    kept: int = -1
    finished: bool = False
    sampled: int = 0
    asking: bool = False
    behind: bool = False

    @property
    def over(self) -> bool:
        """Nothing more of it is for the client."""
        return self.finished or self.kept >= 0

    @property
    def counted(self) -> int:
        """Tokens that count, as far as is known here."""
        return self.kept if self.kept >= 0 else max(self.sampled, self.next)

    def carried(self) -> Choice:
        """The same for the next attempt; questions of the last one are nobody's now."""
        return replace(self, asking=False, behind=False)


# ---------------------------------------------------------------- events


class Came(Struct, frozen=True):
    """`count` tokens from `index` on; `finish`: decode's reason, with the last of them, and how many it `sampled`."""

    index: int
    count: int
    finish: str = ""
    sampled: int = 0


class Delivered(Struct, frozen=True):
    """The sink has them. `kept`: -1, or tokens of the choice that count, for a text stop ended it."""

    kept: int
    finish: str = ""


class Missing(Struct, frozen=True):
    """Messages of its worker were lost: perhaps its own."""


class Answered(Struct, frozen=True):
    """What was asked for has come, and was told before."""


class Unanswered(Struct, frozen=True):
    """The question or its answer was lost."""


class Unreachable(Struct, frozen=True):
    """Nobody could be asked then. The prober finds a dead worker; a bus that comes back makes everything `Missing`, perhaps
    before this is told."""


# ---------------------------------------------------------------- effects


class Deliver(Struct, frozen=True):
    """To the client: what came, without the first `skip` tokens. -> `Delivered`"""

    skip: int
    finish: str = ""


class Ask(Struct, frozen=True):
    """Decode, for everything from `start` on. -> `Answered`, `Unanswered`, `Unreachable`"""

    start: int


class Over(Struct, frozen=True):
    """Nothing more of it is for the client; `finished`: decode knows that."""

    reason: str
    finished: bool


class LastWord(Struct, frozen=True):
    """Decode has finished what a text stop had ended here."""


class Aborted(Struct, frozen=True):
    """It ended there, and nobody says why."""


ALL_OF_IT = (Deliver(0),)  # what follows from nearly every message

Step = tuple[Choice, tuple[Any, ...]]


def step(choice: Choice, event: Any, now: float = 0.0) -> Step:
    match event:
        case Came():
            return _came(choice, event)
        case Delivered(kept, finish):
            if choice.kept >= 0 or (kept < 0 and not finish):
                return choice, ()
            return replace(choice, kept=kept), (Over("stop" if kept >= 0 else finish, choice.finished),)
    if choice.finished:
        return replace(choice, asking=False, behind=False), ()
    match event:
        case Missing():
            return _missing(choice)
        case Answered() if choice.asking and not choice.behind:
            return replace(choice, asking=False), ()
        case Unanswered() if choice.asking:
            return replace(choice, behind=False), (Ask(choice.next),)
        case Answered() | Unreachable() if choice.behind:
            return replace(choice, behind=False), (Ask(choice.next),)
        case Unreachable():
            return replace(choice, asking=False), ()
    return choice, ()


def _came(choice: Choice, came: Came) -> Step:
    index, count, finish, end = came.index, came.count, came.finish, choice.next
    if choice.finished:
        return choice, ()
    if choice.kept >= 0:  # a text stop ended it; decode's last word brings the usage
        return (replace(choice, finished=True, sampled=came.sampled), (LastWord(),)) if finish else (choice, ())
    if index > end:
        return _missing(choice)
    skip = end - index
    if skip > count or (skip == count and not finish):
        return choice, ()
    if finish == "abort":
        return choice, (Aborted(),)
    sampled = came.sampled if finish else choice.sampled
    after = Choice(index + count, -1, bool(finish), sampled, choice.asking, choice.behind)
    return after, (Deliver(skip, finish),) if skip or finish else ALL_OF_IT


def _missing(choice: Choice) -> Step:
    """Ask once at a time; an answer that is under way may be older than what makes us ask now."""
    if choice.asking:
        return replace(choice, behind=True), ()
    return replace(choice, asking=True), (Ask(choice.next),)
