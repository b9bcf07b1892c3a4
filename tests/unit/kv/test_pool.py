"""The block pool: examples first, then every operation in random order against a plain model."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.kv.hashing import ROOT
from headrace.kv.pool import BlockPool, walk


def name(*path: int) -> bytes:
    return bytes(path).rjust(16, b"\xff")


def fill(pool: BlockPool, *path: int) -> list[int]:
    """Allocate and announce the chain path[:1], path[:2], ...; returns its blocks, still held."""
    blocks = pool.allocate(len(path))
    for i, block in enumerate(blocks):
        pool.announce(block, name(*path[: i + 1]), name(*path[:i]) if i else ROOT)
    return blocks


def chain(*path: int) -> list[bytes]:
    return [name(*path[: i + 1]) for i in range(len(path))]


def test_allocate_is_all_or_nothing():
    pool = BlockPool(4)
    held = pool.allocate(3)
    assert pool.allocate(2) is None and pool.free == 1 and pool.used == 3
    pool.check(walk(held))
    pool.release(held)
    assert pool.free == 4 and pool.cached == 0  # nothing was announced, so nothing is kept
    assert pool.allocate(0) == []


def test_a_released_prefix_is_matched_again():
    pool = BlockPool(4)
    blocks = fill(pool, 1, 2)
    pool.release(blocks)
    assert (pool.cached, pool.free) == (2, 2)
    assert pool.peek(chain(1, 2, 3)) == 2 and pool.cached == 2
    assert pool.match(chain(1, 2, 3)) == blocks and pool.used == 2
    assert pool.match(chain(2, 1)) == []
    pool.check(walk(blocks))


def test_eviction_takes_the_coldest_leaf_first():
    pool = BlockPool(5)
    old, new = fill(pool, 1, 2, 3), fill(pool, 1, 9)  # (1) of the second chain is a duplicate
    assert pool.match(chain(1, 9)) == [old[0], new[1]]
    pool.release([old[0], new[1]])
    pool.release(old)
    pool.release(new)
    assert (pool.cached, pool.free) == (4, 1)  # the duplicate of (1) went straight back
    pool.take_events()
    assert len(pool.allocate(2)) == 2 and pool.take_events()[1] == [name(1, 2, 3)]
    assert len(pool.allocate(1)) == 1 and pool.take_events()[1] == [name(1, 2)]
    assert len(pool.allocate(1)) == 1 and pool.take_events()[1] == [name(1, 9)]
    assert len(pool.allocate(1)) == 1 and pool.take_events()[1] == [name(1)]


def test_use_refreshes_a_leaf():
    pool = BlockPool(3)
    for path in ((1,), (2,), (3,)):
        pool.release(fill(pool, *path))
    pool.release(pool.match(chain(1)))
    pool.take_events()
    pool.allocate(2)
    assert sorted(pool.take_events()[1]) == sorted([name(2), name(3)])


def test_a_parent_without_leaves_below_still_yields():
    """A duplicate holds the child in use while the resident parent has no user: room is found all the same."""
    pool = BlockPool(3)
    first = fill(pool, 1)
    second = fill(pool, 1, 2)  # (1) again: a duplicate
    pool.release(first)
    assert pool.cached == 1 and pool.free == 0
    taken = pool.allocate(1)
    assert taken == first
    pool.check(walk(second, taken))


def test_events_are_net_changes():
    pool = BlockPool(2)
    pool.release(fill(pool, 1))
    assert pool.take_events() == ([name(1)], []) and pool.take_events() == ([], [])
    pool.drop_cached()
    pool.release(fill(pool, 1))
    assert pool.take_events() == ([], [])  # went and came back
    pool.release(fill(pool, 2))
    pool.drop_cached()
    assert pool.take_events() == ([], [name(1)])  # (2) came and went


def test_quarantine_holds_until_the_writer_lets_go():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.quarantine(blocks, "ticket")
    assert (pool.quarantined, pool.used, pool.free) == (2, 0, 1) and pool.quarantines() == {"ticket": 2}
    assert pool.allocate(2) is None
    with pytest.raises(ValueError, match="quarantined"):
        pool.release(blocks)
    with pytest.raises(ValueError, match="exists"):
        pool.quarantine([], "ticket")
    assert pool.unquarantine("ticket") == 2 and pool.unquarantine("ticket") == 0
    assert pool.free == 3
    pool.check({})


def test_misuse_is_named():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.announce(block, name(1), ROOT)
    pool.announce(block, name(1), ROOT)
    with pytest.raises(ValueError, match=f"block {block} is .* already"):
        pool.announce(block, name(2), ROOT)
    with pytest.raises(ValueError, match="unannounced"):
        pool.quarantine([block], "k")
    pool.release([block])
    with pytest.raises(ValueError, match=f"block {block} is cached"):
        pool.release([block])
    with pytest.raises(ValueError, match="is free"):
        pool.retain([(block + 1) % 3])
    with pytest.raises(ValueError, match="is free"):
        pool.announce((block + 1) % 3, name(3), ROOT)
    with pytest.raises(ValueError):
        BlockPool(0)
    with pytest.raises(AssertionError, match=f"block {block} has 0 references, owners hold 1"):
        pool.check({block: 1})


def test_victims_stay_right_under_random_use():
    """The heap with its old entries against a plain search for the coldest leaf."""
    rng, pool, step = random.Random(5), BlockPool(60), 0
    paths = [tuple(rng.randrange(2) for _ in range(length)) for length in (1, 2, 3, 3, 4) for _ in range(6)]
    cached_at: dict[tuple, int] = {}  # path of a cached block -> when it was let go
    held: list[tuple[tuple, list[int]]] = []
    evicted = 0
    for step in range(3000):
        what = rng.random()
        if what < 0.4 and len(held) < 6:
            path = rng.choice(paths)
            table = pool.match(chain(*path))
            for i in range(len(table)):
                cached_at.pop(path[: i + 1], None)
            for i in range(len(table), len(path)):
                (block,) = pool.allocate(1)
                pool.announce(block, name(*path[: i + 1]), name(*path[:i]) if i else ROOT)
                table.append(block)
            held.append((path, table))
        elif what < 0.7 and held:
            path, table = held.pop(rng.randrange(len(held)))
            pool.release(table)
            cached_at |= {path[: i + 1]: step for i, block in enumerate(table) if pool.references(block) == 0}
        elif what > 0.75 and pool.cached:
            pool.take_events()
            extra = pool.allocate(pool.free + 1)  # one victim
            pool.release(extra)
            in_use = {path[: i + 1] for path, _ in held for i in range(len(path))}
            leaves = {p: at for p, at in cached_at.items() if not any(q[:-1] == p for q in (*cached_at, *in_use))}
            (gone,) = pool.take_events()[1]
            victim = next(p for p in cached_at if name(*p) == gone)
            assert leaves[victim] == min(leaves.values()), step
            del cached_at[victim]
            evicted += 1
    assert evicted > 300 and len(cached_at) == pool.cached


class PoolMachine(RuleBasedStateMachine):
    """Sequences over a tiny alphabet, so that prefixes are shared and duplicated all the time."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(12)
        self.sequences: list[tuple[tuple[int, ...], list[int]]] = []  # (path of announced blocks, block table)
        self.quarantines: dict[str, int] = {}
        self.content: dict[int, tuple[int, ...]] = {}  # what a writer would find in each block it filled
        self.resident: set[bytes] = set()
        self.count = 0

    @rule(path=st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple), partial=st.booleans())
    def start(self, path, partial):
        matched = self.pool.match(chain(*path))
        for i, block in enumerate(matched):
            assert self.content[block] == path[: i + 1], "a matched block holds another prefix"
        before = (self.pool.free, self.pool.cached, self.pool.used)
        fresh = self.pool.allocate(len(path) - len(matched) + partial)
        if fresh is None:
            assert before == (self.pool.free, self.pool.cached, self.pool.used)
            self.pool.release(matched)
            return
        table = matched + fresh
        assert len(set(table)) == len(table)
        for i in range(len(matched), len(path)):
            self.content[table[i]] = path[: i + 1]
            self.pool.announce(table[i], name(*path[: i + 1]), name(*path[:i]) if i else ROOT)
        self.sequences.append((path, table))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def finish(self, data):
        _, table = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.release(reversed(table))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data):
        path, table = data.draw(st.sampled_from(self.sequences))
        self.pool.retain(table)
        self.sequences.append((path, list(table)))

    @rule(n=st.integers(1, 4))
    def grant_expires(self, n):
        blocks = self.pool.allocate(n)
        if blocks is not None:
            self.count += 1
            for block in blocks:
                self.content.pop(block, None)
            self.pool.quarantine(blocks, f"q{self.count}")
            self.quarantines[f"q{self.count}"] = n

    @precondition(lambda self: self.quarantines)
    @rule(data=st.data())
    def writer_done(self, data):
        key = data.draw(st.sampled_from(sorted(self.quarantines)))
        assert self.pool.unquarantine(key) == self.quarantines.pop(key)

    @rule()
    def events(self):
        stored, removed = self.pool.take_events()
        assert not self.resident & set(stored) and set(removed) <= self.resident
        self.resident = (self.resident | set(stored)) - set(removed)
        assert self.resident == set(self.pool.resident())

    @rule()
    def flush(self):
        self.pool.drop_cached()
        assert self.pool.cached == 0

    @invariant()
    def adds_up(self):
        self.pool.check(walk(*(table for _, table in self.sequences)))
        assert self.pool.quarantined == sum(self.quarantines.values())


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
