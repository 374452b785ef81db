"""Model of torch's caching allocator for CUDA: how much is allocated, how much is reserved, and what fits.

It requests segments of 2 MiB, of 20 MiB, or of a large tensor's own size, and splits them into blocks. A freed block is
cached for the next tensor of its size, so more is reserved than allocated. The rest of a large block is not split off
if it is at most 1 MiB, so a tensor may hold more than it requested. When the device is full, segments that are
entirely free are released first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from ampwise.tune.memory.allocation_log import SMALLEST, AllocationLog, rounded

__all__ = ["Allocator", "Level", "SimulatedOutOfMemory", "levels"]

MIB = 2**20
SMALL = MIB  # requests up to this come from small segments
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
OWN_SEGMENT, SEGMENT_STEP = 10 * MIB, 2 * MIB  # larger requests get their own segment, rounded up to such steps


class SimulatedOutOfMemory(Exception):
    """The device has no memory for a segment, even after cached ones are released."""


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A part of a segment."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """Bytes at one moment."""

    allocated: int
    reserved: int


class Allocator:
    """Allocator of one device and one stream, with torch's default settings.

    >>> allocator = Allocator()
    >>> first = allocator.allocate(1000)
    >>> allocator.level
    Level(allocated=1024, reserved=2097152)
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity  # of the device, in bytes; None: no limit
        self.allocated = self.reserved = 0
        self.retries = 0  # how often the device was full and cached segments were released
        # Free blocks by size, then by address: the best fit is the first that is large enough.
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: dict[int, MemoryBlock] = {}
        self._next = 0  # address

    @property
    def level(self) -> Level:
        return Level(self.allocated, self.reserved)

    def allocate(self, nbytes: int) -> int | None:
        """Return the address of a tensor; None for an empty one. Raise OutOfMemory if it does not fit."""
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
        """Free a tensor's block, and merge it with free neighbours."""
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

    def _best_fit(self, size: int) -> MemoryBlock | None:
        free = self._free[size <= SMALL]
        place = bisect_left(free, (size, 0))
        return self._blocks[free.pop(place)[1]] if place < len(free) else None

    def _new_segment(self, size: int) -> MemoryBlock:
        small = size <= SMALL
        if small or size < OWN_SEGMENT:
            segment = SMALL_SEGMENT if small else LARGE_SEGMENT
        else:
            segment = -(-size // SEGMENT_STEP) * SEGMENT_STEP
        self._release_cached(segment)
        block = MemoryBlock(self._next, segment, small)
        self._blocks[block.address] = block
        self._next += segment
        self.reserved += segment
        return block

    def _release_cached(self, segment: int) -> None:
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
            raise SimulatedOutOfMemory

    def _cut(self, block: MemoryBlock, size: int) -> None:
        rest = MemoryBlock(block.address + size, block.size - size, block.small, True, block, block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.size, block.after = size, rest
        self._blocks[rest.address] = rest
        insort(self._free[rest.small], (rest.size, rest.address))

    def _join(self, left: MemoryBlock, right: MemoryBlock) -> MemoryBlock:
        for block in (left, right):
            if block.free:
                self._free[block.small].remove((block.size, block.address))
        del self._blocks[right.address]
        left.size += right.size
        left.after, left.free = right.after, False
        if left.after is not None:
            left.after.before = left
        return left


def levels(log: AllocationLog, allocator: Allocator | None = None) -> list[Level]:
    """Return allocated and reserved bytes before the first event and after each."""
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
