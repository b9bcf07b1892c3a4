"""The tier without the bus: real memory, real writes, a clock that the test turns."""

import time
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.kv.grants import effects as fx
from headrace.kvstore.store import Limits, Store, StoreError
from headrace.transfer import Memory

NS, OTHER = b"n" * 16, b"o" * 16
WRITER = "w~-~1"


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def make(capacity: int = 1 << 16, **limits) -> Store:
    return Store(Memory("store", kinds=("tcp",)), capacity, Limits(**limits))


def put(store: Store, numbers, now: float, nbytes: int = 1024, kind: str = "block", parents=None, namespace: bytes = NS):
    """Reserve, write straight into the arena, commit. -> effects of the commit and of the check."""
    keys = b"".join(map(key, numbers))
    above = b"".join(map(key, parents)) if parents else b""
    grant, generation, offsets = store.reserve(WRITER, namespace, keys, [nbytes] * len(numbers), kind, above, 10.0, [], now)
    data = [bytes([number % 251 + 1]) * nbytes for number, offset in zip(numbers, offsets, strict=True) if offset >= 0]
    for offset, part in zip([o for o in offsets if o >= 0], data, strict=True):
        store.view[offset : offset + nbytes] = part
    if not grant:
        return []
    effects = store.commit(grant, generation, [crc32(part) for part in data], now)
    assert [type(effect) for effect in effects] == [fx.Verify]
    return store.checked(grant, effects[0].record, store.verify(grant, effects[0].record), now)


def find(store: Store, numbers, now: float, namespace: bytes = NS, states=()) -> tuple[str, int, list[bool]]:
    handle, blocks, snapshots = store.lookup(
        "worker", namespace, b"".join(map(key, numbers)), b"".join(map(key, states)), 10.0, now
    )
    for stored, number in zip(blocks, numbers, strict=False):
        data = bytes(store.view[stored.offset : stored.offset + stored.nbytes])
        assert data == bytes([number % 251 + 1]) * stored.nbytes and crc32(data) == stored.checksum
    return handle, len(blocks), [snapshot is not None for snapshot in snapshots]


def test_write_then_find_the_prefix():
    store = make()
    assert put(store, [1, 2, 3], 0.0) == [fx.Stored(3, 0)]
    handle, count, states = find(store, [1, 2, 3, 4], 1.0, states=[2, 3])
    assert count == 3 and states == [False, False]
    assert store.release(handle, 2.0) and store.release(handle, 2.0)  # the second one repeats the answer
    assert find(store, [2], 1.0)[1] == 1 and find(store, [4, 1], 1.0) == ("", 0, [])
    assert put(store, [3, 4], 3.0) == [fx.Stored(1, 0)]  # 3 is here already
    store.check()


def test_nothing_is_visible_before_its_checksum_fitted():
    store = make()
    grant, generation, offsets = store.reserve(WRITER, NS, key(1) + key(2), [100, 100], "block", b"", 10.0, [], 0.0)
    assert find(store, [1], 0.0)[1] == 0
    assert store.reserve(WRITER, NS, key(1), [100], "block", b"", 10.0, [], 0.0) == ("", 0, [-1])  # somebody is writing it
    store.view[offsets[0] : offsets[0] + 100] = b"a" * 100
    (verify,) = store.commit(grant, generation, [crc32(b"a" * 100), 12345], 1.0)
    assert find(store, [1], 1.0)[1] == 0
    assert store.commit(grant, generation, [crc32(b"a" * 100), 12345], 1.0) == []  # waits for the first one's answer
    good = store.verify(grant, verify.record)
    assert good == (True, False)
    assert store.checked(grant, verify.record, good, 2.0) == [fx.Stored(1, 1)]
    assert store.commit(grant, generation, [1, 2], 2.0) == [fx.Stored(1, 1)]
    assert len(store.lookup("w", NS, key(1) + key(2), b"", 1.0, 2.0)[1]) == 1
    store.check()


def test_tenants_do_not_see_each_other():
    store = make()
    put(store, [1], 0.0)
    assert find(store, [1], 0.0, namespace=OTHER)[1] == 0
    put(store, [1], 0.0, namespace=OTHER)
    assert find(store, [1], 0.0, namespace=OTHER)[1] == 1
    store.check()


def test_snapshots_are_found_by_key_beside_blocks_of_the_same_key():
    store = make()
    put(store, [1, 2], 0.0)
    put(store, [2], 0.0, nbytes=5000, kind="state")
    handle, count, states = find(store, [1, 2, 3], 1.0, states=[1, 2, 3])
    assert count == 2 and states == [False, True, False]
    store.release(handle, 1.0)
    store.check()


def test_pins_expire_and_say_so():
    store = make()
    put(store, [1], 0.0)
    handle = find(store, [1], 0.0)[0]
    store.tick(9.9)
    assert store.objects.pinned_bytes == 1024
    store.tick(10.0)
    assert store.objects.pinned_bytes == 0 and not store.release(handle, 10.1)
    again = find(store, [1], 11.0)[0]
    assert not store.release(again, 21.5)  # over, though no sweep came by
    assert not store.release("nonsense", 1.0)
    store.check()


def test_eviction_starts_and_stops_at_the_watermarks_and_spares_pins():
    store = make(100 * 1024)
    put(store, range(1, 71), 0.0)
    handle, count, _ = find(store, range(1, 6), 1.0)
    assert count == 5
    put(store, range(71, 81), 2.0)
    store.tick(2.0)
    assert store.counters["evicted_blocks"] == 0  # 80 % exactly
    put(store, [81], 3.0)
    store.tick(3.0)
    assert store.arena.used == 70 * 1024 and store.counters["evicted_blocks"] == 11
    assert find(store, range(1, 6), 4.0)[1] == 5  # pinned all the time
    assert find(store, [6], 4.0)[1] == 0 and find(store, [81], 4.0)[1] == 1
    store.check()


def test_leaves_go_first():
    store = make(10 * 1024, start=0.5, stop=0.4, refuse=1.0)
    put(store, [1, 2, 3, 4], 0.0, parents=[0, 1, 2, 3])
    put(store, [5, 6], 0.0)
    store.tick(1.0)
    assert find(store, [1, 2, 3, 4], 2.0)[1] == 3
    store.check()


def test_full_is_refused_with_numbers_and_changes_nothing():
    store = make(10 * 1024)
    put(store, range(1, 8), 0.0)
    find(store, range(1, 8), 0.0)  # all pinned
    with pytest.raises(
        StoreError, match=r"no room for 3,072 bytes: 7,168 of 10,240 are in use, 7,168 of them pinned"
    ) as caught:
        put(store, [8, 9, 10], 1.0)
    assert caught.value.code == "full" and caught.value.retry_after > 0
    store.check()
    put(store, [8, 9], 1.0)
    store.check()


def test_a_gap_for_a_large_object_is_made():
    store = make(64 * 1024, start=0.99, stop=0.98, refuse=1.0)
    put(store, range(1, 61), 0.0)
    held = store.arena.allocate(4096)  # the rest
    for number in range(2, 61, 2):  # every second one stays warm: half the arena could go, in 1 KiB pieces
        store.release(find(store, [number], 5.0)[0], 5.0)
    put(store, [99], 6.0, nbytes=4096, kind="state")
    assert find(store, [], 6.0, states=[99])[2] == [True]
    store.arena.free(held, 4096)
    store.check()


def test_expired_grant_is_quarantined_until_its_writer_is_done_or_dead():
    store = make()
    store.memory.fenced = lambda writer: False  # as for a living writer over shm
    grant, generation, _ = store.reserve(WRITER, NS, key(1), [1000], "block", b"", 5.0, [], 0.0)
    assert store.memory.is_armed(generation)
    store.tick(5.0)
    assert not store.memory.is_armed(generation)
    assert store.bytes_by_state()["quarantined"] == 1024 and store.bytes_by_state()["writing"] == 0
    store.tick(500.0)
    assert store.bytes_by_state()["quarantined"] == 1024  # time alone frees nothing
    assert isinstance(store.commit(grant, generation, [1], 501.0)[0], fx.Stale)
    assert store.arena.used == 0
    grant, generation, _ = store.reserve(WRITER, NS, key(1), [1000], "block", b"", 5.0, [], 600.0)
    store.tick(605.0)
    store.memory.fenced = lambda writer: True  # its lock is free now
    store.tick(606.0)
    assert store.arena.used == 0
    store.check()


def test_an_abandoned_grant_is_free_at_once():
    store = make()
    grant, generation, _ = store.reserve(WRITER, NS, key(1), [1000], "block", b"", 5.0, [], 0.0)
    assert store.release(grant, 1.0) and store.arena.used == 0 and not store.memory.is_armed(generation)
    assert isinstance(store.commit(grant, generation, [1], 2.0)[0], fx.Stale)
    store.check()


def test_unused_objects_are_dropped_after_their_time():
    store = make(ttl=100.0)
    put(store, [1, 2], 0.0)
    store.release(find(store, [1], 60.0)[0], 60.0)
    store.tick(100.0)
    assert find(store, [2], 100.0)[1] == 0 and find(store, [1], 100.0)[1] == 1
    assert store.counters["expired_objects"] == 1
    store.check()


def test_what_expired_but_was_not_swept_yet_may_be_written_again():
    store = make(1 << 20, ttl=100.0)
    put(store, range(1, 401), 0.0)
    assert find(store, [400], 101.0)[1] == 0
    assert put(store, [400], 101.0) == [fx.Stored(1, 0)]  # 256 victims per turn: the old one is still there
    assert find(store, [400], 101.0)[1] == 1
    store.check()


def test_handles_are_bounded():
    store = make(handles=2)
    put(store, [1], 0.0)
    handles = [find(store, [1], 0.0)[0] for _ in range(2)]
    with pytest.raises(StoreError, match="2 lookups and grants are open") as caught:
        find(store, [1], 0.0)
    assert caught.value.code == "busy"
    store.release(handles[0], 0.0)
    find(store, [1], 0.0)
    store.check()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((WRITER, NS, b"short", [1], "block", b""), "16 bytes each; got 5"),
        ((WRITER, NS, key(1), [], "block", b""), "1 keys, 0 sizes"),
        ((WRITER, NS, key(1), [0], "block", b""), "an object of 0 bytes"),
        ((WRITER, NS, key(1), [1 << 30], "block", b""), "the arena has 65,536"),
        ((WRITER, NS, key(1), [1], "thing", b""), "kind 'thing'"),
        ((WRITER, NS, key(1), [1], "block", key(1) + key(2)), "2 parents"),
        (("somebody", NS, key(1), [1], "block", b""), "not an incarnation"),
    ],
)
def test_bad_reservations_are_named(arguments, words):
    store = make()
    with pytest.raises(StoreError, match=words) as caught:
        store.reserve(*arguments, 10.0, [], 0.0)
    assert caught.value.code == "invalid" and store.arena.used == 0


def test_wrong_number_of_checksums():
    store = make()
    grant, generation, _ = store.reserve(WRITER, NS, key(1), [1000], "block", b"", 5.0, [], 0.0)
    with pytest.raises(StoreError, match="1 objects; 2 checksums"):
        store.commit(grant, generation, [1, 2], 0.0)
    store.check()


class StoreMachine(RuleBasedStateMachine):
    """Workers that write, read, crash and forget, in a small arena; the walk over owners must add up after every
    step."""

    def __init__(self):
        super().__init__()
        self.store = make(40 * 1024, ttl=200.0, lease=10.0, handles=12)
        self.store.memory.fenced = lambda writer: self.fence
        self.fence = False
        self.now = 0.0
        self.grants: list[tuple[str, int, list[bytes]]] = []
        self.handles: list[tuple[str, list, float]] = []

    @rule(numbers=st.lists(st.integers(1, 30), min_size=1, max_size=5), state=st.booleans(), other=st.booleans())
    def reserve(self, numbers, state, other):
        nbytes = 3000 if state else 1000
        try:
            grant, generation, offsets = self.store.reserve(
                WRITER, OTHER if other else NS, b"".join(map(key, numbers)), [nbytes] * len(numbers),
                "state" if state else "block", b"".join(key(n // 2) for n in numbers), 5.0, [], self.now,
            )  # fmt: skip
        except StoreError as error:
            assert error.code in ("full", "busy")
            return
        data = []
        for number, offset in zip(numbers, offsets, strict=True):
            if offset >= 0:
                data.append(bytes([number]) * nbytes)
                self.store.view[offset : offset + nbytes] = data[-1]
        if grant:
            self.grants.append((grant, generation, data))

    @precondition(lambda self: self.grants)
    @rule(which=st.integers(0, 99), broken=st.booleans(), forget=st.booleans())
    def commit(self, which, broken, forget):
        index = which % len(self.grants)
        grant, generation, data = self.grants.pop(index) if forget else self.grants[index]
        sums = [crc32(part) for part in data]
        if broken:
            sums[0] ^= 1
        for effect in self.store.commit(grant, generation, sums, self.now):
            if isinstance(effect, fx.Verify):
                good = self.store.verify(grant, effect.record)
                assert good == ((not broken), *([True] * (len(data) - 1)))
                self.store.checked(grant, effect.record, good, self.now)

    @precondition(lambda self: self.grants)
    @rule(which=st.integers(0, 99))
    def abandon(self, which):
        self.store.release(self.grants.pop(which % len(self.grants))[0], self.now)

    @rule(numbers=st.lists(st.integers(1, 30), max_size=5), state=st.booleans())
    def lookup(self, numbers, state):
        wanted = b"".join(map(key, numbers))
        try:
            handle, blocks, snapshots = self.store.lookup(
                "w", NS, b"" if state else wanted, wanted if state else b"", 5.0, self.now
            )
        except StoreError as error:
            assert error.code == "busy"
            return
        found = blocks + [s for s in snapshots if s is not None]
        assert bool(handle) == bool(found)
        if handle:
            self.handles.append(
                (handle, [(s, bytes(self.store.view[s.offset : s.offset + s.nbytes])) for s in found], self.now + 5.0)
            )

    @precondition(lambda self: self.handles)
    @rule(which=st.integers(0, 99))
    def release(self, which):
        handle, found, until = self.handles.pop(which % len(self.handles))
        same = all(self.store.view[s.offset : s.offset + s.nbytes] == data for s, data in found)
        valid = self.store.release(handle, self.now)
        assert valid == (self.now < until)
        assert same or not valid, "bytes changed under a pin that the store says held"

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 60.0]), dead=st.booleans())
    def time_passes(self, seconds, dead):
        self.now += seconds
        self.fence = dead
        self.store.tick(self.now)

    @invariant()
    def adds_up(self):
        self.store.check()

    def teardown(self):
        self.fence = True
        for _ in range(4):
            self.now += 30.0
            self.store.tick(self.now)
        assert self.store.bytes_by_state()["pinned"] == 0
        sizes = self.store.bytes_by_state()
        assert sizes["writing"] == sizes["quarantined"] == 0 and len(self.store.held) == len(self.store.grants) == 0


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_a_turn_of_eviction_is_short():
    """Bounded victims per turn, so that the event loop goes on."""
    store = make(4 << 20, start=0.5, stop=0.0, refuse=1.0)
    put(store, range(1, 2001), 0.0, nbytes=128 * 8)
    put(store, range(2001, 2501), 0.0, nbytes=128 * 8)
    before = store.counters["evicted_blocks"]
    started = time.thread_time()
    assert store.evict(1.0)
    assert store.counters["evicted_blocks"] - before == 256 and time.thread_time() - started < 0.02
