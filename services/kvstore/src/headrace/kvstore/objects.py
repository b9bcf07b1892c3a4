"""What is stored: objects by content, their pins, and which one goes next.

Knows (kind, namespace, key), sizes, parents, last use. Does not know bytes, messages, grants or who asks; time is
passed in.

Victims: what has expired, then state snapshots by last use, then blocks by last use, leaves first (a prefix with a hole
can't be matched behind it). What is pinned is never a victim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

BLOCK, STATE = "block", "state"
KINDS = (BLOCK, STATE)

Key = tuple[str, bytes, bytes]  # kind, namespace, key


@dataclass(slots=True, eq=False)
class Stored:
    """One object. `offset` and `nbytes` are its place in the arena; `parent` is a block's parent block."""

    key: Key
    parent: Key
    offset: int
    nbytes: int
    checksum: int
    generation: int
    used: float = 0.0  # last use, seconds
    pins: int = 0
    queued: bool = False  # has an entry in a queue of victims


class Objects:
    """The index. `ttl`: seconds after its last use at which an object expires."""

    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        self.pinned_bytes = 0
        self._all: dict[Key, Stored] = {}
        self._children: dict[Key, int] = {}
        # Heaps of (last use, tie, object): one entry at most per object, perhaps with an old last use.
        self._queues: dict[str, list[tuple[float, int, Stored]]] = {kind: [] for kind in KINDS}
        self._counts = dict.fromkeys(KINDS, 0)
        self._tie = 0
        self._changes: dict[bytes, bool] = {}  # block key -> stored or removed since take_events

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Stored]:
        return iter(self._all.values())

    def count(self, kind: str) -> int:
        return self._counts[kind]

    def get(self, key: Key, now: float) -> Stored | None:
        """The object if it is here and has not expired (what a resident child or a pin needs does not expire)."""
        found = self._all.get(key)
        if found is None or now < found.used + self.ttl or found.pins or self._children.get(key):
            return found
        return None

    def add(self, stored: Stored, now: float) -> bool:
        """Publish. False when its key is here already (the caller frees the copy)."""
        if stored.key in self._all:
            self.touch(self._all[stored.key], now)
            return False
        self._all[stored.key] = stored
        self._counts[stored.key[0]] += 1
        if stored.key[0] == BLOCK:
            self._children[stored.parent] = self._children.get(stored.parent, 0) + 1
            self._note(stored.key[2], True)
        self.touch(stored, now)
        return True

    def touch(self, stored: Stored, now: float) -> None:
        stored.used = now
        self._offer(stored)

    def pin(self, stored: Stored) -> None:
        if not stored.pins:
            self.pinned_bytes += stored.nbytes
        stored.pins += 1

    def unpin(self, stored: Stored) -> None:
        assert stored.pins > 0, f"{stored.key} is not pinned"
        stored.pins -= 1
        if not stored.pins:
            self.pinned_bytes -= stored.nbytes
            self._offer(stored)

    def evict(self, now: float) -> tuple[Stored, str] | None:
        """Drop the next victim; -> (object, "expired" or "room"), or None when everything left is pinned."""
        block, state = self._peek(BLOCK), self._peek(STATE)
        expired = block is not None and now >= block.used + self.ttl
        victim = block if expired or state is None else state
        if victim is None:
            return None
        self._drop(victim)
        return victim, "expired" if now >= victim.used + self.ttl else "room"

    def expired(self, now: float) -> bool:
        """Is there a victim that has expired?"""
        return any((found := self._peek(kind)) is not None and now >= found.used + self.ttl for kind in KINDS)

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """(stored, removed) block keys: net changes since the last call."""
        stored = [key for key, here in self._changes.items() if here]
        removed = [key for key, here in self._changes.items() if not here]
        self._changes.clear()
        return stored, removed

    # ------------------------------------------------------------------ below

    def _offer(self, stored: Stored) -> None:
        """Put it into its queue of victims, if it may be one and is not there."""
        if not stored.queued and not stored.pins and not self._children.get(stored.key):
            self._tie += 1
            stored.queued = True
            heappush(self._queues[stored.key[0]], (stored.used, self._tie, stored))

    def _peek(self, kind: str) -> Stored | None:
        """The coldest that may go; it stays first in its queue. An entry of what may not go is dropped (it is offered
        again when it may), one of what was used since goes back with its new time."""
        queue = self._queues[kind]
        while queue:
            used, _, stored = queue[0]
            free = self._all.get(stored.key) is stored and not stored.pins and not self._children.get(stored.key)
            if free and stored.used == used:
                return stored
            heappop(queue)
            stored.queued = False
            if free:
                self._offer(stored)
        return None

    def _drop(self, stored: Stored) -> None:
        """Forget it. It is the first of its queue."""
        heappop(self._queues[stored.key[0]])
        stored.queued = False
        del self._all[stored.key]
        self._counts[stored.key[0]] -= 1
        if stored.key[0] != BLOCK:
            return
        self._note(stored.key[2], False)
        left = self._children[stored.parent] - 1
        if left:
            self._children[stored.parent] = left
            return
        del self._children[stored.parent]
        parent = self._all.get(stored.parent)
        if parent is not None:
            self._offer(parent)

    def _note(self, key: bytes, here: bool) -> None:
        if self._changes.get(key, here) != here:
            del self._changes[key]
        else:
            self._changes[key] = here
