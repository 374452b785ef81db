"""Model of torch's caching allocator for CUDA: how much is allocated, how much is reserved, and what fits.

It requests segments of 2 MiB, of 20 MiB, or of a large tensor's own size, and splits them into blocks. A freed block is
cached for the next tensor of its size, so more is reserved than allocated. The rest of a large block is not split off
if it is at most 1 MiB, so a tensor may hold more than it requested. When the device is full, segments that are
entirely free are released first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ampwise.tune.memory.allocation_log import CUDNN, ROUNDING, SMALLEST, AllocationLog, rounded

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
        free = self._free[size <= SMALL]
        place = bisect_left(free, (size, 0))
        block = self._blocks[free.pop(place)[1]] if place < len(free) else self._new_segment(size)
        block.free = False
        left = block.size - size
        if left >= SMALLEST if block.small else left > SMALL:
            rest = MemoryBlock(block.address + size, left, block.small, True, block, block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.size, block.after = size, rest
            self._blocks[rest.address] = rest
            insort(self._free[rest.small], (rest.size, rest.address))
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

    def _new_segment(self, size: int) -> MemoryBlock:
        small = size <= SMALL
        if small or size < OWN_SEGMENT:
            segment = SMALL_SEGMENT if small else LARGE_SEGMENT
        else:
            segment = -(-size // SEGMENT_STEP) * SEGMENT_STEP
        if self.capacity is not None and self.reserved + segment > self.capacity:
            self.retries += 1
            for free in self._free.values():
                for cached, address in list(free):
                    block = self._blocks[address]
                    if block.before is None and block.after is None:  # the whole segment is free
                        free.remove((cached, address))
                        del self._blocks[address]
                        self.reserved -= cached
            if self.reserved + segment > self.capacity:
                raise SimulatedOutOfMemory
        block = MemoryBlock(self._next, segment, small)
        self._blocks[block.address] = block
        self._next += segment
        self.reserved += segment
        return block

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


class Fit(StrEnum):
    """Whether a step fits into a device's memory."""

    YES = "yes"
    TIGHT = "tight"  # only because the allocator releases cached memory in between, which takes time at every step
    NO = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsage:
    """Bytes of a step."""

    peak: int  # torch.cuda.max_memory_allocated()
    least: int  # the same, if cuDNN takes no workspaces for convolutions
    reserved: int  # torch.cuda.max_memory_reserved()
    phase: str  # in which the peak occurs
    split: Mapping[str, int] = field(hash=False)  # of the peak, by kind
    most: Mapping[str, int] = field(hash=False)  # by kind, each at its own moment
    phases: Mapping[str, int] = field(hash=False)  # the peak of each


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """A training step on one rank."""

    log: AllocationLog
    extra: Mapping[str, int]  # bytes that are always allocated, by kind

    @property
    def usage(self) -> MemoryUsage:
        """What torch would report during training, with the allocator's cache of earlier steps."""
        again = self.log.in_training()
        after = levels(again)
        always = sum(self.extra.values())
        phases = {
            phase.name: always + max(level.allocated for level in after[phase.start : phase.end + 1])
            for phase in again.phases
        }
        name = max(phases, key=lambda phase: phases[phase])
        within = again.phase(name)
        moment = max(range(within.start, within.end + 1), key=lambda index: after[index].allocated)
        split = again.split(moment) | dict(self.extra)
        split[ROUNDING] = phases[name] - sum(split.values())
        least = phases[name]
        if CUDNN in self.log.kinds:
            least = always + max(level.allocated for level in levels(again.without(CUDNN))[again.phases[0].start :])
        return MemoryUsage(
            peak=phases[name],
            least=least,
            reserved=always + max(level.reserved for level in after),
            phase=name,
            split=split,
            most=self.log.most() | dict(self.extra),
            phases=phases,
        )

    @property
    def lowest(self) -> int:
        """The peak without allocator overhead."""
        return self.log.peak(*self.log.phases) + sum(self.extra.values())

    def fit(self, available: int) -> Fit:
        """Return whether the step fits the available bytes; if it is close, simulate the allocator with that limit."""
        if self.lowest > available:
            return Fit.NO
        allocator = Allocator(available - sum(self.extra.values()))
        try:
            levels(self.log.in_training(), allocator)
        except SimulatedOutOfMemory:
            return Fit.NO
        return Fit.TIGHT if allocator.retries else Fit.YES
