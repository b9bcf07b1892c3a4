"""What a drill makes of what it sees: ends, reactions, windows, memory; without any system."""

from __future__ import annotations

import base64
import io
import random
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from PIL import Image

from headrace.cli.drill import rows, soak, soak_report
from headrace.cli.drill.client import Ask, Seen, _failed, _take
from headrace.cli.drill.load import Answers, Mix
from headrace.cli.drill.rounds import Result, Summary
from headrace.cli.drill.watch import Event
from headrace.cli.errors import CommandError

ASK = Ask((1, 2), 3, 0)


def seen(ids: list[int], end: str) -> Seen:
    return Seen(ASK, ids=ids, end=end)


def test_a_wrong_token_is_one_that_differs_or_is_missing_from_a_whole_answer():
    want = [5, 6, 7]
    assert not seen([5, 6, 7], "answer").wrong(want) and not seen([5], "broken").wrong(want)
    assert not seen([], "error").wrong(want)
    assert seen([5, 6], "answer").wrong(want), "the last one is missing"
    assert seen([5, 7], "broken").wrong(want) and seen([5, 5, 6], "cancelled").wrong(want), "repeated or skipped"
    assert seen([5, 6, 7, 8], "answer").wrong(want)


def test_a_stream_is_read_token_by_token_and_errors_keep_their_code():
    one = seen([], "")
    _take(one, {"id": "cmpl-X", "choices": [{"token_ids": [1]}]}, 1.0, 0.0)
    _take(one, {"id": "cmpl-X", "choices": [{"token_ids": [2, 3]}]}, 1.5, 1.0)
    assert (one.request, one.ids, one.first, one.pause) == ("X", [1, 2, 3], 1.0, 0.5)
    _failed(one, 200, '{"error": {"code": "worker_lost", "message": "gone"}}')
    assert one.story() == "worker_lost in the stream" and one.message == "gone"
    _failed(one, 503, "not JSON")
    assert one.story() == "503 worker_lost" and one.status == 503


def test_asks_with_a_picture_are_chats_and_each_has_its_own():
    first, second = Mix(prompts=(5,), outputs=(4,), sees=True).asks(2, 7)
    urls = []
    for ask in (first, second):
        text, image = ask.body("m")["messages"][0]["content"]
        assert ask.path == "/v1/chat/completions" and len(text["text"].split()) == len(ask.ids)
        data = base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,"))
        shown = Image.open(io.BytesIO(data))
        assert shown.size == (96, 64) and shown.mode == "RGB" and len(shown.getcolors()) > 10
        urls.append(data)
    assert urls[0] != urls[1] and "prompt" not in first.body("m")
    assert Ask((1, 2), 3, 0).body("m")["prompt"] == [1, 2]


def test_asks_are_different_and_reproducible():
    asks = Mix().asks(50, 7)
    assert len(set(asks)) == 50 and asks == Mix().asks(50, 7) != Mix().asks(50, 8)
    assert all(0 < len(ask.ids) <= 400 for ask in asks)


def test_reactions_are_told_from_what_happens_anyway():
    def event(name: str, **data: str) -> Event:
        return Event(0.0, "r", name, "x", data)

    assert event("gateway.retry").reacts and event("decode.finished", why="gateway_died").reacts
    assert event("decode.finished", why="handoff_expired").reacts
    assert not event("decode.finished", why="finished").reacts and not event("decode.finished", why="superseded").reacts
    assert not event("gateway.first_token").reacts


def test_rows_are_found_by_name_and_pattern():
    names = {row.name for row in rows.ROWS}
    assert len(names) == len(rows.ROWS), "every fault has a name of its own"
    assert {row.name for row in rows.chosen(["decode-kill*"])} == {name for name in names if name.startswith("decode-kill")}
    assert len(rows.chosen(["all"])) == len(names) and len(rows.chosen(["nats-kill", "nats-*"])) == 3
    with pytest.raises(CommandError, match="there is no fault 'burn'"):
        rows.chosen(["burn"])
    for role, moments in rows.MOMENTS.items():
        tracing = (Path(__file__).parents[3] / "docs/tracing.md").read_text()
        for moment in moments:
            assert f"`{role}.{moment.partition(':')[0]}`" in tracing, f"{role}.{moment} is no event"


def test_a_table_shows_problems_and_the_verdict():
    good = Summary("a", "what", [Result(0.1, "seen", ["answer"]), Result(0.3, "seen", ["answer", "broken"])])
    bad = Summary("b", "what", [Result(problems=["wrong tokens"])])
    skipped = Summary("c", "what", [], "needs root")
    table = rows.table({"rows": [each.as_dict() for each in (good, bad, skipped)], "rounds": 2, "engine": "sim", "own": True})
    assert "| a | what | seen | 0.30 | 0.30 | 2 answer, 1 broken |" in table
    assert "NO" in table and "b: wrong tokens" in table and "skipped: needs root" in table
    assert "1 of 2 faults recovered" in table


def a_soak(lives: list[soak.Life], windows: list[soak.Window]) -> soak.Soak:
    out = soak.Soak(None, None, None, Answers(), random.Random(0), None)  # type: ignore[arg-type]
    out.lives, out.windows = lives, windows
    return out


def test_a_soak_tells_touched_from_untouched_and_a_leak_from_flat_memory():
    lives = [soak.Life(at, 1.0, 0.1, "answer", at == 11) for at in (0.0, 9.5, 11.0, 20.0)]
    windows = [soak.Window("kill decode-2", 10.0, 12.0, True)]
    this, quiet = a_soak(lives, windows), a_soak([soak.Life(0.0, 1.0, 0.1, "answer", False)], [])
    this.rss["steady"] = [(t, 100 << 20, 1) for t in range(100)]
    this.rss["leaks"] = [(t, (100 << 20) + t * (1 << 20), 1) for t in range(100)]
    this.rss["reborn"] = [(t, (100 << 20) + t * (1 << 20), 1) for t in range(30)] + [(t, 50 << 20, 2) for t in range(30, 100)]
    this.shm, this.load = [(0.0, 5.0)], [(0.0, 1.0)]
    result = soak_report.report(this, quiet, 10.0, 7.0, 1.0, 10.0, {})
    counts = {name: each["requests"] for name, each in result["latency"].items()}
    assert counts == {"quiet run": 1, "untouched": 2, soak_report.OTHERS: 1, "victim's": 1}
    assert {name: each["flat"] for name, each in result["memory"].items()} == {"steady": True, "leaks": False, "reborn": True}
    assert not result["ok"] and result["checks"]["memory flat"] is False and result["p99_ratio"] == 1.0
    assert "NO   memory flat" in soak_report.table(result)
    assert ElementTree.fromstring(soak_report.picture(this)).tag.endswith("svg")
