"""The replay of PyTorch's caching allocator: its segments, its blocks, what waits for the device."""

from __future__ import annotations

import numpy as np
import pytest
from trioflow.parallel.memory.allocator import CachingAllocator, Requests

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "reserved"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (31 * MIB, 32)],
)
def test_segments_have_the_allocator_s_sizes(size, reserved):
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert allocator.reserved_bytes == reserved * MIB


def test_freed_neighbours_are_one_block_again():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    assert allocator.reserved_bytes == 20 * MIB
    for i in (0, 2, 1, 4, 3):
        allocator.free(blocks[i])
    allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken_and_split_where_much_is_left():
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(12 * MIB)
    allocator.free(large)
    allocator.free(small)
    allocator.allocate(11 * MIB)  # of the 12, whose last MiB is not split off
    allocator.allocate(39 * MIB)
    assert allocator.reserved_bytes == 52 * MIB
    allocator.allocate(MIB + 512)
    assert allocator.reserved_bytes == 72 * MIB


def make_requests(rows, standing=(), states=()):
    birth, death, size = (np.array(column) for column in zip(*rows, strict=True))
    return Requests(list(standing), list(states), birth, death, size * float(MIB))


def test_states_lie_where_the_first_step_left_room_and_the_second_needs_more():
    rows = [(0, 1, 64)]
    assert make_requests(rows).replay() == 64 * MIB
    assert make_requests(rows, states=[32 * MIB]).replay() == 128 * MIB
    assert make_requests(rows, standing=[32 * MIB]).replay() == 96 * MIB


def test_what_is_sent_is_not_to_be_had_before_the_device_has_sent_it():
    rows = [(0, 2, 64), (4, 6, 64)]
    places, messages = np.array([1, 5]), np.array([64.0, 64.0]) * MIB
    assert make_requests(rows).replay() == 64 * MIB
    at_once = make_requests(rows).send(places, messages, 2, np.array([1, 5]))
    assert at_once.replay() == 96 * MIB  # the whole, and a rank's half of it
    assert at_once.death.tolist() == [1, 5, 2, 6] and at_once.size.tolist()[2:] == [32 * MIB] * 2
    late = make_requests(rows).send(places, messages, 2, np.array([9, 9]))
    assert late.replay() == 160 * MIB
