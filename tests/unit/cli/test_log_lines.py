"""What is shown of a log when its process ended: what explains it, readable, and nothing else."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from headrace.cli.log_lines import RECENT, telling

END = datetime(2026, 3, 1, 12, 0, 10, tzinfo=UTC).timestamp()


def line(level: str, event: str, second: int = 9, **fields: object) -> str:
    stamp = f"2026-03-01T12:00:{second:02}.250000Z"
    return json.dumps({"instance": "decode-x", **fields, "event": event, "level": level, "timestamp": stamp})


def nats(level: str, text: str, ago: float = 1.0) -> str:
    return f"[29440] {datetime.fromtimestamp(END - ago):%Y/%m/%d %H:%M:%S}.393638 [{level}] {text}"


def test_a_start_that_went_well_explains_nothing():
    start = nats("INF", "Starting nats-server")
    assert telling([line("info", "listening", url="http://127.0.0.1:1"), line("debug", "step"), start, ""], END) == []


def test_warnings_and_errors_are_readable():
    assert telling([line("warning", "kvstore failed", pause=1.0), line("error", "ending", 10, why="no bus")], END) == [
        "12:00:09 warning: kvstore failed pause=1.0",
        "12:00:10 error: ending why=no bus",
    ]


def test_an_old_warning_explains_no_death_of_today():
    assert telling([line("warning", "kvstore failed")], END + RECENT + 5) == []
    old, new = (nats("ERR", "127.0.0.1:4711 - cid:7 - authentication error", ago) for ago in (RECENT + 2, RECENT - 2))
    assert telling([old, new], END) == [new]


def test_what_is_not_json_is_shown_as_it_is_and_the_end_of_it_counts():
    trace = ["Traceback (most recent call last):", *(f'  File "{n}.py", line 1' for n in range(9)), "MemoryError: 3 GB"]
    assert telling([line("info", "loading"), *trace], END, most=3) == trace[-3:]
    fatal = nats("FTL", "Error listening on port")
    assert telling(["[1, 2]", fatal], END) == ["[1, 2]", fatal]


def test_a_traceback_inside_json_is_shown_line_by_line():
    said = line("error", "a task ended", exception="Traceback (most recent call last):\n  File x\nKeyError: 7")
    assert telling([said], END) == [
        "12:00:09 error: a task ended",
        "Traceback (most recent call last):",
        "  File x",
        "KeyError: 7",
    ]
