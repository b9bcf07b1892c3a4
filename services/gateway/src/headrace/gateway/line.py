"""The line: requests that wait for room at a worker, in the order in which they are served.

Knows places and whose turn it is. Does not know why anybody waits, or for how long: that is each request's own machine.
"""

from __future__ import annotations

from bisect import insort

from .record import Record

WAITING, TRYING = "waiting", "trying"


class Line:
    """`queued` requests: those that wait, and those that were called up and look for room now (`trying`)."""

    def __init__(self) -> None:
        self.queued = 0
        self.trying = 0
        self.waiting: list[Record] = []

    def join(self, record: Record) -> None:
        """Wait, from now on or again."""
        if record.slot == WAITING:
            return
        if record.slot == TRYING:  # it was called up, and found no room
            self.trying -= 1
        else:
            self.queued += 1
        record.slot = WAITING
        insort(self.waiting, record, key=_place)

    def call_up(self, room: int) -> list[Record]:
        """Whose turn it is, if so many may try at a time; always one."""
        free = max(1, room) - self.trying
        called = self.waiting[: max(0, free)]
        for record in called:
            self.step_out(record)
        return called

    def step_out(self, record: Record) -> None:
        """It looks for room now, whether or not it was called."""
        if record.slot == WAITING:
            self.waiting.remove(record)
            record.slot = TRYING
            self.trying += 1

    def leave(self, record: Record) -> None:
        self.step_out(record)
        if record.slot == TRYING:
            self.trying -= 1
            self.queued -= 1
            record.slot = ""


def _place(record: Record) -> tuple[int, int, int]:
    return record.place
