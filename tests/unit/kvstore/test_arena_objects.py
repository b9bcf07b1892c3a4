"""Places and victims: the arena against a plain map, the index by its rules."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kv.arena import ALIGN, Arena, room
from headrace.kvstore.objects import BLOCK, STATE, Objects, Stored
from headrace.kvstore.settings import KvStoreSettings, parse_bytes

NS = b"n" * 16


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3000), st.booleans()), max_size=60), st.randoms(use_true_random=False))
def test_arena_never_overlaps_and_joins_all_gaps(operations, rng):
    arena = Arena(16 * 1024)
    live: dict[int, int] = {}
    for take, nbytes, high in operations:
        if take:
            offset = arena.allocate(nbytes, high)
            if offset is None:
                assert arena.largest < room(nbytes)
                continue
            assert offset % ALIGN == 0
            live[offset] = nbytes
        elif live:
            offset = rng.choice(sorted(live))
            arena.free(offset, live.pop(offset))
        spans = sorted([(o, o + room(n)) for o, n in live.items()] + arena.gaps())
        assert spans[0][0] == 0 and spans[-1][1] == arena.capacity
        assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
        gaps = arena.gaps()
        assert all(a[1] < b[0] for a, b in zip(gaps, gaps[1:], strict=False)), "two gaps side by side"
        assert arena.used == sum(map(room, live.values()))


def test_two_kinds_grow_towards_each_other():
    arena = Arena(100 * ALIGN)
    blocks = [arena.allocate(ALIGN) for _ in range(10)]
    states = [arena.allocate(20 * ALIGN, high=True) for _ in range(2)]
    assert blocks == [i * ALIGN for i in range(10)] and states == [80 * ALIGN, 60 * ALIGN]
    for offset in blocks[::2]:
        arena.free(offset, ALIGN)
    assert arena.allocate(50 * ALIGN) == 10 * ALIGN  # the holes among blocks did not cost the large gap


def stored(key: int, kind: str = BLOCK, parent: int = 0) -> Stored:
    return Stored((kind, NS, key.to_bytes(16, "big")), (BLOCK, NS, parent.to_bytes(16, "big")), 0, 100, 0, 1)


def order(objects: Objects, now: float) -> list[tuple[int, str]]:
    out = []
    while (victim := objects.evict(now)) is not None:
        out.append((int.from_bytes(victim[0].key[2], "big"), victim[1]))
    return out


def test_snapshots_go_first_then_leaves_then_their_parents():
    objects = Objects(ttl=1000.0)
    for now, (key, parent) in enumerate([(1, 0), (2, 1), (3, 2), (9, 1)]):
        objects.add(stored(key, parent=parent), float(now))
    objects.add(stored(3, STATE), 10.0)
    assert order(objects, 20.0) == [(3, "room"), (3, "room"), (2, "room"), (9, "room"), (1, "room")]


def test_use_and_pins_keep_an_object():
    objects = Objects(ttl=1000.0)
    for key in (1, 2, 3):
        objects.add(stored(key), float(key))
    first = objects.get(stored(1).key, 4.0)
    objects.touch(first, 4.0)
    second = objects.get(stored(2).key, 4.0)
    objects.pin(second)
    objects.pin(second)
    assert order(objects, 5.0) == [(3, "room"), (1, "room")] and objects.pinned_bytes == 100
    objects.unpin(second)
    assert order(objects, 5.0) == []
    objects.unpin(second)
    assert order(objects, 5.0) == [(2, "room")] and objects.pinned_bytes == 0 and len(objects) == 0


def test_what_expired_is_not_found_and_goes_before_snapshots():
    objects = Objects(ttl=10.0)
    objects.add(stored(1), 0.0)
    objects.add(stored(2, parent=1), 0.0)
    objects.add(stored(3), 5.0)
    objects.add(stored(4, STATE), 6.0)
    assert objects.get(stored(2).key, 9.9) is not None and objects.get(stored(2).key, 10.0) is None
    assert objects.get(stored(1).key, 10.0) is not None  # its child is still here
    assert objects.expired(10.0) and not objects.expired(9.9)
    assert objects.evict(12.0)[1] == "expired" and objects.evict(12.0)[1] == "expired"
    assert not objects.expired(12.0)
    assert [key for key, _ in order(objects, 12.0)] == [4, 3]


def test_namespaces_and_kinds_are_apart():
    objects = Objects(ttl=10.0)
    objects.add(stored(1), 0.0)
    assert objects.get((BLOCK, b"m" * 16, stored(1).key[2]), 1.0) is None
    assert objects.get((STATE, NS, stored(1).key[2]), 1.0) is None
    assert not objects.add(stored(1), 1.0) and objects.add(stored(1, STATE), 1.0)


def test_events_are_net_changes_of_blocks():
    objects = Objects(ttl=10.0)
    objects.add(stored(1), 0.0)
    objects.add(stored(2, STATE), 0.0)
    assert objects.take_events() == ([stored(1).key[2]], [])
    order(objects, 1.0)
    objects.add(stored(1), 2.0)
    assert objects.take_events() == ([], [])


def test_victims_stay_right_under_random_use():
    """The queue with its stale entries against a plain search for the coldest leaf."""
    rng, objects, now = random.Random(3), Objects(ttl=1e9), 0.0
    here: dict[int, Stored] = {}
    for step in range(4000):
        now += 1
        key = rng.randrange(1, 60)
        what = rng.random()
        if key not in here and what < 0.6:
            here[key] = stored(key, parent=key // 2)
            objects.add(here[key], now)
        elif key in here and what < 0.7:
            objects.touch(here[key], now)
        elif key in here and what < 0.8:
            (objects.unpin if here[key].pins else objects.pin)(here[key])
        elif what > 0.9:
            free = {k: s for k, s in here.items() if not s.pins and not any(child // 2 == k for child in here)}
            victim = objects.evict(now)
            if not free:
                assert victim is None, step
            else:
                expected = min(free.values(), key=lambda s: s.used)
                assert victim[0].used == expected.used, step
                del here[int.from_bytes(victim[0].key[2], "big")]
    assert len(objects) == len(here) > 10


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1GiB", 1 << 30), ("512 MiB", 1 << 29), ("1.5g", 1_500_000_000), (4096, 4096), ("64kib", 65536), ("2TB", 2 * 10**12)],
)
def test_sizes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "lots", "-1", "1 GiB extra", "1x"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="write for example 1GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--capacity-bytes", "1KiB"], "at least 64KiB"),
        (["--evict-start", "0.5"], "watermarks must rise"),
        (["--tiered-kv-storage-path", "/x"], "in memory only"),
        (["--capacity-bytes", "much"], "is not a size"),
    ],
)
def test_settings_that_make_no_sense(flags, words):
    from headrace.bus import SettingsError

    with pytest.raises(SettingsError, match=words):
        KvStoreSettings.load(flags, "kvstore")
