"""A process that died is said to be ready again once, when its successor is."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from headrace.bus.messages import Load, Presence
from headrace.cli.returns import Returns


def presence(instance: str, state: str = "ready") -> Presence:
    return Presence(role="decode", instance=instance, name="decode-1", epoch=1, seq=1, state=state, load=Load())


@pytest.fixture
def said() -> list[str]:
    return []


def test_only_the_successor_is_a_return(said):
    returns = Returns(said.append)
    returns.on_presence("state", presence("decode-a"))
    assert said == [], "nothing died"
    returns.died("decode-1", SimpleNamespace(all=lambda: [presence("decode-a")]))
    returns.on_presence("update", presence("decode-a"))  # on its way when it died
    returns.on_presence("leave", presence("decode-a"))
    returns.on_presence("join", presence("decode-b", "starting"))
    assert said == []
    returns.on_presence("state", presence("decode-b"))
    returns.on_presence("update", presence("decode-b"))
    assert len(said) == 1 and re.fullmatch(r"decode-1 is ready again, \d+\.\d s after it died", said[0])


def test_a_second_death_on_the_way_counts_from_the_first(said, monkeypatch):
    now = 100.0
    monkeypatch.setattr("headrace.cli.returns.time", SimpleNamespace(monotonic=lambda: now))
    returns = Returns(said.append)
    for now in (101.0, 104.0):  # noqa: B007 - read by the clock above
        returns.died("nats", None)
    now = 109.5
    returns.back("nats")
    returns.back("nats")
    assert said == ["nats is ready again, 8.5 s after it died"]
