"""Bytes beside the blocks: what is packed comes back, what is not a slab is refused."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.api import EngineInfo, Handoff
from headrace.worker import slab

INFO = EngineInfo("sim", "l", "c", 128, 64, 300, 40, 8, 4, 100, 1000, (1,), "m")


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=100), st.binary(max_size=300), st.binary(max_size=40), st.integers(0, 2**31)
)
def test_round_trip_in_a_slot(ids, state, hidden, floor):
    packed = slab.pack(Handoff(ids, state, hidden, floor))
    assert len(packed) <= slab.slot_bytes(INFO)
    slot = bytearray(b"\xff" * slab.slot_bytes(INFO))
    slot[: len(packed)] = packed
    back = slab.unpack(memoryview(slot))
    assert (back.ids, bytes(back.state), bytes(back.hidden), back.decoder_floor) == (array("I", ids), state, hidden, floor)


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data):
    with pytest.raises(ValueError, match="slab"):
        slab.unpack(memoryview(data))


def test_a_cut_slab_is_refused():
    packed = slab.pack(Handoff([1, 2, 3], b"state", b"hidden"))
    with pytest.raises(ValueError, match="announces"):
        slab.unpack(memoryview(packed)[:-1])
