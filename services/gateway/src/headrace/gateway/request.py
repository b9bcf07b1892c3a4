"""The life of a request at the gateway, as a pure function: the table of docs/handoff.md, section 6, "gateway".

Knows attempts and their legs, the line, death, migration, deadlines: which event means what in which phase, and what follows
from it. Does not know the bus, workers' loads, tokens or HTTP: `Dispatcher` tells events and carries the effects out. What
depends on facts that only it has (who has room?) is asked for by an effect (`Place`, `Choose`) and told by another event.

States, events and effects are msgspec's structs: immutable, compared by type, and made in C (see `choice.py`).

An answer names the attempt it is about. Effects with a key happen once for it, however often something asks for them.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from headrace.bus import messages as m

from . import errors
from .errors import GatewayError

RETRY_CODES = frozenset({"busy", "full", "draining", "mismatch", "unknown", "stale", "closed", "failed"})
WAIT_CODES = frozenset({"closed", "draining", "stale"})  # of refusals: another worker, or the same one restarted, may take it
BLIND_CODES = frozenset({"prefill_vision_lost", "prefill_vision_unknown"})  # images must be identified again
NOBODY: frozenset[str] = frozenset()


class Phase(Enum):
    """NEW: not taken yet. PLACING: a pair is looked for, which takes no time. LINE: waits for its turn. LOOKING: its images are
    identified once more. OFFLINE: waits for the bus. ADMITTING: decode is asked. STARTING: decode has a credit for it, prefill
    is asked. RUNNING: both have it. STREAMING: there is output of this attempt, prefill's part is over. SETTLING: all text is
    out, decode's last word awaited. SPLIT: its choices go on one by one. OVER: the client has its end."""

    NEW = "new"
    PLACING = "placing"
    LINE = "line"
    LOOKING = "looking"
    OFFLINE = "offline"
    ADMITTING = "admitting"
    STARTING = "starting"
    RUNNING = "running"
    STREAMING = "streaming"
    SETTLING = "settling"
    SPLIT = "split"
    OVER = "over"

    __hash__ = object.__hash__  # there is one of each; Enum's own is written in Python


HELD = {Phase.STARTING, Phase.RUNNING, Phase.STREAMING, Phase.SETTLING}  # its workers count it, and are probed


class Limits(Struct, frozen=True):
    """Seconds, save the first two. `max_attempts`: in a row, that give no output. `last_word`: wait for decode's usage once all
    text is out; `bus`: for a bus that is away."""

    max_attempts: int = 3
    max_migrations: int = 8
    queue: float = 60.0
    worker: float = 10.0
    last_word: float = 1.0
    bus: float = 5.0


class Request(Struct, frozen=True):
    """Times are monotonic seconds. `left`: choices with text to come; `open`: those that decode has not finished.
    `attempt` numbers every try, also refused ones. `begun`: some attempt has given output, which the next one goes on with."""

    deadline: float
    seconds: float  # of which the deadline was made
    choices: int = 1
    left: int = 1
    open: int = 1
    phase: Phase = Phase.NEW
    limits: Limits = Limits()
    attempt: int = 0
    prefill: str = ""  # legs of the attempt under way; the same worker twice where it does both
    decode: str = ""
    begun: bool = False
    blind: bool = False  # its images must be identified before the next attempt
    losses: int = 0  # attempts that were accepted and then lost, since the last one that gave output
    migrations: int = 0  # attempts that went on with output
    shunned: frozenset[str] = NOBODY  # workers that lost it: others first
    lost: float = 0.0  # when the last one did
    late: bool = False  # that one was not dead
    excluded: frozenset[str] = NOBODY  # workers that refused it, since it last waited
    refusal: m.Refused | None = None  # the last one since then
    nobody: float = 0.0  # since when no worker is there, or none that would take anything
    queued: float = 0.0  # since when it is in the line; 0: it is not
    until: float = math.inf  # patience of this phase

    @property
    def due(self) -> float:
        """When `tick` has something to say."""
        return min(self.deadline, self.until)

    @property
    def watched(self) -> tuple[str, ...]:
        """Workers whose death would be its loss."""
        if self.phase in (Phase.STARTING, Phase.RUNNING):
            return self.legs
        return (self.decode,) if self.phase in HELD else ()

    @property
    def legs(self) -> tuple[str, ...]:
        return (self.decode,) if self.decode == self.prefill else (self.decode, self.prefill)

    def role(self, leg: str) -> str:
        return "decode" if leg == self.decode else "prefill"

    def part(self) -> Request:
        """One of its choices, going on by itself."""
        return replace(self, phase=Phase.NEW, choices=1, left=1, open=1, attempt=0, prefill="", decode="", queued=0.0)


# ---------------------------------------------------------------- events


class Arrives(Struct, frozen=True):
    limits: Limits


class Placed(Struct, frozen=True):
    """The answer to `Place`. `ahead`: others wait already, and were here first."""

    ahead: bool


class Pair(Struct, frozen=True):
    """An answer to `Choose`."""

    prefill: str
    decode: str


class NoPair(Struct, frozen=True):
    """An answer to `Choose`. `missing`: what is not there, in words; `coming`: a process that would be it is starting."""

    missing: str
    coming: bool = False


class OtherOutput(Struct, frozen=True):
    """An answer to `Choose`: workers are there, but with another checkpoint than its output is of."""

    missing: str


class LineFull(Struct, frozen=True):
    """The answer to `Join`, where it is refused."""

    waiting: int


class Called(Struct, frozen=True):
    """Its turn in the line."""


class Seen(Struct, frozen=True):
    """Its images are known again; `error`: they are not."""

    error: GatewayError | None = None


class BusBack(Struct, frozen=True):
    pass


class Admitted(Struct, frozen=True):
    """Decode's answer. `have`: blocks of the prompt that it holds."""

    attempt: int
    have: int = 0


class Accepted(Struct, frozen=True):
    """Prefill's answer."""

    attempt: int


class Refused(Struct, frozen=True):
    """Either's answer. `refusal` None: it gave none."""

    attempt: int
    worker: str
    refusal: m.Refused | None


class Offline(Struct, frozen=True):
    """The answer can't come: we are off the bus."""

    attempt: int


class FirstOutput(Struct, frozen=True):
    """Of the attempt that runs."""


class ChoiceOver(Struct, frozen=True):
    """Nothing more of it is for the client; `finished`: decode knows that."""

    number: int
    reason: str
    finished: bool


class ChoiceFinished(Struct, frozen=True):
    """Decode's last word on a choice that was over already."""


class Problem(Struct, frozen=True):
    """A leg of this attempt says that it is over."""

    attempt: int
    worker: str
    problem: m.Problem


class Died(Struct, frozen=True):
    """The prober found it dead, or `late`: overloaded, stopped or cut off; then it may hold a credit."""

    worker: str
    role: str
    why: str
    late: bool = False


class Unrepeatable(Struct, frozen=True):
    """Output was lost that decode no longer has."""

    attempt: int
    why: str


class Leaves(Struct, frozen=True):
    """The client is gone, or takes its output too slowly. `reason` "failed": the request that this is a part of is over."""

    reason: str = "client"


class Breaks(Struct, frozen=True):
    """It can't go on: the gateway stops, the bus stays away, a part of it failed, a defect."""

    error: GatewayError


# ---------------------------------------------------------------- effects


class Place(Struct, frozen=True):
    """Do others wait for room? -> `Placed`"""


class Choose(Struct, frozen=True):
    """A pair of workers, none of `without`. -> `Pair`, `NoPair`, `OtherOutput`"""

    without: frozenset[str]


class Join(Struct, frozen=True):
    """The line, in its place. `always`: however long that is. -> `LineFull`, or `Called` when its turn comes"""

    always: bool


class LeaveLine(Struct, frozen=True):
    """Another may have its turn."""


class Look(Struct, frozen=True):
    """Have its images identified once more. -> `Seen`"""


class Admit(Struct, frozen=True):
    """Ask decode. -> `Admitted`, `Refused`, `Offline`"""

    attempt: int
    decode: str


class Hold(Struct, frozen=True):
    """Count it at its workers, and probe them."""

    attempt: int
    watched: tuple[str, ...]


class Run(Struct, frozen=True):
    """Ask prefill. -> `Accepted`, `Refused`, `Offline`"""

    attempt: int
    prefill: str
    have: int


class Unwatch(Struct, frozen=True):
    """Its death would harm nothing any more."""

    attempt: int
    worker: str


class LetGo(Struct, frozen=True):
    """The workers of this attempt no longer count it; those of `watched` are no longer probed for it."""

    attempt: int
    watched: tuple[str, ...]


class Cancel(Struct, frozen=True):
    """Tell a leg to stop, until it answers. After a text stop (`reason` "stop"): with what is kept."""

    attempt: int
    role: str
    worker: str
    reason: str


class Retry(Struct, frozen=True):
    """Another attempt follows, with what was output if there is any (`migrates`)."""

    attempt: int  # that was lost
    worker: str
    why: str
    migrates: bool


class Split(Struct, frozen=True):
    """Every open choice goes on as a request of its own. -> `ChoiceOver`, `ChoiceFinished`, `Breaks`"""

    attempt: int


class EndParts(Struct, frozen=True):
    """What it was split into ends with it."""


class Finish(Struct, frozen=True):
    """Tell the client that a choice is over; `last`: all are."""

    number: int
    reason: str
    last: bool


class Flush(Struct, frozen=True):
    pass


class End(Struct, frozen=True):
    """Tell the client that all is over, with the usage."""


class Fail(Struct, frozen=True):
    """Tell the client that it failed."""

    error: GatewayError


class Shed(Struct, frozen=True):
    """There is no client to be told."""


def key(effect: Any) -> tuple[Any, ...]:
    """What an effect is about: it is carried out once a key, or the second time changes nothing. (): a question, which may be
    asked again."""
    match effect:
        case End() | Fail() | Shed():
            return ("end",)
        case Finish(number):
            return "finish", number
        case Cancel(attempt, _, worker):
            return "cancel", attempt, worker
        case Unwatch(attempt, worker):
            return "unwatch", attempt, worker
        case Admit(attempt) | Hold(attempt) | Run(attempt) | LetGo(attempt) | Retry(attempt) | Split(attempt):
            return type(effect).__name__, attempt
    return ()


Step = tuple[Request, list[Any]]

FINDING = frozenset({Arrives, Placed, Pair, NoPair, OtherOutput, LineFull, Called, Seen, BusBack})  # a pair: see `_placing`


def step(r: Request, event: Any, now: float) -> Step:
    if type(event) in FINDING:
        return _placing(r, event, now)
    match event:
        case Admitted():
            return _admitted(r, event)
        case Accepted(attempt):
            started = attempt == r.attempt and r.phase is Phase.STARTING
            return _in_place(r, Phase.RUNNING, []) if started else (r, [])
        case Refused() if event.attempt == r.attempt and r.phase in (Phase.ADMITTING, Phase.STARTING):
            return _refused(r, event)
        case Offline(attempt) if attempt == r.attempt and r.phase in (Phase.ADMITTING, Phase.STARTING):
            until = now + min(r.limits.bus, r.deadline - now)
            return replace(r, phase=Phase.OFFLINE, until=until), [*_cancels(r, "failed"), *_let_go(r)]
        case FirstOutput() if r.phase in (Phase.STARTING, Phase.RUNNING):
            begun = replace(r, begun=True, losses=0)
            over = [Unwatch(r.attempt, r.prefill)] if r.prefill != r.decode else []
            return _in_place(begun, Phase.STREAMING, over)
        case ChoiceOver() if r.phase in (Phase.STREAMING, Phase.SPLIT):
            return _choice(r, event, now)
        case ChoiceFinished() if r.phase in (Phase.STREAMING, Phase.SETTLING, Phase.SPLIT):
            return _choice(r, event, now)
    if r.phase is Phase.OVER:
        return r, []
    match event:
        case Leaves(reason):
            return _over(r, reason, Shed())
        case Breaks(error):
            return _over(r, "failed", Fail(error))
        case Problem() | Died() | Unrepeatable():
            return _trouble(r, event, now)
    return r, []


def tick(r: Request, now: float) -> Step:
    """What time alone brings."""
    if r.phase is Phase.OVER or now < r.due:
        return r, []
    if now >= r.deadline:
        return _over(r, "deadline", Fail(errors.deadline(r.seconds)))
    match r.phase:
        case Phase.SETTLING:
            return _over(r, "", End())
        case Phase.OFFLINE:
            return _give_up(r, errors.bus_down())
        case Phase.LINE if r.nobody:  # perhaps somebody has come and could not say so
            return _choose(r)
        case Phase.LINE:
            return _give_up(r, errors.busy(f"no worker had room within {r.limits.queue:g} s"))
    return r, []


# ---------------------------------------------------------------- finding a pair


def _placing(r: Request, event: Any, now: float) -> Step:
    match r.phase, event:
        case Phase.NEW, Arrives(limits):
            return _place(replace(r, limits=limits))
        case Phase.PLACING, Placed(ahead):
            return _wait(r, now) if ahead else _look(r)
        case Phase.PLACING, Pair(prefill, decode):
            after = replace(r, phase=Phase.ADMITTING, attempt=r.attempt + 1, prefill=prefill, decode=decode)
            return after, [Admit(after.attempt, decode)]
        case Phase.PLACING, NoPair() if r.shunned and not (_full(r) and now < r.lost + r.limits.worker):
            return _choose(replace(r, shunned=NOBODY))  # there is nobody else, or none that has room soon
        case Phase.PLACING, NoPair():
            return _nobody(r, event, now)
        case Phase.PLACING, OtherOutput(missing):
            return _give_up(r, errors.no_workers(missing))
        case Phase.LINE, LineFull(waiting):
            return _give_up(replace(r, queued=0.0), errors.busy(f"all workers are busy and {waiting} requests wait already"))
        case Phase.LINE, Called():
            return _look(r)
        case Phase.LOOKING, Seen(None):
            return _choose(replace(r, blind=False))
        case Phase.LOOKING, Seen(error):
            return _give_up(r, error)
        case Phase.OFFLINE, BusBack():
            return _choose(r)
    return r, []


def _place(r: Request) -> Step:
    """From the beginning: whoever waits already comes first."""
    return replace(r, phase=Phase.PLACING, excluded=NOBODY, refusal=None, nobody=0.0, until=math.inf), [Place()]


def _look(r: Request) -> Step:
    """Its turn: with images that are known, to workers."""
    fresh = replace(r, excluded=NOBODY, refusal=None)
    return (replace(fresh, phase=Phase.LOOKING, until=math.inf), [Look()]) if r.blind else _choose(fresh)


def _choose(r: Request) -> Step:
    return replace(r, phase=Phase.PLACING, until=math.inf), [Choose(r.excluded | r.shunned)]


def _nobody(r: Request, event: NoPair, now: float) -> Step:
    """Nobody has room, or nobody is there. One that was killed or drained is replaced soon; a mismatch is not. One that is
    starting is worth a longer wait, and is looked for again every second."""
    if _full(r):
        return _wait(replace(r, nobody=0.0), now)
    if r.refusal is not None and r.refusal.code not in WAIT_CODES:
        return _give_up(r, errors.from_refusal(r.refusal, "workers"))
    nobody, patience = r.nobody or now, r.limits.worker
    if event.coming:
        patience = max(patience, r.limits.queue)
    if now >= nobody + patience:
        return _give_up(r, errors.no_workers(event.missing, patience))
    after, effects = _wait(replace(r, nobody=nobody), now)
    return replace(after, until=max(after.until, min(now + 1.0, nobody + patience))), effects


def _full(r: Request) -> bool:
    """Somebody would take it, and has no room."""
    return r.refusal is not None and r.refusal.code in ("busy", "full")


def _wait(r: Request, now: float) -> Step:
    queued = r.queued or now
    until = r.nobody + r.limits.worker if r.nobody else queued + r.limits.queue
    waits = replace(r, phase=Phase.LINE, excluded=NOBODY, refusal=None, queued=queued, until=until)
    return waits, [Join(always=r.begun or r.queued > 0)]


# ---------------------------------------------------------------- the legs' answers


def _admitted(r: Request, event: Admitted) -> Step:
    if r.phase is not Phase.ADMITTING or event.attempt != r.attempt:
        return r, []  # it ended while its admission was awaited, and decode was told
    after = replace(r, phase=Phase.STARTING)
    return after, [Hold(r.attempt, after.watched), Run(r.attempt, r.prefill, event.have)]


def _refused(r: Request, event: Refused) -> Step:
    """What refused has nothing to give back; who did not answer may have taken it."""
    silent = event.refusal is None
    refusal = event.refusal or m.Refused("busy", f"{event.worker} does not answer")
    holds = silent or (refusal.code == "stale" and r.phase is Phase.ADMITTING)
    admitted = r.phase is Phase.STARTING  # by decode, whatever prefill says
    let_go = [c for c in _cancels(r, "failed") if holds or (admitted and c.role == "decode")] + _let_go(r)
    if refusal.code == "invalid":
        after, effects = _give_up(replace(r, phase=Phase.PLACING), errors.from_refusal(refusal, event.worker))
    else:
        after, effects = _choose(replace(r, excluded=r.excluded | {event.worker}, refusal=refusal))
    return after, [*let_go, *effects]


def _in_place(r: Request, phase: Phase, effects: list[Any]) -> Step:
    """It has room: whoever waits may have the next."""
    return replace(r, phase=phase, queued=0.0), [*effects, *([LeaveLine()] if r.queued else [])]


# ---------------------------------------------------------------- output


def _choice(r: Request, event: ChoiceOver | ChoiceFinished, now: float) -> Step:
    effects: list[Any] = []
    left, finished = r.left, True
    if isinstance(event, ChoiceOver):
        left, finished = r.left - 1, event.finished
        effects.append(Finish(event.number, event.reason, left == 0))
    after = replace(r, left=left, open=r.open - finished)
    if after.open == 0:
        over, end = _over(after, "", End())
        return over, [*effects, *end]
    if isinstance(event, ChoiceOver):
        effects.append(Flush())
    if left == 0 and r.phase is Phase.STREAMING:  # text stops ended all that are open, of which decode does not know yet
        after = replace(after, phase=Phase.SETTLING, until=now + r.limits.last_word)
        effects += _cancels(r, "stop")
    return after, effects


# ---------------------------------------------------------------- trouble


def _trouble(r: Request, event: Problem | Died | Unrepeatable, now: float) -> Step:
    """An attempt is over before its time."""
    match event:
        case Problem(worker=worker) if worker != r.decode and r.phase in (Phase.STREAMING, Phase.SETTLING):
            return r, []  # there is output, so decode has all of the prompt: whatever befell its writer, nothing is missing
        case Problem(attempt, worker, problem) if attempt == r.attempt and (r.phase in HELD or r.phase is Phase.ADMITTING):
            error = errors.from_problem(problem)
            if problem.status < 500 and problem.code not in RETRY_CODES:
                return _over(r, "failed", Fail(error), but=worker)
            return _lost(replace(r, blind=r.blind or problem.code in BLIND_CODES), worker, error, now)
        case Died(worker, role, why, late) if worker in r.watched:
            error = errors.worker_late(role, why) if late else errors.worker_died(role, why)
            after, effects = _lost(r, worker, error, now, dead=worker, late=late)
            return after, [Cancel(r.attempt, r.role(worker), worker, "failed"), *effects]
        case Unrepeatable(attempt, why) if attempt == r.attempt and r.phase in HELD:
            lost = errors.worker_died("decode", f"output was lost and can't be repeated: {why}")
            return _lost(r, r.decode, lost, now)
    return r, []


def _lost(r: Request, worker: str, error: GatewayError, now: float, dead: str = "", late: bool = False) -> Step:
    """This attempt can't go on; the leg that is left is cancelled. Another one goes on with what was output, if any."""
    limits, losses = r.limits, r.losses + 1
    if not r.left:  # nothing but decode's last word is missing
        return _over(r, "failed", End(), but=worker, dead=dead)
    if losses >= limits.max_attempts or (r.begun and r.migrations >= limits.max_migrations):
        return _over(r, "failed", Fail(error), but=worker, dead=dead)
    told = [*_cancels(r, "failed", but=worker), Retry(r.attempt, worker, error.message, r.begun), *_let_go(r, dead)]
    after = replace(r, losses=losses, migrations=r.migrations + r.begun, shunned=r.shunned | {worker}, lost=now, late=late,
        attempt=r.attempt + 1,  # now: output of the lost attempt is stale from here on
    )  # fmt: skip
    if r.begun and r.choices > 1:
        return replace(after, phase=Phase.SPLIT, open=r.left, until=math.inf), [*told, Split(r.attempt)]
    after, effects = _place(after)
    return after, [*told, *effects]


def _give_up(r: Request, error: GatewayError) -> Step:
    """No worker takes it."""
    told = r.begun or (r.late and error.status in (429, 503))
    return _over(r, "failed", Fail(errors.not_continued(error, r.late) if told else error))


def _over(r: Request, reason: str, last: End | Fail | Shed, but: str = "", dead: str = "") -> Step:
    """Whatever it holds in its phase is given back; `last` is what the client hears. `reason` "": its legs know."""
    effects = [*(_cancels(r, reason, but) if reason else ()), *_let_go(r, dead)]
    if r.phase is Phase.SPLIT:
        effects.append(EndParts())
    if r.queued:
        effects.append(LeaveLine())
    return replace(r, phase=Phase.OVER, queued=0.0, until=math.inf), [*effects, last]


def _cancels(r: Request, reason: str, but: str = "") -> list[Any]:
    """Tell the legs that may hold something for it; `but` has stopped already."""
    legs = (r.decode,) if r.phase is Phase.ADMITTING else r.watched
    return [Cancel(r.attempt, r.role(leg), leg, reason) for leg in legs if leg != but]


def _let_go(r: Request, dead: str = "") -> list[Any]:
    """`dead`: the prober has let go of it by itself."""
    return [LetGo(r.attempt, tuple(leg for leg in r.watched if leg != dead))] if r.phase in HELD else []
