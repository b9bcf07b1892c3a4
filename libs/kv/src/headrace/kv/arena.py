"""Room in one flat arena for objects of different sizes. Knows offsets and lengths, not what lies there.

Best fit with joining of neighbours. Small objects (block records) are cut from the low end of a gap, large ones (state
snapshots) from the high end, so that the two kinds don't perforate each other. O(log n) per operation, n being the number
of gaps.
"""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGN = 128  # bytes; also a block record's own unit


def room(nbytes: int) -> int:
    """Bytes that an object of `nbytes` really takes."""
    return -(-nbytes // ALIGN) * ALIGN


class Arena:
    """Offsets in [0, capacity)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // ALIGN * ALIGN
        self.used = 0
        self._sizes: list[tuple[int, int]] = []  # gaps as (bytes, start), sorted
        self._starts: dict[int, int] = {}  # gap start -> end
        self._ends: dict[int, int] = {}  # gap end -> start
        if self.capacity:
            self._add(0, self.capacity)

    @property
    def largest(self) -> int:
        """Bytes of the largest gap."""
        return self._sizes[-1][0] if self._sizes else 0

    def allocate(self, nbytes: int, high: bool = False) -> int | None:
        """Offset of `nbytes` bytes, or None when no gap is large enough."""
        size = room(nbytes)
        index = bisect_left(self._sizes, (size, -1))
        if index == len(self._sizes):
            return None
        length, start = self._sizes[index]
        self._remove(start, start + length)
        offset = start + length - size if high else start
        if length > size:
            self._add(start if high else start + size, start + length - size if high else start + length)
        self.used += size
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Give back what `allocate(nbytes)` gave."""
        start, end = offset, offset + room(nbytes)
        self.used -= end - start
        if start in self._ends:
            before = self._ends[start]
            self._remove(before, start)
            start = before
        if end in self._starts:
            after = self._starts[end]
            self._remove(end, after)
            end = after
        self._add(start, end)

    def gaps(self) -> list[tuple[int, int]]:
        """(start, end), in order; for checks."""
        return sorted(self._starts.items())

    def _add(self, start: int, end: int) -> None:
        insort(self._sizes, (end - start, start))
        self._starts[start], self._ends[end] = end, start

    def _remove(self, start: int, end: int) -> None:
        del self._sizes[bisect_left(self._sizes, (end - start, start))], self._starts[start], self._ends[end]
