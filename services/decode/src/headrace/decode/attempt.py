"""The life of an attempt on the decode side, as a pure function: the table of docs/handoff.md, section 6.

Knows which event means what in which phase, and what follows from it. Does not know the bus, memory or the engine:
`DecodeService` tells events and carries the effects out. What depends on facts that only it has (is there room?) is asked for
by an effect (`Judge`, `JudgeBind`) and told by another event.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class Phase(Enum):
    """CREDIT: counted, resident prefix pinned. BOUND: memory taken, ticket out. RUNNING: sampled. OVER: nothing is held, the
    output is remembered. TOMBSTONE: refused. UNKNOWN: never heard of, or forgotten."""

    UNKNOWN = "unknown"
    CREDIT = "credit"
    BOUND = "bound"
    RUNNING = "running"
    OVER = "over"
    TOMBSTONE = "tombstone"


@dataclass(frozen=True, slots=True)
class Attempt:
    """`writer`: incarnation that the ticket was given to, while BOUND."""

    phase: Phase = Phase.UNKNOWN
    writer: str = ""


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Admit:
    """The gateway's message."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The answer to `Judge`: "" it fits, else the code of the refusal."""

    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Bind:
    """Prefill's message."""

    writer: str


@dataclass(frozen=True, slots=True)
class BindJudged:
    """The answer to `JudgeBind`: "" memory was taken and a ticket made, "full" not now, any other code: never."""

    writer: str
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Computes:
    """The prompt was given to this worker's own engine (`--both`): no hand-off is to come."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The gate opened; `good`: the engine took what came."""

    good: bool = True


@dataclass(frozen=True, slots=True)
class LastToken:
    pass


@dataclass(frozen=True, slots=True)
class Cancel:
    """`stop`: a text stop; what counts has been told to the request."""

    stop: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """Prefill's leg failed."""


@dataclass(frozen=True, slots=True)
class Resume:
    pass


@dataclass(frozen=True, slots=True)
class Superseded:
    """A newer attempt asks for admission."""


@dataclass(frozen=True, slots=True)
class Ends:
    """It can't go on: deadline, a gateway that is silent, a ticket that failed."""


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """As `Ends`; the engine has let go already."""


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Answer:
    """To whoever sent the message: the answer's name, and the code of a refusal or the state of a Done."""

    name: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class Judge:
    """Is there a credit, and room? -> `Judged`"""


@dataclass(frozen=True, slots=True)
class JudgeBind:
    """Take memory for everything and make a ticket, or nothing. -> `BindJudged`"""


@dataclass(frozen=True, slots=True)
class TakeCredit:
    pass


@dataclass(frozen=True, slots=True)
class RenewTicket:
    pass


@dataclass(frozen=True, slots=True)
class CancelTicket:
    """And tell its writer."""


@dataclass(frozen=True, slots=True)
class CancelEngine:
    pass


@dataclass(frozen=True, slots=True)
class Tell:
    """The gateway: why the attempt ended."""


@dataclass(frozen=True, slots=True)
class TellStop:
    """The gateway: last entries, with the usage that counts."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Credit and pins; the output is remembered from here on."""


@dataclass(frozen=True, slots=True)
class Entomb:
    """Refuse it from here on."""


Step = tuple[Attempt, list[Any]]


def step(attempt: Attempt, event: Any, now: float) -> Step:
    match attempt.phase:
        case Phase.UNKNOWN:
            return _unknown(attempt, event)
        case Phase.OVER:
            return _over(attempt, event)
        case Phase.TOMBSTONE:
            return _tombstone(attempt, event)
    match attempt.phase, event:
        case _, Admit():
            return attempt, [Answer("Admitted")]
        case _, Resume():
            return attempt, [Answer("Resumed")]
        case Phase.CREDIT, Bind():
            return attempt, [JudgeBind()]
        case Phase.CREDIT, BindJudged():
            return _bind(attempt, event)
        case Phase.BOUND, Bind(writer) if writer == attempt.writer:
            return attempt, [RenewTicket(), Answer("Bound")]
        case _, Bind():
            return attempt, [Answer("Refused", "stale")]
        case Phase.CREDIT, Computes():
            return replace(attempt, phase=Phase.RUNNING), []
        case Phase.BOUND, HandedOver(True):
            return Attempt(Phase.RUNNING), []
        case Phase.BOUND, HandedOver(False):  # the ticket is over
            return Attempt(Phase.OVER), [Tell(), GiveBack(), Entomb()]
        case Phase.RUNNING, LastToken():
            return Attempt(Phase.OVER), [GiveBack(), Entomb()]
        case Phase.RUNNING, Fail():  # it was admitted: a late doubt of the writer does not undo it
            return attempt, [Answer("Done", "running")]
    return _early_end(attempt, event)


def _unknown(attempt: Attempt, event: Any) -> Step:
    match event:
        case Admit():
            return attempt, [Judge()]
        case Judged(""):
            return Attempt(Phase.CREDIT), [TakeCredit(), Answer("Admitted")]
        case Judged(code):  # the gateway asks again with another attempt: nobody waits for this one, should it come twice
            return Attempt(Phase.TOMBSTONE), [Entomb(), Answer("Refused", code)]
        case Bind() | Resume():
            return attempt, [Answer("Refused", "unknown")]
        case Cancel() | Fail():
            return Attempt(Phase.TOMBSTONE), [Entomb(), Answer("Done", "unknown")]
    return attempt, []


def _bind(attempt: Attempt, judged: BindJudged) -> Step:
    match judged.refusal:
        case "":
            return Attempt(Phase.BOUND, judged.writer), [Answer("Bound")]
        case "full":  # prefill asks again
            return attempt, [Answer("Refused", "full")]
        case code:
            return Attempt(Phase.OVER), [Tell(), GiveBack(), Entomb(), Answer("Refused", code)]


def _early_end(attempt: Attempt, event: Any) -> Step:
    """Whatever the attempt holds in its phase is given back."""
    holds = {Phase.BOUND: [CancelTicket()], Phase.RUNNING: [CancelEngine()]}.get(attempt.phase, [])
    let_go = [*holds, GiveBack(), Entomb()]
    match event:
        case Cancel(stop):
            told = [TellStop()] if stop and attempt.phase is Phase.RUNNING else []
            return Attempt(Phase.OVER), [*told, *let_go, Answer("Done", "cancelled")]
        case Fail():
            return Attempt(Phase.OVER), [Tell(), *let_go, Answer("Done", "failed")]
        case Superseded():
            return Attempt(Phase.OVER), let_go
        case Ends():
            return Attempt(Phase.OVER), [Tell(), *let_go]
        case EngineFailed():
            return Attempt(Phase.OVER), [Tell(), GiveBack(), Entomb()]
    return attempt, []


def _over(attempt: Attempt, event: Any) -> Step:
    match event:
        case Admit() | Bind():
            return attempt, [Answer("Refused", "stale")]
        case Cancel():
            return attempt, [Answer("Done", "finished")]
        case Fail():
            return attempt, [Answer("Done", "unknown")]
        case Resume():
            return attempt, [Answer("Resumed")]
    return attempt, []


def _tombstone(attempt: Attempt, event: Any) -> Step:
    match event:
        case Admit() | Bind():
            return attempt, [Answer("Refused", "stale")]
        case Cancel() | Fail():
            return attempt, [Entomb(), Answer("Done", "unknown")]
        case Resume():
            return attempt, [Answer("Refused", "unknown")]
    return attempt, []
