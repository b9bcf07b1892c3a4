"""State snapshots: a record's bytes, and a store that stays within its bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.snapshots import HEADER_BYTES, Snapshot, SnapshotStore, encode


def test_a_record_survives_the_journey():
    record = encode(1280, 1152, b"state")
    assert Snapshot.decode(memoryview(bytearray(record))) == Snapshot(1280, 1152, memoryview(b"state"))
    assert len(record) == HEADER_BYTES + 5


GOOD = encode(1, 0, b"abc")


@pytest.mark.parametrize("damage", [b"", b"short", b"XXXX" + GOOD[4:], GOOD[:-1], GOOD + b"x"])
def test_other_bytes_are_refused(damage):
    with pytest.raises(ValueError, match="snapshot"):
        Snapshot.decode(damage)


@pytest.mark.parametrize(
    ("position", "decoder_floor", "floor", "serves"),
    [
        (256, 0, 0, True),  # exact: decoder layers have run everywhere
        (256, 256, 300, True),  # no decoder row yet, and none is wanted below the floor
        (256, 256, 250, False),  # rows 250 to 255 are wanted and missing
        (256, 200, 250, True),
        (256, 200, 199, False),
    ],
)
def test_a_snapshot_serves_prompts_that_need_no_older_decoder_rows(position, decoder_floor, floor, serves):
    assert Snapshot(position, decoder_floor, memoryview(b"")).serves(floor) is serves


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 60)), max_size=40))
def test_the_store_keeps_the_most_recently_used_within_its_limit(steps):
    store, model = SnapshotStore(150), {}
    for name, size in steps:
        key = bytes([name]) * 16
        if size % 3 == 0:
            found = store.get(key)
            assert (found is not None) == (key in model) == (key in store)
            if found:
                model[key] = model.pop(key)
        else:
            record = encode(128, 0, bytes(size))
            store.add(key, record)
            model.pop(key, None)
            model[key] = len(record)
            while sum(model.values()) > 150:
                del model[next(iter(model))]
        assert store.bytes == sum(model.values()) <= 150 and len(store) == len(model)


def test_a_record_larger_than_the_store_replaces_what_it_names_and_is_not_kept():
    store = SnapshotStore(50)
    store.add(b"a", encode(128, 0, b"x"))
    store.add(b"b", encode(128, 0, b"y"))
    store.add(b"a", encode(128, 0, bytes(100)))
    assert b"a" not in store and b"b" in store and store.bytes == HEADER_BYTES + 1
