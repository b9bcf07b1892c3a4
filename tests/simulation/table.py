"""The tables of `docs/handoff.md` as data, and which of their rows happened.

Knows how a row is written and which words of the tables stand for which event of `headrace.kv.grants`. `recorded` wraps a
machine's functions: what they do is counted by row, and what no row says is told. Does not know schedules or services.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.decode import attempt
from headrace.decode.attempt import Phase
from headrace.gateway import choice, request
from headrace.kv.grants import effects as fx
from headrace.kv.grants import events as ev
from headrace.kv.grants import owner, pins, store, writer
from headrace.prefill import attempt as prefill

DOC = Path(__file__).parents[2] / "docs" / "handoff.md"
PHASES = {
    "owner": owner.PHASES, "writer": (*writer.PHASES, *(f"{p}, in flight" for p in ("writing", *writer.STOPPED))),
    "store": store.PHASES, "held": pins.HELD_PHASES, "reading": pins.READING_PHASES,
}  # fmt: skip
REQUESTS = {"decode": "decode", "gateway": "gateway", "output": "output of a choice",
            "prefill": "the way of a prompt at prefill"}  # machine: heading in section 6
Row = tuple[str, str, str]  # machine, phase, words of the event


def written() -> Iterator[tuple[str, str, str, str, str]]:
    """(machine, phase, event, new phase, effects) as section 3 writes them, one per phase ("any" is kept)."""
    machine = ""
    for line in DOC.read_text().split("## 3.")[1].split("\n## ")[0].splitlines():
        if line.startswith("### "):
            machine = line.split()[1]
        elif line.startswith("|") and not re.match(r"\| *(phase|-)", line):
            phases, event, after, effects = (cell.strip() for cell in line.strip("|").split("|"))
            in_flight = phases.endswith(", in flight")
            for phase in phases.removesuffix(", in flight").split(", "):
                yield machine, f"{phase}, in flight" if in_flight else phase, event, after, effects


def rows() -> dict[Row, tuple[str, list[str]]]:
    """-> (new phase, effects in the table's words) of each row."""
    out: dict[Row, tuple[str, list[str]]] = {}
    for machine, words, event, after, effects in written():
        for phase in PHASES[machine] if words == "any" else (words,):
            new = phase.split(",")[0] if after == "same" else after
            out[machine, phase, event] = (new, [] if effects == "-" else effects.split(", "))
    for machine, heading in REQUESTS.items():
        for phase, event, after, what in request_rows(heading):
            out[machine, phase, event] = (after, what)
    return out


def request_rows(role: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """(phase, event, new phase, what else) as section 6 writes them for a role."""
    section = DOC.read_text().split("## 6.")[1].split(f"### {role}\n")[1].split("\n### ")[0]
    for line in section.splitlines():
        if line.startswith("|") and not re.match(r"\| *(phase|-)", line):
            phases, event, after, what = (cell.strip() for cell in line.strip("|").split("|"))
            for phase in phases.split(", "):
                yield phase, event, phase if after == "same" else after, [] if what == "-" else what.split(", ")


def show(effect: Any) -> str:
    """An effect in the table's words."""
    match effect:
        case fx.Answer(verdict):
            return f"Answer {verdict}"
        case fx.Valid(valid):
            return f"Valid {str(valid).lower()}"
    return type(effect).__name__


# ------------------------------------------------------------------ events in the table's words


def _owner_words(t: owner.Ticket, event: Any, now: float) -> str:
    checks = ", checksums on" if t.verify else ""
    match event:
        case ev.FlagSeen(value):
            mine = value == owner.flag_value(t.generation)
            if not mine:
                return "flag of another generation"
            if t.flag:
                return "flag again"
            return "flag of this generation" + (checks if t.phase == owner.COMMITTED else "")
        case ev.Committed(generation, nbytes):
            if generation != t.generation:
                return "commit of another generation"
            if t.phase == owner.RELEASED:
                return "commit, was admitted" if t.outcome == "admitted" else "commit, was not admitted"
            if t.phase != owner.BOUND:
                return "commit"
            if t.nbytes not in (-1, nbytes):
                return "commit, other byte count"
            return "commit, flag seen" + checks if t.flag else "commit, no flag"
        case ev.WriterDone(generation):
            return "writer_done" if generation == t.generation else "writer_done of another generation"
        case ev.Verified(good):
            return "checksums fit" if good else "checksums do not fit"
        case None if t.phase == owner.BOUND and now < t.expires:
            return "0.25 s later, flag without record"
        case None:
            return "0.25 s later" if t.quarantined else "lease over"
    return _simple(event)


def _writer_words(t: writer.Ticket, event: Any, now: float) -> str:
    late = now >= min(t.expires, t.deadline)
    match event:
        case ev.WriteBegins():
            return "write begins, lease over" if late and t.phase in (writer.BOUND, writer.WRITING) else "write begins"
        case ev.WriteEnded() if t.phase in writer.STOPPED and t.give_up == 0.0:
            return "write ends, owner lost"
        case ev.WriteEnded(error):
            return "write ends with an error" if error else "write ends"
        case ev.Renewed():
            return "bind answered again"
        case None if t.phase in (writer.BOUND, writer.WRITING):
            return "lease over" if t.expires <= t.deadline else "deadline over"
        case None if t.phase == writer.COMMITTED:
            return "deadline over" if now >= t.deadline else "0.25 s later"
        case None:
            return "30 s later" if now >= t.give_up else "0.25 s later"
    return _simple(event)


def _store_words(t: store.Grant, event: Any, now: float) -> str:
    match event:
        case ev.Committed(generation) if generation != t.generation:
            return "commit of another generation"
        case ev.Committed() if t.phase == store.RELEASED:
            return "commit, was stored" if t.outcome == "stored" else "commit, was not stored"
        case ev.Committed():
            return "commit"
        case None:
            return "lease over" if t.phase == store.OPEN else "0.25 s later"
    return _simple(event)


def _held_words(t: pins.Held, event: Any, now: float) -> str:
    if isinstance(event, ev.Released) and t.phase == pins.PINNED and now >= t.expires:
        return "release, lease over"
    return _simple(event)


def _reading_words(t: pins.Reading, event: Any, now: float) -> str:
    match event:
        case ev.ReadBegins():
            return "read begins, lease over" if t.phase == pins.FOUND and now >= min(t.expires, t.deadline) else "read begins"
        case None if now >= t.deadline:
            return "deadline over"
        case None if t.phase == pins.ASKING and now < t.expires:
            return "0.25 s later"
    return _simple(event)


def _simple(event: Any) -> str:
    match event:
        case None:
            return "lease over"
        case ev.WriterStatus(state):
            return f"status: {state}"
        case ev.CommitAnswered(verdict):
            return f"verdict: {verdict}"
        case ev.ReadEnded(good):
            return f"read ends, {'good' if good else 'bad'}"
        case ev.ReleaseAnswered(valid):
            return f"release answered: {'' if valid else 'not '}valid"
    return _WORDS[type(event)]


def _decode_words(t: attempt.Attempt, event: Any, now: float) -> str:
    match event:
        case attempt.Admit() if t.phase is Phase.UNKNOWN:
            return ""  # to be judged
        case attempt.Judged(code):
            return {"": "admit", "full": "admit, no room", "invalid": "admit, too long", "draining": "admit, draining"}.get(
                code, ""
            )
        case attempt.Bind(writer):
            if t.phase is Phase.CREDIT:
                return ""
            return "bind by another writer" if t.phase is Phase.BOUND and writer != t.writer else "bind"
        case attempt.BindJudged(_, code):
            return {"": "bind", "full": "bind, no room"}.get(code, "bind, other layout")
        case attempt.Cancel(stop):
            return "cancel, text stop" if stop and t.phase is Phase.RUNNING else "cancel"
        case attempt.HandedOver(good):
            return "hand-off complete" if good else "hand-off does not fit"
        case attempt.Ends() | attempt.EngineFailed() if t.phase in (Phase.OVER, Phase.TOMBSTONE, Phase.UNKNOWN):
            return ""
    return _DECODE[type(event)]


_DECODE = {
    attempt.Admit: "admit", attempt.Fail: "fail", attempt.Resume: "resume", attempt.Superseded: "admit of a newer attempt",
    attempt.Ends: "deadline", attempt.EngineFailed: "engine fails", attempt.LastToken: "last token", attempt.Computes: "",
}  # fmt: skip


def in_words(effects: list[Any]) -> list[str]:
    """What follows for a request, in the words of section 6, in its order."""
    words: list[str] = []
    for effect in effects:
        match effect:
            case attempt.Answer(name, code):
                words.append(f"{name} {code}".strip())
            case attempt.CancelTicket():
                words += ["ticket cancelled", "writer told"]
            case attempt.Tell() | attempt.TellStop():
                words.append("gateway told")
            case attempt.GiveBack():
                words.append("credit back")
    return words


# ------------------------------------------------------------------ the gateway's


def request_words(r: request.Request, event: Any, now: float) -> str:
    """An event of a request at the gateway; None: time. "": nothing that a row is about."""
    lost = ", images are lost" if r.blind else ""
    held = r.phase in request.HELD or r.phase is request.Phase.ADMITTING
    attempt = getattr(event, "attempt", r.attempt)
    if r.phase is request.Phase.OVER or attempt != r.attempt:
        return ""
    match event:
        case None if now >= r.deadline:
            return "deadline"
        case None:
            waits = "worker" if r.nobody else "queue"
            return {"line": f"`{waits}_seconds` over", "offline": "`bus_grace_seconds` over"}.get(
                r.phase.value, "`command_seconds` over"
            )
        case request.Placed(ahead):
            return "others wait" if ahead else f"nobody waits{lost}"
        case request.Called():
            return f"its turn{lost}" if r.phase is request.Phase.LINE else ""
        case request.NoPair(_, coming):
            return f"no pair, {_why_no_pair(r, coming, now)}"
        case request.Seen(error):
            return "images are known" if error is None else "images can't be known"
        case request.Refused(_, _, refusal):
            code = refusal.code if refusal is not None else ""
            asked = r.phase is request.Phase.ADMITTING
            return "no answer" if not code else f"refused as {code}" if code in ("invalid", *["stale"] * asked) else "refused"
        case request.Problem(_, worker, problem) if held:
            whose = f"problem of {'decode' if worker == r.decode else 'prefill'}"
            if problem.status < 500 and problem.code not in request.RETRY_CODES:
                return f"{whose}, of the request"
            return f"{whose}{_last_time(r)}"
        case request.Died(worker):
            if worker not in r.watched:
                return ""
            return ("decode" if worker == r.decode else "prefill") + f" died{_last_time(r)}"
        case request.Unrepeatable():
            return f"output can't be repeated{_last_time(r)}"
        case request.ChoiceOver(_, _, finished):
            rest = ", not all for decode" if r.open > finished else ""
            return f"the last choice is over{rest}" if r.left == 1 and r.phase.value == "streaming" else "a choice is over"
        case request.ChoiceFinished():
            return "the last choice is finished" if r.open == 1 else "a choice is finished"
    return _GATEWAY.get(type(event), "")


def _why_no_pair(r: request.Request, coming: bool, now: float) -> str:
    full = r.refusal is not None and r.refusal.code in ("busy", "full")
    if r.shunned:
        return "some are shunned" + (", the others are full" if full and now < r.lost + r.limits.worker else "")
    if r.refusal is not None and r.refusal.code not in request.WAIT_CODES:
        return "all are full" if full else "refused for good"
    waited = now - (r.nobody or now)
    if waited < r.limits.worker:
        return "nobody is there"
    if coming and waited >= max(r.limits.worker, r.limits.queue):
        return "one was starting for `queue_seconds`"
    return "nobody came in `worker_seconds`" + (", one is starting" if coming else "")


def _last_time(r: request.Request) -> str:
    """What is particular about this loss."""
    if not r.left:
        return ""
    limits = r.limits
    if r.losses + 1 >= limits.max_attempts or (r.begun and r.migrations >= limits.max_migrations):
        return ", the last attempt"
    return ", several choices" if r.begun and r.choices > 1 else ""


_GATEWAY = {
    request.Arrives: "arrives", request.Pair: "a pair", request.OtherOutput: "only another checkpoint is there",
    request.LineFull: "the line is full", request.BusBack: "the bus is back", request.Admitted: "admitted",
    request.Accepted: "accepted", request.Offline: "off the bus", request.FirstOutput: "first output",
    request.Leaves: "client leaves", request.Breaks: "it breaks here",
}  # fmt: skip


def request_effects(effects: list[Any]) -> list[str]:
    """In the table's words, in their order."""
    words: list[str] = []
    for effect in effects:
        match effect:
            case request.Cancel(_, role):
                words.append(f"Cancel {role}")
            case request.Fail(error):
                words.append(f"Fail {error.code}")
            case request.LeaveLine():
                pass
            case _:
                words.append(type(effect).__name__)
    return words


def choice_phase(c: choice.Choice) -> str:
    return "finished" if c.finished else "stopped" if c.kept >= 0 else "asking" if c.asking else "open"


def choice_words(c: choice.Choice, event: Any) -> str:
    match event:
        case choice.Came(index, _, finish) if c.kept >= 0:
            return "next index, the last" if finish else "next index"
        case choice.Came(index, count, finish):
            if index > c.next:
                return "later index"
            if index + count < c.next or (index + count == c.next and not finish):
                return "known index"
            if finish == "abort":
                return "next index, ended without a reason"
            return "next index, the last" if finish else "known and next index" if index < c.next else "next index"
        case choice.Missing():
            return "messages were lost"
        case choice.Answered():
            return "answered, more is missing" if c.behind else "answered"
        case choice.Unanswered():
            return "no answer"
        case choice.Unreachable():
            return "nobody can be asked" + (", more is missing" if c.behind else "")
    return ""


def prefill_words(a: prefill.Attempt, event: Any) -> str:
    match event:
        case prefill.LookedUp():
            return "looked up, with images" if a.images else "looked up"
        case prefill.Hashed(wrong):
            return "hashes differ" if wrong else "hashes fit"
        case prefill.Bound(denied):
            return "bound, was denied" if denied else "bound"
        case prefill.Ends() if a.ticket:
            return "it fails here, its ticket lives"
        case prefill.Ends(""):
            return "cancel"
    return _PREFILL.get(type(event), "")


_PREFILL = {
    prefill.Saw: "images are here", prefill.Begun: "has memory", prefill.NotBound: "not bound", prefill.Placed: "all is placed",
    prefill.TicketOver: "ticket is over", prefill.Ends: "it fails here", prefill.Cancel: "cancel",
}  # fmt: skip


def prefill_effects(effects: list[Any]) -> list[str]:
    """Without answers. A late cancel is remembered for longer, which changes nothing."""
    names = [type(effect).__name__ for effect in effects if not isinstance(effect, prefill.Answer)]
    return [] if names == ["Entomb"] and isinstance(effects[-1], prefill.Answer) else names


_WORDS = {
    ev.Renewed: "bind again", ev.WriterFailed: "fail", ev.WriterLost: "writer lost", ev.Cancelled: "cancel",
    ev.WriterDone: "writer_done", ev.Fenced: "fenced", ev.SlabTaken: "slab taken", ev.Placed: "placed",
    ev.LegFailed: "leg fails", ev.OwnerLost: "owner lost", ev.DoneAnswered: "writer_done answered", ev.Checked: "checked",
    ev.Released: "release", ev.WorkerGone: "worker gone",
}  # fmt: skip
_IN_WORDS: dict[str, Callable[[Any, Any, float], str]] = {
    "owner": _owner_words, "writer": _writer_words, "store": _store_words, "held": _held_words, "reading": _reading_words,
    "decode": _decode_words,
}  # fmt: skip
MACHINES = (
    ("owner", owner, "step", "tick"), ("writer", writer, "step", "tick"), ("store", store, "step", "tick"),
    ("held", pins, "held_step", "held_tick"), ("reading", pins, "reading_step", "reading_tick"),
    ("decode", attempt, "step"), ("gateway", request, "step", "tick"), ("output", choice, "step"),
    ("prefill", prefill, "step"),
)  # fmt: skip


CANNOT = {  # rows that these services never bring about, and why; the unit tests run them all the same
    r"(owner|store): .*of another generation": "ids of tickets and grants are used once",
    r"owner: bound: commit, other byte count": "no writer miscounts",
    r"writer: bound: placed": "a slab is always written first",
    r"writer: .*in flight: (write begins.*|placed|writer_done answered)": "one operation at a time; done is told after it",
    r"writer: (committed|failed|expired|cancelled|released): write begins": "its task has ended by then",
    r"store: .*: writer_done": "workers send release",
    r"held: .*gone.*": "pins of a dead worker end with their lease",
    r"reading: .*": "the kvstore client follows the rows in its own code",
    r"decode: unknown: admit, too long": "no gateway asks for it",
    r"gateway: .*(as invalid|of the request|another checkpoint.*|for good)": "workers are alike, and requests are good",
    r"gateway: (placing|new): (client leaves|it breaks here)": "takes no time",
    r"prefill: .*hashes differ": "gateways hash well",
    r"output: .*(a text stop|without a reason)": "the sink says so, which is another step; and whoever ends says why",
}


def cannot(row: Row) -> str:
    """Why a row does not happen in any simulation; "" when it may."""
    return next((why for pattern, why in CANNOT.items() if re.fullmatch(pattern, ": ".join(row))), "")


class Table:
    """Counts of rows; `told(what)` is called when a machine does what no row says."""

    def __init__(self, told: Callable[[str], None]) -> None:
        self.rows = rows()
        self.told, self.strict = told, True
        self.counts: Counter[Row] = Counter()

    def recorded(self, machine: str, function: Callable) -> Callable:
        """A machine's `step` or `tick`, watched."""
        if machine in ("gateway", "output", "prefill"):
            return getattr(self, f"_{machine}_{function.__name__}")(function)
        words_of = _IN_WORDS[machine]

        @functools.wraps(function)
        def step(state: Any, event: Any, now: float) -> Any:
            after, effects = function(state, event, now)
            if machine == "decode":
                self._note_request(state, words_of(state, event, now), after, effects)
            else:
                self._note(machine, state, words_of(state, event, now), after, effects)
            return after, effects

        @functools.wraps(function)
        def tick(state: Any, now: float) -> Any:
            after, effects = function(state, now)
            if after is not state or effects:
                self._note(machine, state, words_of(state, None, now), after, effects)
            return after, effects

        return tick if function.__name__.endswith("tick") else step

    def _note_request(self, state: attempt.Attempt, words: str, after: attempt.Attempt, effects: list[Any]) -> None:
        row = ("decode", state.phase.value, words)
        expected, said = self.rows.get(row), in_words(effects)
        if expected is not None:
            self.counts[row] += 1
            mine = [
                word for word in expected[1] if word != "Admitted" or "newer" not in words
            ]  # that is the newer one's answer
            if after.phase.value != expected[0] or sorted(said) != sorted(mine) and not self._told_otherwise(words):
                self.told(f"decode, {state.phase.value}, {words}: {after.phase.value}, {said}; the table says {expected}")
        elif words and (said or after.phase is not state.phase):
            self.told(f"decode, {state.phase.value}, {words}: {after.phase.value}, {said}; no row says so")

    def _gateway_step(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def step(r: request.Request, event: Any, now: float) -> Any:
            after, effects = function(r, event, now)
            self._note_gateway(r, request_words(r, event, now), after, effects)
            return after, effects

        return step

    def _gateway_tick(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def tick(r: request.Request, now: float) -> Any:
            after, effects = function(r, now)
            if effects:
                self._note_gateway(r, request_words(r, None, now), after, effects)
            return after, effects

        return tick

    def _output_step(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def step(c: choice.Choice, event: Any, now: float = 0.0) -> Any:
            after, effects = function(c, event, now)
            delivered = isinstance(event, choice.Delivered)  # belongs to the row of what came
            if delivered or (c.asking and c.kept >= 0):  # the table has "stopped" without a question only
                return after, effects
            done = [type(effect).__name__ for effect in effects]
            row = ("output", choice_phase(c), choice_words(c, event))
            expected = self.rows.get(row)
            if expected is not None:
                self.counts[row] += 1
                said = [word for word in expected[1] if word != "Over"]
                if (done, choice_phase(after)) == (said, expected[0]):
                    return after, effects
            elif not done:
                return after, effects
            self.told(f"{', '.join(row)}: {choice_phase(after)}, {done}; the table says {expected}")
            return after, effects

        return step

    def _prefill_step(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def step(a: prefill.Attempt, event: Any, now: float) -> Any:
            after, effects = function(a, event, now)
            row = ("prefill", a.phase.value, prefill_words(a, event))
            expected, done = self.rows.get(row), prefill_effects(effects)
            if expected is not None:
                self.counts[row] += 1
            if a.phase is not prefill.Phase.UNKNOWN and (after.phase.value, done) != (expected or (a.phase.value, [])):
                self.told(f"{', '.join(row)}: {after.phase.value}, {done}; the table says {expected}")
            return after, effects

        return step

    def _note_gateway(self, r: request.Request, words: str, after: request.Request, effects: list[Any]) -> None:
        row = ("gateway", r.phase.value, words)
        expected, done = self.rows.get(row), request_effects(effects)
        if expected is not None:
            self.counts[row] += 1
            said = [re.sub("^Fail .*", "Fail", word) for word in done]  # which error depends on what went wrong
            if (after.phase.value, said) == (expected[0], [re.sub("^Fail .*", "Fail", word) for word in expected[1]]):
                return
        elif not done and after.phase is r.phase:
            return
        self.told(f"{', '.join(row)}: {after.phase.value}, {done}; the table says {expected}")

    @staticmethod
    def _told_otherwise(words: str) -> bool:
        """The last token is told by the step that gave it, not by the attempt's machine."""
        return words == "last token"

    def _note(self, machine: str, state: Any, words: str, after: Any, effects: list[Any]) -> None:
        phase = state.phase
        if machine == "writer" and state.in_flight:
            phase += ", in flight"
        row = (machine, phase, words)
        expected = self.rows.get(row)
        done = [show(effect) for effect in effects]
        if expected is not None:
            self.counts[row] += 1
            if (after.phase, done) != expected:
                self.told(f"{machine}, {phase}, {words}: {after.phase}, {done}; the table says {expected[0]}, {expected[1]}")
        elif done or after.phase != state.phase:
            self.told(f"{machine}, {phase}, {words}: {after.phase}, {done}; no row says so")
