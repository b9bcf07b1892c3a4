"""What is kept of images, least recently used first out. Knows bytes and keys; a key begins with the tenant's namespace."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Value = TypeVar("Value")
Key = tuple[bytes, bytes]  # (namespace, digest)

ENTRY_BYTES = 256  # bookkeeping of one entry, about


class ByteCache(Generic[Value]):
    """At most `capacity` bytes. What alone exceeds that is not kept."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bytes = self.hits = self.misses = self.evicted = 0
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def get(self, key: Key) -> Value | None:
        """The value, marked as just used."""
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Key, value: Value, nbytes: int) -> None:
        """Keep `value`, which takes `nbytes`."""
        size = nbytes + ENTRY_BYTES
        self.drop(key)
        if size > self.capacity:
            return
        self._entries[key] = (value, size)
        self.bytes += size
        while self.bytes > self.capacity:
            _, (_, old) = self._entries.popitem(last=False)
            self.bytes -= old
            self.evicted += 1

    def drop(self, key: Key) -> None:
        """Forget it, if it is here."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes -= entry[1]
