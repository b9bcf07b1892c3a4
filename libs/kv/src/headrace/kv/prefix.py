"""Which worker holds which prefix, for routing.

Knows worker names and block hashes. Does not know loads, costs or where the news come from: whoever feeds it drops a
worker's knowledge (`clear`) when its events have a gap or come from a new epoch.

A block's hash stands for its whole prefix, so one flat map hash -> set of workers answers everything a radix tree
would, and takes events in any order and without parents, which a tree of runs can't. Sets of workers are bit masks,
equal masks are one object, so a block costs its 16-byte key and one slot of the map. A lookup is one step per block,
whatever the number of workers.

Lookups may undercount (news under way) and never overcount: what counts as held was told and not taken back.
"""

from __future__ import annotations

from collections.abc import Iterable

SWEEP = 256  # entries of gone workers cleaned per call: bounds the time on the event loop


class PrefixIndex:
    """Fed by `add`, `remove`, `clear`; asked by `match`. One thread."""

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}  # hash -> workers that hold it, as bits
        self._same: dict[int, int] = {}  # one object per distinct mask
        self._bits: dict[str, int] = {}  # worker -> its bit
        self._workers: dict[int, str] = {}  # and back
        self._free: list[int] = []  # bits that stand nowhere any more
        self._dead = 0  # bits of cleared workers that may still stand in `_masks`
        self._sweep: list[bytes] = []  # hashes still to be looked through
        self._swept = 0  # the dead bits that this pass removes

    def __len__(self) -> int:
        """Number of distinct hashes."""
        return len(self._masks)

    def match(self, hashes: Iterable[bytes]) -> dict[str, int]:
        """Worker -> number of leading `hashes` that it holds; workers that hold none are left out."""
        masks, out = self._masks, {}
        holders, count = ~self._dead, 0
        for block_hash in hashes:
            both = holders & masks.get(block_hash, 0)
            if both != holders:
                if count:
                    self._note(out, holders & ~both, count)
                holders = both
                if not both:
                    return out
            count += 1
        if count:
            self._note(out, holders, count)
        return out

    def add(self, worker: str, hashes: Iterable[bytes]) -> None:
        """The worker holds these now. Again is the same as once."""
        bit = self._bits.get(worker) or self._new_bit(worker)
        masks, same, living = self._masks, self._same, ~self._dead
        for block_hash in hashes:
            mask = masks.get(block_hash, 0) & living | bit
            masks[block_hash] = same.setdefault(mask, mask)
        self._clean()

    def remove(self, worker: str, hashes: Iterable[bytes]) -> None:
        """The worker holds these no more. Unknown ones are ignored."""
        others = ~(self._bits.get(worker, 0) | self._dead)
        for block_hash in hashes:
            mask = self._masks.get(block_hash)
            if mask is not None:
                self._put(block_hash, mask & others)
        self._clean()

    def clear(self, worker: str) -> None:
        """Forget all about a worker, at once; its memory is given back bit by bit."""
        bit = self._bits.pop(worker, 0)
        if bit:
            del self._workers[bit]
            self._dead |= bit
        self._clean()

    def counts(self) -> dict[str, int]:
        """Worker -> blocks it holds. Walks everything: for tests and debugging."""
        out = dict.fromkeys(self._bits, 0)
        for mask in self._masks.values():
            for worker, bit in self._bits.items():
                out[worker] += bool(mask & bit)
        return out

    # ------------------------------------------------------------------ below

    def _note(self, out: dict[str, int], mask: int, count: int) -> None:
        while mask:
            bit = mask & -mask
            out[self._workers[bit]] = count
            mask ^= bit

    def _new_bit(self, worker: str) -> int:
        bit = self._free.pop() if self._free else 1 << (len(self._bits) + self._dead.bit_count())
        self._bits[worker], self._workers[bit] = bit, worker
        return bit

    def _put(self, block_hash: bytes, mask: int) -> None:
        if mask:
            self._masks[block_hash] = self._same.setdefault(mask, mask)
        else:
            del self._masks[block_hash]

    def _clean(self) -> None:
        """Take the bits of cleared workers out of some entries. A bit is used again only when it stands nowhere."""
        if not self._sweep:
            if self._swept:
                self._free += [1 << i for i in range(self._swept.bit_length()) if self._swept >> i & 1]
                self._dead &= ~self._swept
                self._swept = 0
                self._same = {mask: mask for mask in self._same if not mask & self._dead} if self._masks else {}
            if not self._dead:
                return
            self._sweep, self._swept = list(self._masks), self._dead
        for _ in range(min(SWEEP, len(self._sweep))):
            block_hash = self._sweep.pop()
            mask = self._masks.get(block_hash)
            if mask is not None and mask & self._swept:
                self._put(block_hash, mask & ~self._swept)
