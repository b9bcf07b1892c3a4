"""Scratch memory of products that split K."""

import weakref

import torch

from headrace.kernels._triton import lane, workspace


def test_outgrown_scratch_stays_where_captured_graphs_know_it():
    """A graph has the addresses of its capture. Scratch given back would be another tensor's by its next replay: on an H200 a
    replay of 256 rows ended in an illegal access once logits of 1,536 rows had asked for more counters than there were."""
    device = torch.device("cpu")
    partial, counter = workspace(device, 1, 1)
    known, counters, room = weakref.ref(partial), weakref.ref(counter), counter.numel()
    del partial, counter
    larger = workspace(device, 1, room + 1)
    assert known() is not None and counters() is not None
    assert known().data_ptr() != larger[0].data_ptr() and counters().data_ptr() != larger[1].data_ptr()
    assert larger[1].numel() >= 2 * room and not larger[1].any()
    assert workspace(device, 1, 1) is larger  # what is not captured shares the largest


def test_a_stream_beside_another_has_scratch_of_its_own():
    """Programs of two products at once would take each other's parts of a sum for their own."""
    device = torch.device("cpu")
    mine = workspace(device, 1, 1)
    with lane(1):
        other = workspace(device, 1, 1)
        with lane(2):
            third = workspace(device, 1, 1)
        assert workspace(device, 1, 1) is other
    assert len({part.data_ptr() for pair in (mine, other, third) for part in pair}) == 6
    assert workspace(device, 1, 1) is mine
