"""Events become an ordered timeline."""

from __future__ import annotations

from headrace.cli.trace import BAR, bar, bare, rows, table

EVENTS = [
    {"ts": 100.000, "request": "r", "event": "gateway.received", "instance": "gateway-1"},
    {"ts": 100.050, "request": "r", "event": "prefill.computed", "instance": "prefill-1", "ms": 40.0, "rows": 128},
    {"ts": 100.100, "request": "r", "event": "gateway.finished", "instance": "gateway-1", "ms": 100.0},
]


def test_rows_are_ordered_and_relative_to_the_first_moment():
    made = rows(list(reversed(EVENTS)))
    assert [row.event for row in made] == ["gateway.received", "prefill.computed", "gateway.finished"]
    assert [round(row.at) for row in made] == [0, 50, 100]
    assert made[1].role == "prefill"
    assert made[1].data == {"rows": 128}


def test_first_moment_is_the_begin_of_an_event_that_lasted():
    made = rows([{"ts": 10.0, "request": "r", "event": "a.b", "instance": "i", "ms": 500.0}])
    assert round(made[0].at) == 500


def test_bar_shows_the_part_of_the_whole():
    received, computed, finished = rows(EVENTS)
    assert bar(received, 100.0).strip() == "·"
    assert bar(finished, 100.0) == "█" * BAR
    drawn = bar(computed, 100.0)
    assert len(drawn) == BAR
    assert drawn.index("█") == int(0.1 * BAR)
    assert drawn.rindex("█") == int(0.5 * BAR)


def test_table_names_everything():
    text = table(EVENTS)
    assert text.splitlines()[0] == "request r: 100.0 ms, 3 events"
    assert "rows=128" in text
    assert "prefill.computed" in text


def test_no_events_no_rows():
    assert rows([]) == []


def test_id_of_an_answer_holds_the_name_of_its_request():
    assert bare("chatcmpl-0Nq7vQXo5CqkdGxQ9kRz9C") == "0Nq7vQXo5CqkdGxQ9kRz9C"
    assert bare("0Nq7vQXo5CqkdGxQ9kRz9C") == "0Nq7vQXo5CqkdGxQ9kRz9C"
    assert bare("a.b.*") == "a.b.*"
