"""The copy of torch's caching allocator: laws, what is known of its sizes, and torch's own where there is a GPU."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ampwise.tune.memory.allocation_log import rounded
from ampwise.tune.memory.allocator import MIB, Allocator, Level, SimulatedOutOfMemory

sizes = st.one_of(st.integers(1, 4_000), st.integers(500_000, 3 * MIB), st.integers(1, 40 * MIB))
plays = st.lists(st.tuples(sizes, st.integers(0, 99)), max_size=40)  # what to take, and which one to give back


def play(allocator, play, each=lambda: None):
    """Take a tensor each time, and give one back every other time."""
    places = []
    for number, (size, which) in enumerate(play):
        places.append((allocator.allocate(size), size))
        each()
        if number % 2:
            allocator.release(places.pop(which % len(places))[0])
            each()
    return places


@given(plays)
def test_tensors_do_not_overlap_and_are_counted(moves):
    allocator = Allocator()
    places = sorted(play(allocator, moves))
    for (start, size), (after, _) in pairwise(places):
        assert start + size <= after
    asked = sum(rounded(size) for _, size in places)
    assert asked <= allocator.allocated <= allocator.reserved
    assert allocator.allocated <= asked + len(places) * MIB  # of a block, a mebibyte at most is not cut off


@given(plays)
@example([(1, 0), (1481729, 0), (13197825, 0), (13197825, 0)])
def test_what_is_given_back_is_there_again(moves):
    allocator = Allocator()
    for address, _ in play(allocator, moves):
        allocator.release(address)
    assert allocator.allocated == 0
    reserved = allocator.reserved
    for size, _ in moves:  # alone; together they may be laid out less well than before
        allocator.release(allocator.allocate(size))
    assert allocator.reserved == reserved  # what was there once takes nothing more from the device


@given(plays, st.integers(20, 400))
def test_a_limit_is_kept_or_said(moves, mebibytes):
    allocator, free = Allocator(mebibytes * MIB), Allocator()
    try:
        play(allocator, moves, lambda: None)
    except SimulatedOutOfMemory:
        play(free, moves)
        assert free.reserved > mebibytes * MIB
    assert allocator.reserved <= mebibytes * MIB


def test_segments_are_of_the_sizes_that_torch_asks_for():
    for asked, allocated, reserved in (
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # of the segment, a mebibyte is left: too little to be cut off
        (11 * MIB + 1, 12 * MIB, 12 * MIB),
    ):
        allocator = Allocator()
        allocator.allocate(asked)
        assert allocator.level == Level(allocated, reserved), asked


def test_a_full_device_is_given_back_what_is_free():
    allocator = Allocator(30 * MIB)
    first = allocator.allocate(16 * MIB)
    allocator.release(first)
    allocator.allocate(24 * MIB)
    assert (allocator.retries, allocator.reserved) == (1, 24 * MIB)
    with pytest.raises(SimulatedOutOfMemory):
        allocator.allocate(12 * MIB)


def test_what_just_fits_does():
    allocator = Allocator(20 * MIB)
    allocator.allocate(20 * MIB)
    assert (allocator.retries, allocator.reserved) == (0, 20 * MIB)


def test_no_bytes_take_no_memory():
    allocator = Allocator()
    assert allocator.allocate(0) is None
    allocator.release(None)
    assert allocator.level == Level(0, 0)


@pytest.mark.gpu
def test_torch_says_the_same():
    import random

    import torch

    torch.cuda.empty_cache()
    start = Level(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    if start != Level(0, 0):
        pytest.skip("something else of this process is on the GPU")
    draw = random.Random(0)
    allocator, held = Allocator(), []
    for _ in range(400):
        if held and draw.random() < 0.5:
            tensor, address = held.pop(draw.randrange(len(held)))
            del tensor
            allocator.release(address)
        else:
            size = draw.choice((draw.randrange(1, 5_000), draw.randrange(1, 3 * MIB), draw.randrange(1, 60 * MIB)))
            held.append((torch.empty(size, dtype=torch.uint8, device="cuda"), allocator.allocate(size)))
        assert allocator.level == Level(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
