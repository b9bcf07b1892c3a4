"""The life of an attempt on the prefill side, as a pure function: the tables of docs/handoff.md, section 6, "prefill".

Knows which event means what in which phase, and what follows. What happens to a ticket is the writer's machine
(`headrace.kv.grants.writer`), which is told when the attempt ends. Does not know the bus, the engine or memory:
`PrefillService` tells events and carries the effects out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from headrace.kv.grants import events as ticket


class Phase(Enum):
    """UNKNOWN: never heard of, or forgotten. HASHING: its ids are looked at. LOOKING: a prefix is fetched. SEEING: embeddings
    are fetched. QUEUED: the engine has it, and no memory for it yet. BINDING: memory is asked for at decode. WRITING: there is
    a ticket. PLACED: and all bytes are there. OVER: refused from here on."""

    UNKNOWN = "unknown"
    HASHING = "hashing"
    LOOKING = "looking"
    SEEING = "seeing"
    QUEUED = "queued"
    BINDING = "binding"
    WRITING = "writing"
    PLACED = "placed"
    OVER = "over"


WORKING = (Phase.HASHING, Phase.LOOKING, Phase.SEEING, Phase.QUEUED, Phase.BINDING)  # no ticket yet
TICKET = (Phase.WRITING, Phase.PLACED)


@dataclass(frozen=True, slots=True)
class Attempt:
    """`images`: it has some. `ticket`: it is over and its ticket is not, which must hear whatever happens to decode."""

    phase: Phase = Phase.UNKNOWN
    images: bool = False
    ticket: bool = False


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Run:
    """The gateway's message."""

    images: bool = False


@dataclass(frozen=True, slots=True)
class Judged:
    """The answer to `Judge`: "" it is taken, else the code of the refusal."""

    refusal: str = ""
    images: bool = False


@dataclass(frozen=True, slots=True)
class Hashed:
    """`wrong`: the block hashes that came are of other ids; in words."""

    wrong: str = ""


@dataclass(frozen=True, slots=True)
class LookedUp:
    pass


@dataclass(frozen=True, slots=True)
class Saw:
    pass


@dataclass(frozen=True, slots=True)
class Begun:
    """The engine computes it, and has memory for all of it: whoever holds a reader's memory waits for nobody's."""


@dataclass(frozen=True, slots=True)
class Bound:
    """`denied`: decode was told that we would never write for this ticket."""

    denied: bool = False


@dataclass(frozen=True, slots=True)
class NotBound:
    """The reader is full, or gave no answer."""

    wait: float  # seconds


@dataclass(frozen=True, slots=True)
class Placed:
    """Everything is in the reader's memory, and the flag."""


@dataclass(frozen=True, slots=True)
class TicketOver:
    """The writer's machine has come to its end."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """The gateway's message."""

    reason: str = "cancelled"


@dataclass(frozen=True, slots=True)
class Ends:
    """It can't go on. `code` "lost": decode is gone; "": whom it concerns knows."""

    code: str
    text: str


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Answer:
    """To whoever sent the message: the answer's name, and the code of a refusal or the state of a Done."""

    name: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class Judge:
    """Is there room, and does it fit? -> `Judged`"""


@dataclass(frozen=True, slots=True)
class Take:
    """It is here from now on; hash its ids. -> `Hashed`"""


@dataclass(frozen=True, slots=True)
class LookUp:
    """-> `LookedUp`"""


@dataclass(frozen=True, slots=True)
class See:
    """-> `Saw`"""


@dataclass(frozen=True, slots=True)
class Submit:
    """Give it to the engine. -> `Begun`"""


@dataclass(frozen=True, slots=True)
class Bind:
    """Ask for memory, after so many seconds. -> `Bound`, `NotBound`"""

    wait: float = 0.0


@dataclass(frozen=True, slots=True)
class Write:
    """-> `Placed`"""


@dataclass(frozen=True, slots=True)
class ToTicket:
    """Tell the writer's machine, which tells decode and the gateway."""

    event: Any


@dataclass(frozen=True, slots=True)
class StopWork:
    """Whatever is under way for it; then all that it holds is given back."""


@dataclass(frozen=True, slots=True)
class TellGateway:
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class TellDecode:
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Entomb:
    """Refuse it from here on: a late duplicate would be computed for nobody."""


Step = tuple[Attempt, list[Any]]


def step(attempt: Attempt, event: Any, now: float) -> Step:
    match attempt.phase, event:
        case Phase.OVER, Run():
            return attempt, [Answer("Refused", "stale")]
        case Phase.UNKNOWN | Phase.OVER, Cancel():
            return Attempt(Phase.OVER, ticket=attempt.ticket), [Entomb(), Answer("Done", "unknown")]
        case Phase.OVER, Ends(code, text) if attempt.ticket:
            return attempt, [_to_ticket(code, text)]
        case Phase.OVER, _:
            return attempt, []
        case Phase.UNKNOWN, Run():
            return attempt, [Judge()]
        case Phase.UNKNOWN, Judged("", images):
            return Attempt(Phase.HASHING, images), [Take(), Answer("Accepted")]
        case Phase.UNKNOWN, Judged(code):
            return attempt, [Answer("Refused", code)]
        case Phase.UNKNOWN, _:
            return attempt, []
        case _, Run():
            return attempt, [Answer("Accepted")]
        case _, Cancel(reason):
            after, effects = _end(attempt, "", reason)
            return after, [*effects, Answer("Done", "cancelled")]
        case _, Ends(code, text):
            return _end(attempt, code, text)
    return _goes_on(attempt, event)


def _goes_on(attempt: Attempt, event: Any) -> Step:
    """The way of a prompt when nothing goes wrong."""
    phase = attempt.phase
    match phase, event:
        case Phase.HASHING, Hashed(wrong):
            return _end(attempt, "mismatch", wrong) if wrong else (_to(attempt, Phase.LOOKING), [LookUp()])
        case Phase.LOOKING, LookedUp() if attempt.images:
            return _to(attempt, Phase.SEEING), [See()]
        case (Phase.LOOKING, LookedUp()) | (Phase.SEEING, Saw()):
            return _to(attempt, Phase.QUEUED), [Submit()]
        case Phase.QUEUED, Begun():
            return _to(attempt, Phase.BINDING), [Bind()]
        case Phase.BINDING, NotBound(wait):
            return attempt, [Bind(wait)]
        case Phase.BINDING, Bound(denied=True):
            return _end(attempt, "", "the owner asked for this ticket before we knew it, and was told that we never shall")
        case Phase.BINDING, Bound():
            return _to(attempt, Phase.WRITING), [Write()]
        case Phase.WRITING, Placed():
            return _to(attempt, Phase.PLACED), [ToTicket(ticket.Placed())]
        case (Phase.WRITING | Phase.PLACED), TicketOver():
            return Attempt(Phase.OVER), [Entomb(), *([StopWork()] if phase is Phase.WRITING else [])]
    return attempt, []


def _to(attempt: Attempt, phase: Phase) -> Attempt:
    return Attempt(phase, attempt.images)


def _end(attempt: Attempt, code: str, text: str) -> Step:
    """With a ticket, the writer's machine says what that means, and tells whom it concerns."""
    if attempt.phase in TICKET:
        stop = [StopWork()] if attempt.phase is Phase.WRITING else []
        return Attempt(Phase.OVER, ticket=True), [Entomb(), _to_ticket(code, text), *stop]
    told = [TellGateway(code, text), TellDecode(code, text)] if code else []
    return Attempt(Phase.OVER), [Entomb(), *told, StopWork()]


def _to_ticket(code: str, text: str) -> ToTicket:
    if code == "lost":
        return ToTicket(ticket.OwnerLost())
    return ToTicket(ticket.LegFailed(code, text) if code else ticket.Cancelled(text))
