"""Guards taken away, one at a time: the simulation must then find a violation, or it proves nothing.

A mutation is an edit of a function's source: the text to be replaced must be there exactly once, so an edit of the code that
makes a mutation meaningless is noticed.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.decode.service import DecodeService
from headrace.gateway.dispatch import Dispatcher
from headrace.kv.grants import ledger, owner, writer
from headrace.transfer.memory import Memory


@dataclass(frozen=True)
class Mutation:
    """`where.name`'s source with `old` replaced by `new`."""

    what: str
    where: Any
    name: str
    old: str
    new: str


MUTATIONS: dict[str, tuple[Mutation, ...]] = {
    "generation": (
        Mutation("bytes of a disarmed generation are placed (tcp)", Memory, "allows",
                 "if not armed or nbytes < 0:\n            return False", "if not armed:\n            return True"),
        Mutation("and while they arrive", Memory, "is_armed", "return generation in self._armed", "return True"),
    ),
    "tombstone": (
        Mutation("a cancel that came first is forgotten", ledger.Tombstones, "__contains__", "return key in self._until",
                 "return False"),
    ),
    "quarantine": (
        Mutation("what a writer may still write into is free at once", owner, "_let_go", "if ticket.phase == COMMITTED:",
                 "if True:"),
    ),
    "duplicate-commit": (
        Mutation("a commit that comes again is taken again", owner, "step",
                 "return ticket, [fx.Answer(_verdict(ticket))] if isinstance(event, ev.Committed) else []",
                 "return _admit(ticket) if isinstance(event, ev.Committed) else (ticket, [])"),
    ),
    "attempt": (
        Mutation("output of another attempt is taken", Dispatcher, "on_out", "elif entry.attempt != record.attempt:",
                 "elif False:"),
    ),
    "all-or-nothing": (
        Mutation("a bind that finds no slot keeps its blocks", DecodeService, "bind",
                 "self.engine.abandon(reservation)\n            self.engine.pool.release(reservation.blocks)\n", "pass\n"),
    ),
    "writer-done": (
        Mutation("the writer says that it is done while a copy runs", writer, "_stop", "if after.in_flight:", "if False:"),
    ),
}  # fmt: skip


@contextlib.contextmanager
def without(name: str) -> Iterator[None]:
    """The guard called `name` is missing while this holds."""
    saved: list[tuple[Any, str, Any]] = []
    edited: dict[tuple[Any, str], str] = {}
    for mutation in MUTATIONS[name]:
        key = (mutation.where, mutation.name)
        source = edited.get(key) or textwrap.dedent(inspect.getsource(getattr(*key)))
        text = mutation.old
        if text not in source:  # a method's text, which is indented less here
            text = text.replace("\n            ", "\n        ")
        if (times := source.count(text)) != 1:
            raise LookupError(f"mutation {name}: {mutation.name} has {mutation.old!r} {times} times; it must be once")
        edited[key] = source.replace(text, mutation.new)
    for (where, attribute), source in edited.items():
        original = getattr(where, attribute)
        module = sys.modules[original.__module__]
        scope: dict[str, Any] = {}
        exec(compile(source, f"<{name}>", "exec"), module.__dict__ | {"__name__": module.__name__}, scope)
        saved.append((where, attribute, original))
        setattr(where, attribute, scope[attribute])
    try:
        yield
    finally:
        for where, attribute, original in saved:
            setattr(where, attribute, original)
