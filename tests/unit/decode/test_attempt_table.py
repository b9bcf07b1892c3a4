"""docs/handoff.md, section 6, decode: every row holds for the machine, and what no row mentions does nothing."""

import itertools
import sys
from pathlib import Path

import pytest

from headrace.decode import attempt
from headrace.decode.attempt import Attempt, Phase

sys.path.insert(0, str(Path(__file__).parents[2] / "simulation"))
from table import in_words, request_rows

ROWS = list(request_rows("decode"))
ADMIT, BIND = attempt.Admit(), attempt.Bind("writer")
EVENTS = {  # the table's words -> events, one after the other: a message, and what its facts were judged to be
    "admit": [ADMIT, attempt.Judged()],
    "admit, no room": [ADMIT, attempt.Judged("full")],
    "admit, too long": [ADMIT, attempt.Judged("invalid")],
    "admit, draining": [ADMIT, attempt.Judged("draining")],
    "admit of a newer attempt": [attempt.Superseded()],
    "bind": [BIND, attempt.BindJudged("writer")],
    "bind, no room": [BIND, attempt.BindJudged("writer", "full")],
    "bind, other layout": [BIND, attempt.BindJudged("writer", "mismatch")],
    "bind by another writer": [attempt.Bind("another")],
    "cancel": [attempt.Cancel()],
    "cancel, text stop": [attempt.Cancel(stop=True)],
    "resume": [attempt.Resume()],
    "fail": [attempt.Fail()],
    "deadline": [attempt.Ends()],
    "gateway silent": [attempt.Ends()],
    "hand-off complete": [attempt.HandedOver()],
    "hand-off does not fit": [attempt.HandedOver(False)],
    "engine fails": [attempt.EngineFailed()],
    "last token": [attempt.LastToken()],
}
ELSEWHERE = {"admit of an older attempt"}  # judged by the service: the attempt itself is never asked


def state(phase: str) -> Attempt:
    return Attempt(Phase(phase), "writer" if phase == "bound" else "")


def happen(before: Attempt, events: list) -> tuple[Attempt, list]:
    """Events in turn; those that judge are only told when the machine asked for it."""
    after, effects = attempt.step(before, events[0], 0.0)
    asked = any(isinstance(effect, attempt.Judge | attempt.JudgeBind) for effect in effects)
    return attempt.step(after, events[1], 0.0) if asked else (after, effects)


@pytest.mark.parametrize(("phase", "event", "after", "words"), [r for r in ROWS if r[1] not in ELSEWHERE], ids=str)
def test_row(phase, event, after, words):
    got, effects = happen(state(phase), EVENTS[event])
    expected = [word for word in words if not (word == "Admitted" and event == "admit of a newer attempt")]
    if event == "last token":  # told by the step that gave it
        expected.remove("gateway told")
    assert got.phase.value == after and sorted(in_words(effects)) == sorted(expected)
    assert (got.writer == "writer") == (after == "bound")
    gone = phase not in ("over", "tombstone") and after in ("over", "tombstone")
    assert any(isinstance(effect, attempt.Entomb) for effect in effects) >= gone, "what is over is refused from then on"


def test_every_phase_and_every_word_is_in_the_table():
    assert {row[0] for row in ROWS} == {phase.value for phase in Phase}
    assert {row[1] for row in ROWS} == EVENTS.keys() | ELSEWHERE


def test_pairs_without_a_row_do_nothing():
    mentioned = {(phase, event.split(",")[0].split(" by ")[0]) for phase, event, *_ in ROWS}
    quiet = 0
    for phase, (words, events) in itertools.product(Phase, EVENTS.items()):
        base = words.split(",")[0].split(" by ")[0]
        if (phase.value, base) not in mentioned and words != "engine fails":
            before = state(phase.value)
            assert happen(before, events) == (before, []), f"{phase} + {words}"
            quiet += 1
    assert quiet > 10


@pytest.mark.parametrize(("phase", "event"), [r[:2] for r in ROWS if r[1] not in ELSEWHERE], ids=str)
def test_the_second_time_gives_nothing_back_again(phase, event):
    """Whatever comes twice: credit, pins, ticket and engine are let go once."""
    after, _ = happen(state(phase), EVENTS[event])
    again, effects = happen(after, EVENTS[event])
    held = (attempt.GiveBack, attempt.CancelTicket, attempt.CancelEngine, attempt.Tell, attempt.TakeCredit)
    if after.phase in (Phase.OVER, Phase.TOMBSTONE):
        assert again.phase is after.phase and not any(isinstance(effect, held) for effect in effects)
    elif event != "admit":
        assert not any(isinstance(effect, attempt.TakeCredit) for effect in effects)
