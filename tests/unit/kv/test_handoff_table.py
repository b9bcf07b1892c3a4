"""docs/handoff.md, section 3, row by row: every row holds, and what no row mentions does nothing."""

import itertools
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.kv.grants import effects as fx
from headrace.kv.grants import events as ev
from headrace.kv.grants import owner, pins, store, writer

sys.path.insert(0, str(Path(__file__).parents[2] / "simulation"))
from table import show, written

NOW, LEASE, DEADLINE, NEVER = 100.0, 110.0, 200.0, 1e9
FLAG = owner.flag_value(7)


class Machine:
    """How to make a state of each phase, and what the table's words for events mean: (change of state, event or None for tick,
    time)."""

    def __init__(self, step, tick, phases, states, events):
        self.step, self.tick, self.phases, self.states, self.events = step, tick, phases, states, events


def owner_state(phase: str):
    outcome = {"admitted": "admitted", "released": "failed"}.get(phase, phase if phase in owner.QUARANTINED else "")
    return owner.Ticket(7, "w", (1, 2), 50, LEASE, phase=phase, outcome=outcome, poll=NEVER)


def writer_state(words: str):
    phase, in_flight = words.split(",")[0], "in flight" in words
    outcome = phase if phase in writer.STOPPED else ""
    return writer.Ticket(7, LEASE, DEADLINE, phase, outcome, int(in_flight), in_flight, send=NEVER, give_up=NEVER)


def same(state):
    return state


def late(state):
    return replace(state, poll=NOW - 1)


def due(state):
    return replace(state, send=NOW - 1)


def flagged(state):
    return replace(state, flag=True)


def checked(state):
    return replace(state, verify=True)


FITS = ev.Committed(7, 50, "record")
MACHINES = {
    "owner": Machine(
        owner.step,
        owner.tick,
        owner.PHASES,
        {phase: owner_state(phase) for phase in owner.PHASES},
        {
            "bind again": (same, ev.Renewed(LEASE + 5), NOW),
            "flag of this generation": (same, ev.FlagSeen(FLAG), NOW),
            "flag of this generation, checksums on": (checked, ev.FlagSeen(FLAG), NOW),
            "flag of another generation": (same, ev.FlagSeen(owner.flag_value(6)), NOW),
            "commit": (same, FITS, NOW),
            "commit, no flag": (same, FITS, NOW),
            "commit, flag seen": (flagged, FITS, NOW),
            "commit, flag seen, checksums on": (lambda s: replace(s, flag=True, verify=True), FITS, NOW),
            "commit, other byte count": (flagged, ev.Committed(7, 49), NOW),
            "commit, was admitted": (lambda s: replace(s, outcome="admitted"), FITS, NOW),
            "commit, was not admitted": (same, FITS, NOW),
            "commit of another generation": (same, ev.Committed(6, 50), NOW),
            "fail": (same, ev.WriterFailed("x", "y"), NOW),
            "writer lost": (same, ev.WriterLost(), NOW),
            "cancel": (same, ev.Cancelled(), NOW),
            "writer_done": (same, ev.WriterDone(7), NOW),
            "writer_done of another generation": (same, ev.WriterDone(6), NOW),
            "status: done": (same, ev.WriterStatus("done"), NOW),
            "status: writing": (same, ev.WriterStatus("writing"), NOW),
            "fenced": (same, ev.Fenced(), NOW),
            "checksums fit": (lambda s: replace(s, flag=True, verify=True), ev.Verified(True), NOW),
            "checksums do not fit": (lambda s: replace(s, flag=True, verify=True), ev.Verified(False), NOW),
            "slab taken": (same, ev.SlabTaken(), NOW),
            "lease over": (same, None, LEASE),
            "0.25 s later, flag without record": (lambda s: replace(s, flag=True, poll=NOW - 0.1), None, NOW),
            "0.25 s later": (late, None, NOW),
        },
    ),
    "writer": Machine(
        writer.step,
        writer.tick,
        writer.PHASES,
        {words: writer_state(words) for words in (*writer.PHASES, *(f"{p}, in flight" for p in ("writing", *writer.STOPPED)))},
        {
            "write begins": (same, ev.WriteBegins(), NOW),
            "write begins, lease over": (same, ev.WriteBegins(), LEASE),
            "write ends": (same, ev.WriteEnded(), NOW),
            "write ends, owner lost": (lambda s: replace(s, give_up=0.0), ev.WriteEnded(), NOW),
            "write ends with an error": (same, ev.WriteEnded("broken"), NOW),
            "bind answered again": (same, ev.Renewed(LEASE + 5), NOW),
            "placed": (same, ev.Placed(), NOW),
            "cancel": (same, ev.Cancelled("client"), NOW),
            "leg fails": (same, ev.LegFailed("engine", "it broke"), NOW),
            "owner lost": (same, ev.OwnerLost(), NOW),
            "verdict: admitted": (same, ev.CommitAnswered("admitted"), NOW),
            "verdict: stale": (same, ev.CommitAnswered("stale"), NOW),
            "verdict: unknown": (same, ev.CommitAnswered("unknown"), NOW),
            "verdict: mismatch": (same, ev.CommitAnswered("mismatch"), NOW),
            "verdict: pending": (same, ev.CommitAnswered("pending"), NOW),
            "writer_done answered": (same, ev.DoneAnswered(), NOW),
            "lease over": (same, None, LEASE),
            "deadline over": (same, None, DEADLINE),
            "0.25 s later": (due, None, NOW),
            "30 s later": (lambda s: replace(s, give_up=NOW), None, NOW),
        },
    ),
    "store": Machine(
        store.step,
        store.tick,
        store.PHASES,
        {phase: store.Grant(7, "w", 3, LEASE, phase, outcome="expired", poll=NEVER) for phase in store.PHASES},
        {
            "commit": (same, ev.Committed(7), NOW),
            "commit, was stored": (lambda s: replace(s, outcome="stored", stored=3), ev.Committed(7), NOW),
            "commit, was not stored": (same, ev.Committed(7), NOW),
            "commit of another generation": (same, ev.Committed(6), NOW),
            "checked": (same, ev.Checked((True, False, True)), NOW),
            "release": (same, ev.Released(), NOW),
            "cancel": (same, ev.Cancelled(), NOW),
            "writer_done": (same, ev.WriterDone(7), NOW),
            "status: done": (same, ev.WriterStatus("done"), NOW),
            "status: writing": (same, ev.WriterStatus("writing"), NOW),
            "fenced": (same, ev.Fenced(), NOW),
            "lease over": (same, None, LEASE),
            "0.25 s later": (late, None, NOW),
        },
    ),
    "held": Machine(
        pins.held_step,
        pins.held_tick,
        pins.HELD_PHASES,
        {phase: pins.Held("w", LEASE, phase) for phase in pins.HELD_PHASES},
        {
            "release": (same, ev.Released(), NOW),
            "release, lease over": (same, ev.Released(), LEASE),
            "worker gone": (same, ev.WorkerGone(), NOW),
            "lease over": (same, None, LEASE),
        },
    ),
    "reading": Machine(
        pins.reading_step,
        pins.reading_tick,
        pins.READING_PHASES,
        {phase: pins.Reading(LEASE, DEADLINE, phase, send=NEVER) for phase in pins.READING_PHASES},
        {
            "read begins": (same, ev.ReadBegins(), NOW),
            "read begins, lease over": (same, ev.ReadBegins(), LEASE),
            "read ends, good": (same, ev.ReadEnded(True), NOW),
            "read ends, bad": (same, ev.ReadEnded(False), NOW),
            "release answered: valid": (same, ev.ReleaseAnswered(True), NOW),
            "release answered: not valid": (same, ev.ReleaseAnswered(False), NOW),
            "cancel": (same, ev.Cancelled(), NOW),
            "owner lost": (same, ev.OwnerLost(), NOW),
            "deadline over": (lambda s: replace(s, expires=DEADLINE + 1), None, DEADLINE),
            "lease over": (same, None, LEASE),
            "0.25 s later": (due, None, NOW),
        },
    ),
}


ROWS = [
    (machine, phase, event, after, effects)
    for machine, words, event, after, effects in written()
    for phase in (MACHINES[machine].states if words == "any" else [words])
]


def apply(machine: Machine, phase: str, event_words: str):
    prepare, event, now = machine.events[event_words]
    before = prepare(machine.states[phase])
    return before, machine.tick(before, now) if event is None else machine.step(before, event, now)


@pytest.mark.parametrize(("name", "phase", "event", "after", "effects"), ROWS, ids=lambda value: str(value).replace(" ", "_"))
def test_row(name, phase, event, after, effects):
    before, (state, got) = apply(MACHINES[name], phase, event)
    assert state.phase == (before.phase if after == "same" else after)
    assert [show(effect) for effect in got] == ([] if effects == "-" else effects.split(", "))


@pytest.mark.parametrize("name", MACHINES)
def test_every_phase_and_every_word_is_in_the_table(name):
    machine = MACHINES[name]
    mine = [row for row in ROWS if row[0] == name]
    assert {row[1].split(",")[0] for row in mine} == set(machine.phases)
    assert {row[2] for row in mine} == set(machine.events)


@pytest.mark.parametrize("name", MACHINES)
def test_pairs_without_a_row_do_nothing(name):
    machine = MACHINES[name]
    mentioned = {(phase, word_of(event)) for row_of, phase, event, *_ in ROWS if row_of == name}
    quiet = 0
    for phase, event in itertools.product(machine.states, machine.events):
        if (phase, word_of(event)) not in mentioned:
            before, (state, effects) = apply(machine, phase, event)
            assert state == before and effects == [], f"{phase} + {event} -> {state.phase}, {effects}"
            quiet += 1
    assert quiet > 0


def word_of(event: str) -> str:
    """An event's words without its conditions: "commit, no flag" is a commit."""
    return re.split(r"[,:]", event)[0]


REPLIES = (fx.Answer, fx.Valid, fx.Stored, fx.Stale, fx.No)
COUNTED = ("write begins", "write ends")  # local, one per operation: not messages


@pytest.mark.parametrize(
    ("name", "phase", "event"),
    [row[:3] for row in ROWS if not row[2].startswith(COUNTED)],
    ids=lambda value: str(value).replace(" ", "_"),
)
def test_the_second_time_changes_nothing(name, phase, event):
    """Every message and every tick is idempotent: the same again only repeats the answer."""
    machine = MACHINES[name]
    _, happening, now = machine.events[event]
    _, (state, _) = apply(machine, phase, event)
    again, effects = machine.tick(state, now) if happening is None else machine.step(state, happening, now)
    if name == "reading" and event == "read begins":
        assert show(effects[0]) == "No"
        return
    assert again.phase == state.phase or happening is None
    assert all(isinstance(effect, REPLIES) for effect in effects), effects
