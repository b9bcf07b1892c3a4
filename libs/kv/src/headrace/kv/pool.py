"""Blocks of one KV pool: who refers to which, which prefix is resident, which may be used again.

Knows block numbers, reference counts, hashes and their parents. Does not know bytes, tensors, requests or time.

Each block is in exactly one of four places:

    free         nobody's, content meaningless
    used         at least one reference
    cached       no reference, but it is the resident block of its hash: matched again, or evicted when room is needed
    quarantined  its request let go, but a writer that we can't stop may still write into it (see `grants`)

`free + used + cached + quarantined = total` always; `check` proves it against the owners that a caller found by
walking.

Eviction is least recently used, leaves first: a block whose child is resident goes after the child, for a prefix with
a hole can't be matched behind the hole. All operations are O(1) or O(log n) per block.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from heapq import heappop, heappush

from headrace.kv.hashing import ROOT


class BlockPool:
    """Bookkeeping of `num_blocks` blocks. Not thread safe: one loop owns it. Misuse raises ValueError naming the
    block."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block; got {num_blocks}")
        self.total = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks  # of a full, committed block
        self._parent: list[bytes] = [ROOT] * num_blocks  # meaningful where _hash is
        self._index: dict[bytes, int] = {}  # hash -> its resident block
        self._children: dict[bytes, int] = {}  # hash -> indexed blocks that name it as parent
        self._cached: dict[int, int] = {}  # block -> stamp of its last use
        self._leaves: list[tuple[int, int]] = []  # heap of (stamp, block): one entry at most per block, perhaps an old one
        self._queued = bytearray(num_blocks)  # has an entry in the heap
        self._quarantined: dict[Hashable, list[int]] = {}
        self._in_quarantine: set[int] = set()
        self._clock = 0
        self._changes: dict[bytes, bool] = {}  # hash -> stored (True) or removed (False) since take_events

    # ------------------------------------------------------------------ counts

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def quarantined(self) -> int:
        return len(self._in_quarantine)

    @property
    def used(self) -> int:
        return self.total - len(self._free) - len(self._cached) - len(self._in_quarantine)

    @property
    def available(self) -> int:
        """Blocks that `allocate` could give now."""
        return len(self._free) + len(self._cached)

    def references(self, block: int) -> int:
        return self._refs[block]

    def hash_of(self, block: int) -> bytes | None:
        """The block's announced hash, or None while it is partial."""
        return self._hash[block]

    def resident(self) -> list[bytes]:
        """All hashes that `match` can find one by one, for a snapshot of KV events."""
        return list(self._index)

    # ------------------------------------------------------------------ taking and giving back

    def peek(self, hashes: Iterable[bytes]) -> int:
        """Number of leading hashes that are resident. Pins nothing."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._index:
                break
            count += 1
        return count

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest resident prefix of `hashes`, each with one more reference."""
        blocks = []
        for block_hash in hashes:
            block = self._index.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        self.retain(blocks)
        return blocks

    def allocate(self, n: int) -> list[int] | None:
        """`n` blocks with one reference each, or None (and no change) when fewer than n are free or evictable."""
        if n < 0:
            raise ValueError(f"can't allocate {n} blocks")
        if n > self.available:
            return None
        while len(self._free) < n:
            self._evict_one()
        blocks = [self._free.pop() for _ in range(n)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """One more reference on each. The blocks must be used or cached."""
        for block in blocks:
            if self._refs[block] == 0 and self._cached.pop(block, None) is None:
                raise ValueError(f"block {block} is {self._place(block)}; only a used or cached block can be retained")
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less on each. At 0 a resident hashed block becomes cached, any other free."""
        self._clock += 1
        for block in blocks:
            if self._refs[block] == 0:
                raise ValueError(f"block {block} is {self._place(block)} and has no reference to release")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._settle(block)

    def announce(self, block: int, block_hash: bytes, parent: bytes) -> None:
        """A full, committed block gets its identity. When another block already holds this hash that one stays the
        resident copy; this one serves those who refer to it and is freed after them. Announcing twice the same
        changes nothing."""
        if self._refs[block] == 0:
            raise ValueError(f"block {block} is {self._place(block)}; only its user can announce it")
        known = self._hash[block]
        if known is not None:
            if known != block_hash:
                raise ValueError(f"block {block} is {known.hex()} already; it can't become {block_hash.hex()}")
            return
        self._hash[block], self._parent[block] = block_hash, parent
        if block_hash not in self._index:
            self._index[block_hash] = block
            self._children[parent] = self._children.get(parent, 0) + 1
            self._note(block_hash, stored=True)

    # ------------------------------------------------------------------ quarantine

    def quarantine(self, blocks: Iterable[int], key: Hashable) -> None:
        """The caller's reference (which must be the only one) on each of these unannounced blocks passes to `key`."""
        blocks = list(blocks)
        if key in self._quarantined:
            raise ValueError(f"quarantine {key!r} exists already")
        for block in blocks:
            if self._refs[block] != 1 or self._hash[block] is not None:
                raise ValueError(
                    f"block {block} has {self._refs[block]} references and {'a' if self._hash[block] else 'no'} hash; only an "
                    "unannounced block with one reference can be quarantined"
                )
        for block in blocks:
            self._refs[block] = 0
        self._quarantined[key] = blocks
        self._in_quarantine.update(blocks)

    def unquarantine(self, key: Hashable) -> int:
        """The writer of `key` is done or proven dead: its blocks are free. Returns how many; an unknown key is 0."""
        blocks = self._quarantined.pop(key, [])
        self._in_quarantine.difference_update(blocks)
        self._free.extend(blocks)
        return len(blocks)

    def quarantines(self) -> dict[Hashable, int]:
        """Key -> number of blocks, for metrics and traces."""
        return {key: len(blocks) for key, blocks in self._quarantined.items()}

    # ------------------------------------------------------------------ events, checks

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """(stored, removed): net changes of what is resident since the last call."""
        stored = [block_hash for block_hash, is_stored in self._changes.items() if is_stored]
        removed = [block_hash for block_hash, is_stored in self._changes.items() if not is_stored]
        self._changes.clear()
        return stored, removed

    def drop_cached(self) -> int:
        """Evict everything that nobody refers to. Returns the number of blocks."""
        count = len(self._cached)
        while self._cached:
            self._evict_one()
        return count

    def check(self, owners: dict[int, int]) -> None:
        """AssertionError unless the books agree with `owners`: block -> references found by walking whoever holds
        blocks."""
        for block, refs in enumerate(self._refs):
            assert refs == owners.get(block, 0), f"block {block} has {refs} references, owners hold {owners.get(block, 0)}"
        used = {block for block, refs in enumerate(self._refs) if refs}
        places = [set(self._free), used, set(self._cached), self._in_quarantine]
        assert len(self._free) == len(places[0]), "a block is twice on the free list"
        assert sum(map(len, places)) == self.total and set().union(*places) == set(range(self.total)), (
            f"free {self.free} + used {len(used)} + cached {self.cached} + quarantined {self.quarantined} is not {self.total}"
        )
        assert sorted(b for blocks in self._quarantined.values() for b in blocks) == sorted(self._in_quarantine)
        assert all(self._hash[block] == block_hash for block_hash, block in self._index.items())
        assert all(self._index.get(self._hash[block]) == block for block in self._cached)

    # ------------------------------------------------------------------ below

    def _settle(self, block: int) -> None:
        """The last reference is gone."""
        block_hash = self._hash[block]
        if block_hash is not None and self._index.get(block_hash) == block:
            self._cached[block] = self._clock
            self._offer(block)
        else:
            self._hash[block] = None
            self._free.append(block)

    def _offer(self, block: int) -> None:
        """Make a cached block a candidate for eviction, if it is a leaf."""
        if not self._queued[block] and not self._children.get(self._hash[block]):
            self._queued[block] = 1
            heappush(self._leaves, (self._cached[block], block))

    def _coldest_leaf(self) -> int | None:
        """Takes the candidate out of the heap. An entry that is no leaf any more is dropped (it is offered again when
        it becomes one), one whose block was used since goes back with its new stamp."""
        while self._leaves:
            stamp, block = heappop(self._leaves)
            self._queued[block] = 0
            if block not in self._cached:
                continue
            if self._cached[block] == stamp and not self._children.get(self._hash[block]):
                return block
            self._offer(block)
        return None

    def _evict_one(self) -> None:
        """The coldest cached leaf becomes free; its parent may become a leaf by that."""
        block = self._coldest_leaf()
        if block is None:  # every cached block has a child in use (through a duplicate): the coldest of all goes
            block = min(self._cached, key=self._cached.__getitem__)
        block_hash, parent = self._hash[block], self._parent[block]
        del self._cached[block], self._index[block_hash]
        self._hash[block] = None
        self._free.append(block)
        self._note(block_hash, stored=False)
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        above = self._index.get(parent)
        if above in self._cached:
            self._offer(above)

    def _note(self, block_hash: bytes, stored: bool) -> None:
        if self._changes.get(block_hash, stored) != stored:
            del self._changes[block_hash]  # came and went (or went and came back) between two calls
        else:
            self._changes[block_hash] = stored

    def _place(self, block: int) -> str:
        if self._refs[block]:
            return "used"
        return "cached" if block in self._cached else "quarantined" if block in self._in_quarantine else "free"


def walk(*tables: Sequence[int]) -> dict[int, int]:
    """Block tables -> the `owners` that `BlockPool.check` wants."""
    owners: dict[int, int] = {}
    for table in tables:
        for block in table:
            owners[block] = owners.get(block, 0) + 1
    return owners
