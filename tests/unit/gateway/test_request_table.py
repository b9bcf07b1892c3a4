"""docs/handoff.md, section 6, gateway and output of a choice: every row holds, and what no row mentions does nothing."""

import itertools
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.bus import messages as m
from headrace.gateway import choice, errors, request
from headrace.gateway.choice import Came, Choice
from headrace.gateway.dispatch import CARRIED_OUT
from headrace.gateway.request import Phase, Request

sys.path.insert(0, str(Path(__file__).parents[2] / "simulation"))
from table import choice_phase, choice_words, request_effects, request_rows, request_words

ROWS = list(request_rows("gateway"))
OUTPUT_ROWS = list(request_rows("output of a choice"))
NOW, LIMITS = 100.0, request.Limits()
LATE = NOW + 1000.0


def refused(code: str):
    answer = m.Refused(code, "why") if code else None
    return lambda r: request.Refused(r.attempt, r.decode if r.phase is Phase.ADMITTING else r.prefill, answer)


def problem(leg: str, status: int = 503, code: str = "broken"):
    return lambda r: request.Problem(r.attempt, getattr(r, leg), m.Problem(status, code, "why"))


def died(leg: str):
    return lambda r: request.Died(getattr(r, leg), leg, "it was silent")


EVENTS = {  # the table's words -> what the state has besides its phase, and the event; None: time
    "arrives": ({}, request.Arrives(LIMITS)),
    "nobody waits": ({}, request.Placed(False)),
    "others wait": ({}, request.Placed(True)),
    "nobody waits, images are lost": ({"blind": True}, request.Placed(False)),
    "a pair": ({}, request.Pair("p2", "d2")),
    "no pair, some are shunned": ({"shunned": frozenset({"d1"})}, request.NoPair("worker")),
    "no pair, some are shunned, the others are full": (
        {"shunned": frozenset({"d1"}), "lost": NOW - 1.0, "refusal": m.Refused("busy", "why")}, request.NoPair("worker")
    ),
    "no pair, all are full": ({"refusal": m.Refused("full", "why")}, request.NoPair("worker")),
    "no pair, nobody is there": ({}, request.NoPair("worker")),
    "no pair, nobody came in `worker_seconds`": ({"nobody": NOW - LIMITS.worker}, request.NoPair("worker")),
    "no pair, nobody came in `worker_seconds`, one is starting": (
        {"nobody": NOW - LIMITS.worker}, request.NoPair("worker", True)
    ),
    "no pair, one was starting for `queue_seconds`": ({"nobody": NOW - LIMITS.queue}, request.NoPair("worker", True)),
    "no pair, refused for good": ({"refusal": m.Refused("mismatch", "why")}, request.NoPair("worker")),
    "only another checkpoint is there": ({}, request.OtherOutput("worker")),
    "its turn": ({}, request.Called()),
    "its turn, images are lost": ({"blind": True}, request.Called()),
    "the line is full": ({}, request.LineFull(7)),
    "`queue_seconds` over": ({"until": NOW, "queued": 1.0}, None),
    "`worker_seconds` over": ({"until": NOW, "queued": 1.0, "nobody": 1.0}, None),
    "`command_seconds` over": ({"until": NOW}, None),
    "`bus_grace_seconds` over": ({"until": NOW}, None),
    "images are known": ({"blind": True}, request.Seen()),
    "images can't be known": ({"blind": True}, request.Seen(errors.no_vision(True))),
    "the bus is back": ({}, request.BusBack()),
    "admitted": ({}, lambda r: request.Admitted(r.attempt, 3)),
    "accepted": ({}, lambda r: request.Accepted(r.attempt)),
    "refused": ({}, refused("busy")),
    "refused as stale": ({}, refused("stale")),
    "refused as invalid": ({}, refused("invalid")),
    "no answer": ({}, refused("")),
    "off the bus": ({}, lambda r: request.Offline(r.attempt)),
    "first output": ({}, request.FirstOutput()),
    "problem of decode": ({}, problem("decode")),
    "problem of prefill": ({}, problem("prefill")),
    "problem of decode, of the request": ({}, problem("decode", 400, "invalid")),
    "problem of prefill, of the request": ({}, problem("prefill", 400, "invalid")),
    "decode died": ({}, died("decode")),
    "prefill died": ({}, died("prefill")),
    "output can't be repeated": ({}, lambda r: request.Unrepeatable(r.attempt, "not kept")),
    "a choice is over": ({"choices": 2, "left": 2, "open": 2}, request.ChoiceOver(0, "stop", False)),
    "the last choice is over": ({}, request.ChoiceOver(0, "stop", True)),
    "the last choice is over, not all for decode": ({}, request.ChoiceOver(0, "stop", False)),
    "a choice is finished": ({"choices": 2, "open": 2}, request.ChoiceFinished()),
    "the last choice is finished": ({"left": 0}, request.ChoiceFinished()),
    "client leaves": ({}, request.Leaves()),
    "deadline": ({"deadline": NOW}, None),
    "it breaks here": ({}, request.Breaks(errors.draining())),
}
LAST = {"losses": LIMITS.max_attempts - 1, "migrations": LIMITS.max_migrations}
for loss in ("problem of decode", "problem of prefill", "decode died", "prefill died", "output can't be repeated"):
    EVENTS[f"{loss}, the last attempt"] = (LAST, EVENTS[loss][1])
    if "prefill" not in loss:  # with output of this attempt its part is over
        EVENTS[f"{loss}, several choices"] = ({"choices": 2, "left": 2, "open": 2}, EVENTS[loss][1])


def state(phase: str, more: dict | None = None) -> Request:
    r = Request(LATE, 600.0, phase=Phase(phase), limits=LIMITS, attempt=4, prefill="p1", decode="d1")
    if phase in ("streaming", "settling", "split"):
        r = replace(r, begun=True)
    if phase == "settling":
        r = replace(r, left=0, until=LATE)
    return replace(r, **(more or {}))


def happen(r: Request, event) -> tuple[Request, list]:
    if event is None:
        return request.tick(r, NOW)
    return request.step(r, event(r) if callable(event) and not isinstance(event, type) else event, NOW)


@pytest.mark.parametrize(("phase", "event", "after", "words"), ROWS, ids=str)
def test_row(phase, event, after, words):
    more, happens = EVENTS[event]
    before = state(phase, more)
    got, effects = happen(before, happens)
    assert (got.phase.value, request_effects(effects)) == (after, words)
    told = happens(before) if callable(happens) else happens
    assert request_words(before, told, NOW) == event, "the words that simulation finds this row by"
    assert {type(effect) for effect in effects} <= CARRIED_OUT.keys(), "the dispatcher knows how"
    keys = [request.key(effect) for effect in effects if request.key(effect)]
    assert len(keys) == len(set(keys))
    if got.phase is Phase.OVER:
        again, nothing = happen(got, happens)
        assert (again, nothing) == (got, []), "what is over stays so"


@pytest.mark.parametrize(("phase", "event"), [row[:2] for row in ROWS if "arrives" not in row], ids=str)
def test_who_was_in_the_line_leaves_it_with_its_place_or_its_end(phase, event):
    more, happens = EVENTS[event]
    if event in ("the line is full",):
        return  # it never was in it
    got, effects = happen(state(phase, {"queued": 1.0} | more), happens)
    left = [effect for effect in effects if isinstance(effect, request.LeaveLine)]
    assert len(left) == (got.queued == 0.0)
    if got.phase in (Phase.OVER, Phase.RUNNING) or (got.phase is Phase.STREAMING and phase != "streaming"):
        assert left


def test_every_phase_and_every_word_is_in_the_table():
    assert {row[0] for row in ROWS} == {phase.value for phase in Phase} - {"over"}
    assert {row[1] for row in ROWS} == EVENTS.keys()


def test_pairs_without_a_row_do_nothing():
    """Whatever comes at another time than its own: late answers, deaths of workers that it no longer needs. Particulars of an
    event ("the last attempt") that no row of a phase has are judged by the row without them."""
    mentioned = {(phase, event.split(", ")[0]) for phase, event, *_ in ROWS}
    quiet = 0
    for phase, (words, (more, event)) in itertools.product(Phase, EVENTS.items()):
        before = state(phase.value, more)
        found = request_words(before, event(before) if callable(event) else event, NOW).split(", ")[0]
        cannot = phase is Phase.STREAMING and not before.left or event is None and phase in (Phase.NEW, Phase.PLACING)
        if not cannot and not {(phase.value, found), (phase.value, words.split(", ")[0])} & mentioned:
            assert happen(before, event) == (before, []), f"{phase} + {words}"
            quiet += 1
    assert quiet > 200


@pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.value)
@pytest.mark.parametrize("event", ["admitted", "accepted", "refused", "no answer", "off the bus", "problem of decode",
                                   "output can't be repeated"])  # fmt: skip
def test_another_attempts_answers_and_problems_do_nothing(phase, event):
    r = state(phase.value)
    stale = EVENTS[event][1](replace(r, attempt=r.attempt - 1))
    assert request.step(r, stale, NOW) == (r, [])


def test_a_worker_that_does_both_is_asked_counted_and_cancelled_once():
    both = replace(state("starting"), prefill="d1")
    for event in (refused("busy")(both), refused("")(both), request.Leaves()):
        _, effects = request.step(both, event, NOW)
        assert [e for e in effects if isinstance(e, request.Cancel)] == [
            request.Cancel(4, "decode", "d1", "client" if event == request.Leaves() else "failed")
        ]
    streams, effects = request.step(both, request.FirstOutput(), NOW)
    assert streams.watched == ("d1",) and effects == []


def test_what_has_output_and_finds_no_worker_says_that_its_worker_died():
    _, effects = request.step(replace(state("placing"), begun=True, nobody=1.0), request.NoPair("decode worker"), NOW)
    assert effects[-1].error.code == "worker_died" and "decode worker" in effects[-1].error.message


def test_who_lost_it_is_asked_again_when_nobody_else_has_room_for_long():
    """It may be well by now: only asked last."""
    full = m.Refused("busy", "why")
    waits = replace(state("placing"), shunned=frozenset({"d1"}), lost=NOW, refusal=full, excluded=frozenset({"d2"}))
    for later in (0.0, LIMITS.worker - 0.1):
        after, _ = request.step(waits, request.NoPair("worker"), NOW + later)
        assert after.phase is Phase.LINE and after.shunned == {"d1"}
    _, effects = request.step(waits, request.NoPair("worker"), NOW + LIMITS.worker)
    assert effects == [request.Choose(frozenset({"d2"}))]


# ---------------------------------------------------------------- output of a choice

CHOICES = {"open": Choice(5), "asking": Choice(5, asking=True), "stopped": Choice(5, 3), "finished": Choice(5, finished=True)}
OUTPUT = {  # words -> event, what the sink says that is kept
    "next index": (Came(5, 2), -1),
    "known index": (Came(2, 3), -1),
    "known and next index": (Came(3, 4), -1),
    "next index, the last": (Came(5, 2, "length", 7), -1),
    "next index, a text stop": (Came(5, 2), 6),
    "next index, the last, a text stop": (Came(5, 2, "stop", 7), 6),
    "next index, ended without a reason": (Came(5, 0, "abort"), -1),
    "later index": (Came(6, 1), -1),
    "messages were lost": (choice.Missing(), -1),
    "answered": (choice.Answered(), -1),
    "answered, more is missing": (choice.Answered(), -1),
    "no answer": (choice.Unanswered(), -1),
    "nobody can be asked": (choice.Unreachable(), -1),
    "nobody can be asked, more is missing": (choice.Unreachable(), -1),
}


def arrive(c: Choice, event, kept: int) -> tuple[Choice, list]:
    """An event, and what the sink said to what was delivered."""
    after, effects = choice.step(c, event)
    effects = list(effects)
    for effect in effects[:]:
        if isinstance(effect, choice.Deliver) and (kept >= 0 or effect.finish):
            after, more = choice.step(after, choice.Delivered(kept, effect.finish))
            effects += more
    return after, effects


@pytest.mark.parametrize(("phase", "words", "after", "said"), OUTPUT_ROWS, ids=str)
def test_row_of_a_choice(phase, words, after, said):
    before = replace(CHOICES[phase], behind="more is missing" in words)
    event, kept = OUTPUT[words]
    got, effects = arrive(before, event, kept)
    assert (choice_phase(got), [type(effect).__name__ for effect in effects]) == (after, said)
    assert choice_words(before, event) == words.removesuffix(", a text stop")
    if isinstance(event, Came) and "Deliver" in said:
        assert got.next == event.index + event.count and effects[0].skip == before.next - event.index
    if "Ask" in said:
        assert effects == [choice.Ask(5)]


def test_what_is_over_takes_nothing_more():
    assert {row[0] for row in OUTPUT_ROWS} == CHOICES.keys() - {"finished"} and {row[1] for row in OUTPUT_ROWS} == OUTPUT.keys()
    for event, kept in OUTPUT.values():
        assert arrive(CHOICES["finished"], event, kept) == (CHOICES["finished"], [])
