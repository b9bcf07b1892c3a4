"""Dealing work over lanes, and running it there."""

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.lanes import Lanes


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 5))
def test_everything_is_dealt_once_and_no_lane_waits_for_most_of_the_time(costs, count):
    dealt = Lanes(count).deal(costs)
    if dealt is None:
        assert count == 1 or len(costs) == 1 or max(costs) * count > 1.6 * sum(costs)
        return
    assert sorted(i for lane in dealt for i in lane) == list(range(len(costs)))
    assert 1 < len(dealt) <= count and all(dealt)
    assert max(sum(costs[i] for i in lane) for lane in dealt) <= sum(costs) / count + max(costs)


def test_pieces_run_side_by_side_with_one_thread_each():
    lanes, barrier = Lanes(3), threading.Barrier(3)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:

        def piece(number):
            barrier.wait(10)  # all of them are here at once, or this raises
            return number, torch.get_num_threads(), torch.is_inference_mode_enabled()

        with torch.inference_mode():
            assert lanes.run([lambda i=i: piece(i) for i in range(3)]) == [(0, 1, True), (1, 1, True), (2, 1, True)]
        assert torch.get_num_threads() == 3
        assert lanes.run([lambda: torch.get_num_threads()]) == [3]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_is_raised_after_all_have_ended(bad):
    ended = []

    def piece(number):
        if number == bad:
            raise ValueError(f"piece {number}")
        time.sleep(0.05)
        ended.append(number)

    with pytest.raises(ValueError, match=f"piece {bad}"):
        Lanes(2).run([lambda i=i: piece(i) for i in range(2)])
    assert ended == [1 - bad]
