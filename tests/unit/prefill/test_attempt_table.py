"""docs/handoff.md, section 6, prefill: every row holds for the machine in each phase it is about, what no row mentions does
nothing, and whatever comes in whatever order, an attempt is begun, told and given back once."""

import itertools
import random
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kv.grants import events as ticket
from headrace.prefill import attempt
from headrace.prefill.attempt import TICKET, WORKING, Attempt, Phase

sys.path.insert(0, str(Path(__file__).parents[2] / "simulation"))
from table import prefill_effects, prefill_words, request_rows

ROWS = [row for row in request_rows("prefill") if row[1] not in ("status", "bind refused: full")]
WAY = list(request_rows("the way of a prompt at prefill"))
ELSEWHERE = {("ticket", "deadline")}  # the writer's machine has it
LOST, FAILED = attempt.Ends("lost", "it was silent"), attempt.Ends("transfer", "it broke")
EVENTS = {  # the table's words -> events, one after the other: a message, and what its facts were judged to be
    "run": [attempt.Run(), attempt.Judged()],
    "run, much is queued": [attempt.Run(), attempt.Judged("busy")],
    "run, too long": [attempt.Run(), attempt.Judged("invalid")],
    "run, other hashes": [attempt.Run(), attempt.Judged("mismatch")],
    "run, draining": [attempt.Run(), attempt.Judged("draining")],
    "cancel": [attempt.Cancel()],
    "bind refused: stale": [attempt.Ends("stale", "the attempt is over")],
    "decode lost": [LOST],
    "deadline": [attempt.Ends("deadline", "not computed")],
}
STEPS = {
    "hashes fit": attempt.Hashed(),
    "hashes differ": attempt.Hashed("they differ"),
    "looked up": attempt.LookedUp(),
    "looked up, with images": attempt.LookedUp(),
    "images are here": attempt.Saw(),
    "has memory": attempt.Begun(),
    "not bound": attempt.NotBound(0.05),
    "bound": attempt.Bound(),
    "bound, was denied": attempt.Bound(denied=True),
    "all is placed": attempt.Placed(),
    "ticket is over": attempt.TicketOver(),
    "it fails here": FAILED,
    "it fails here, its ticket lives": LOST,
    "cancel": attempt.Cancel(),
}
PHASES = {"working": WORKING, "ticket": TICKET, "unknown": (Phase.UNKNOWN,), "over": (Phase.OVER,)}


def happen(before: Attempt, events: list) -> tuple[Attempt, list]:
    after, effects = attempt.step(before, events[0], 0.0)
    asked = any(isinstance(effect, attempt.Judge) for effect in effects)
    return attempt.step(after, events[1], 0.0) if asked else (after, effects)


def group(phase: Phase) -> str:
    return next(words for words, phases in PHASES.items() if phase in phases)


def in_words(effects: list) -> list[str]:
    """Whom the writer's machine tells when it is told of an end (section 3: rows of `cancel`, `owner lost`, `leg fails`)."""
    words = []
    for effect in effects:
        match effect:
            case attempt.Answer(name, code):
                words.append(f"{name} {code}".strip())
            case attempt.TellGateway():
                words.append("gateway told")
            case attempt.TellDecode() | attempt.ToTicket(ticket.Cancelled()):
                words.append("decode told")
            case attempt.ToTicket(ticket.OwnerLost()):
                words.append("gateway told")
    return words


@pytest.mark.parametrize(("words", "event", "after", "said"), [r for r in ROWS if r[:2] not in ELSEWHERE], ids=str)
def test_row(words, event, after, said):
    for phase in PHASES[words]:
        got, effects = happen(Attempt(phase), EVENTS[event])
        assert group(got.phase) == after and sorted(in_words(effects)) == sorted(said), phase
        ends = got.phase is Phase.OVER and phase is not Phase.OVER
        assert any(isinstance(effect, attempt.Entomb) for effect in effects) >= ends, "what is over is refused from then on"
        holds = phase in WORKING or phase is Phase.WRITING
        assert any(isinstance(effect, attempt.StopWork) for effect in effects) == (ends and holds)


@pytest.mark.parametrize(("phase", "words", "after", "effects"), WAY, ids=str)
def test_step_of_the_way(phase, words, after, effects):
    before = Attempt(Phase(phase), "with images" in words or phase == "seeing", "its ticket lives" in words)
    got, wanted = attempt.step(before, STEPS[words], 0.0)
    assert (got.phase.value, prefill_effects(wanted)) == (after, effects)
    assert prefill_words(before, STEPS[words]) == words
    assert got.images == before.images or got.phase is Phase.OVER


def test_every_phase_and_every_word_is_in_the_tables():
    assert {row[1] for row in ROWS} == EVENTS.keys() and {row[1] for row in WAY} == STEPS.keys()
    assert {row[0] for row in WAY} == {phase.value for phase in Phase} - {"unknown"}


def test_pairs_without_a_row_do_nothing():
    mentioned = {(phase, words.split(",")[0]) for phase, words, *_ in WAY}
    quiet = 0
    for phase, (words, event) in itertools.product(Phase, STEPS.items()):
        if (phase.value, words.split(",")[0]) not in mentioned and words != "cancel":
            assert attempt.step(Attempt(phase), event, 0.0) == (Attempt(phase), []), f"{phase} + {words}"
            quiet += 1
    assert quiet > 50


ONCE = (attempt.Take, attempt.LookUp, attempt.See, attempt.Submit, attempt.Write, attempt.TellGateway, attempt.TellDecode,
        attempt.StopWork)  # fmt: skip
ALL = [*STEPS.values(), *(event for events in EVENTS.values() for event in events[:1])]


@settings(max_examples=500, deadline=None)
@given(st.integers(0, (1 << 32) - 1))
def test_whatever_comes_it_is_begun_told_and_given_back_once(seed):
    """Every event may come at any time, doubled or late."""
    rng = random.Random(seed)
    state, done, alive = Attempt(), Counter(), False
    for _ in range(40):
        good = [event for (phase, words), event in NEXT.items() if phase == state.phase.value] if rng.random() < 0.7 else ALL
        event = rng.choice(good or ALL)
        before = state
        answer = attempt.Judged("" if rng.random() < 0.9 else "busy", rng.random() < 0.3)
        state, effects = happen(state, [event, answer])
        done.update(type(effect) for effect in effects)
        answers = [effect for effect in effects if isinstance(effect, attempt.Answer)]
        assert len(answers) == isinstance(event, attempt.Run | attempt.Cancel), "whoever sent a message has one answer"
        alive = (alive or state.phase in TICKET) and not isinstance(event, attempt.TicketOver)
        if event == LOST and alive:
            assert attempt.ToTicket(ticket.OwnerLost()) in effects, "the writer's machine would wait for the dead"
        assert before.phase is not Phase.OVER or state.phase is Phase.OVER
    assert all(done[kind] <= 1 for kind in ONCE), done
    if state.phase is Phase.OVER:
        assert done[attempt.Entomb] >= 1 and done[attempt.TellGateway] == done[attempt.TellDecode]


NEXT = {(phase, words): STEPS[words] for phase, words, *_ in WAY if words not in ("cancel", "it fails here")} | {
    ("unknown", "run"): attempt.Run()
}


def test_what_may_come_next_leads_to_every_end():
    """The property is about something: random ways are bound, written, cancelled, and come to their end."""
    seen: set[Phase] = set()
    for seed in range(50):
        rng, state = random.Random(seed), Attempt()
        for _ in range(30):
            events = [event for (phase, _), event in NEXT.items() if phase == state.phase.value]
            if events:
                state, _ = happen(state, [rng.choice(events), attempt.Judged("", rng.random() < 0.5)])
            seen.add(state.phase)
    assert seen == set(Phase) - {Phase.UNKNOWN}
