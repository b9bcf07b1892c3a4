"""Grammars compiled beside the loop: one at a time for all who want it, a bounded wait, an answer to whatever goes wrong."""

import asyncio
import threading

import pytest

from headrace.decode.compiling import THREADS, WAITING, Compiling
from headrace.engine.api import Grammar


class Slow:
    """Stands for an engine's grammars, whose time nobody can set: compiling one takes until `go` is set."""

    def __init__(self) -> None:
        self.go, self.begun, self.done = threading.Event(), [], set()
        self.full = threading.Event()

    def knows(self, grammar) -> bool:
        return grammar.text in self.done

    def compile(self, grammar) -> None:
        self.begun.append(grammar.text)
        if len(self.begun) == THREADS:
            self.full.set()
        self.go.wait(20)
        if "bad" in grammar.text:
            raise ValueError(f"{grammar.text} can't be followed")
        if "defect" in grammar.text:
            raise RuntimeError("a defect")
        self.done.add(grammar.text)


def grammar(text: str) -> Grammar:
    return Grammar("regex", text)


@pytest.fixture
def slow():
    slow = Slow()
    yield slow
    slow.go.set()


async def test_those_who_want_the_same_wait_for_the_same(slow):
    compiling = Compiling(slow, 10.0)
    waiting = [asyncio.ensure_future(compiling.compile(grammar("a"))) for _ in range(5)]
    await asyncio.sleep(0)
    slow.go.set()
    assert await asyncio.gather(*waiting) == [None] * 5
    assert slow.begun == ["a"] and compiling.knows(grammar("a")) and not compiling.knows(grammar("b"))
    compiling.stop()


async def test_a_wrong_grammar_is_invalid_and_a_defect_is_not_hidden(slow):
    compiling = Compiling(slow, 10.0)
    slow.go.set()
    refused = await compiling.compile(grammar("bad"))
    assert (refused.code, refused.message) == ("invalid", "bad can't be followed")
    with pytest.raises(RuntimeError, match="a defect"):
        await compiling.compile(grammar("defect"))
    compiling.stop()


async def test_no_wait_is_unbounded(slow):
    """Who is compiled too long is told that its grammar is too large; who is in line, that others are in the way."""
    compiling = Compiling(slow, 0.1)
    first = [asyncio.ensure_future(compiling.compile(grammar(f"slow{i}"))) for i in range(THREADS)]
    await asyncio.sleep(0)
    assert await asyncio.to_thread(slow.full.wait, 20)
    behind = await compiling.compile(grammar("behind"))
    assert behind.code == "busy" and behind.retry_after == 0.1
    assert {refused.code for refused in await asyncio.gather(*first)} <= {"invalid", "busy"}
    refused = await compiling.compile(grammar("slow0"))
    assert refused.code == "invalid" and "not compiled within 0.1 s" in refused.message
    slow.go.set()
    compiling.stop()
    compiling = Compiling(slow, 20.0)
    assert await compiling.compile(grammar("behind")) is None
    compiling.stop()


async def test_the_line_is_bounded(slow):
    compiling = Compiling(slow, 10.0)
    jobs = [asyncio.ensure_future(compiling.compile(grammar(str(i)))) for i in range(WAITING)]
    await asyncio.sleep(0)
    refused = await compiling.compile(grammar("one more"))
    assert refused.code == "busy" and f"{WAITING} grammars" in refused.message
    slow.go.set()
    assert await asyncio.gather(*jobs) == [None] * WAITING
    assert await compiling.compile(grammar("one more")) is None
    compiling.stop()


async def test_an_engine_without_grammars_refuses_all():
    compiling = Compiling(None, 1.0)
    assert compiling.refuses(grammar("a")).code == "invalid" and not compiling.knows(grammar("a"))
    compiling.stop()
