"""Torch's caching allocator for CUDA, as far as it decides how much is allocated, how much is reserved, and what fits.

It asks the device for segments of 2 MiB, of 20 MiB, or of a large tensor's own size, and cuts them into blocks. A freed
block is kept for the next tensor of its size, so that more is reserved than allocated; and what would be left over of a
large block is not cut off where it is a mebibyte or less, so that a tensor may hold more than it asked for. Where the
device has no more, segments that are free as a whole go back to it first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from ampwise.tune.memory.log import SMALLEST, Log, rounded

__all__ = ["Allocator", "Level", "OutOfMemory", "levels"]

MIB = 2**20
SMALL = MIB  # what asks for no more than this comes from the small segments
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
OWN_SEGMENT, SEGMENT_STEP = 10 * MIB, 2 * MIB  # what asks for so much has a segment of its own, in such steps


class OutOfMemory(Exception):
    """The device has no room for a segment, even when it was given back what is free."""


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: Block | None = None
    after: Block | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """Bytes at one moment."""

    allocated: int
    reserved: int


class Allocator:
    """Of one device and one stream, with torch's default settings.

    >>> allocator = Allocator()
    >>> first = allocator.allocate(1000)
    >>> allocator.level
    Level(allocated=1024, reserved=2097152)
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity  # of the device, in bytes; None: no limit
        self.allocated = self.reserved = 0
        self.retries = 0  # how often the device was full, and segments went back to it
        # Free blocks by size, then by address: the best fit is the first that is large enough.
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: dict[int, Block] = {}
        self._next = 0  # address

    @property
    def level(self) -> Level:
        return Level(self.allocated, self.reserved)

    def allocate(self, nbytes: int) -> int | None:
        """Where a tensor lies; None for one without bytes. OutOfMemory if there is no room."""
        if nbytes <= 0:
            return None
        size = rounded(nbytes)
        block = self._best_fit(size) or self._new_segment(size)
        block.free = False
        rest = block.size - size
        if rest >= SMALLEST if block.small else rest > SMALL:
            self._cut(block, size)
        self.allocated += block.size
        return block.address

    def release(self, address: int | None) -> None:
        """Give a tensor's block back, joined to the free ones beside it."""
        if address is None:
            return
        block = self._blocks[address]
        self.allocated -= block.size
        if block.before is not None and block.before.free:
            block = self._join(block.before, block)
        if block.after is not None and block.after.free:
            block = self._join(block, block.after)
        block.free = True
        insort(self._free[block.small], (block.size, block.address))

    def _best_fit(self, size: int) -> Block | None:
        free = self._free[size <= SMALL]
        place = bisect_left(free, (size, 0))
        return self._blocks[free.pop(place)[1]] if place < len(free) else None

    def _new_segment(self, size: int) -> Block:
        small = size <= SMALL
        if small or size < OWN_SEGMENT:
            segment = SMALL_SEGMENT if small else LARGE_SEGMENT
        else:
            segment = -(-size // SEGMENT_STEP) * SEGMENT_STEP
        self._make_room(segment)
        block = Block(self._next, segment, small)
        self._blocks[block.address] = block
        self._next += segment
        self.reserved += segment
        return block

    def _make_room(self, segment: int) -> None:
        if self.capacity is None or self.reserved + segment <= self.capacity:
            return
        self.retries += 1
        for free in self._free.values():
            for size, address in list(free):
                block = self._blocks[address]
                if block.before is None and block.after is None:
                    free.remove((size, address))
                    del self._blocks[address]
                    self.reserved -= size
        if self.reserved + segment > self.capacity:
            raise OutOfMemory

    def _cut(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.small, True, block, block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.size, block.after = size, rest
        self._blocks[rest.address] = rest
        insort(self._free[rest.small], (rest.size, rest.address))

    def _join(self, left: Block, right: Block) -> Block:
        for block in (left, right):
            if block.free:
                self._free[block.small].remove((block.size, block.address))
        del self._blocks[right.address]
        left.size += right.size
        left.after, left.free = right.after, False
        if left.after is not None:
            left.after.before = left
        return left


def levels(log: Log, allocator: Allocator | None = None) -> list[Level]:
    """What torch would say after each event; first, before any."""
    allocator = allocator or Allocator()
    places: dict[int, int | None] = {}
    found = [allocator.level]
    for event in log.events:
        if event >= 0:
            places[event] = allocator.allocate(log.sizes[event])
        else:
            allocator.release(places.pop(~event))
        found.append(allocator.level)
    return found
