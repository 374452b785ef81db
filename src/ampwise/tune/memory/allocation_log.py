"""Log of allocations and frees in a training step, in order: plain data from which every number is derived."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

# Kinds of memory.
PARAMETERS = "parameters"
GRADIENTS = "gradients"
STATE = "optimizer state"
COMPENSATION = "compensation"  # with bf16-pure,kahan: the part of a weight that BF16 cannot hold
CASTS = "cast cache"  # autocast's copies of weights, in 16 bits
ACTIVATIONS = "activations"  # tensors saved in the forward pass for the backward pass
INPUTS = "inputs"  # the batch, and the model's buffers
GATHERED = "gathered weights"  # with FSDP
REDUCED = "gradient reduction"  # with FSDP
BUCKETS = "DDP buckets"
TEMPORARY = "temporary"
CUDNN = "cuDNN workspaces"  # for convolutions: what cuDNN usually takes, if it is free to
WORKSPACES = "workspaces"  # cuBLAS's, which stay allocated
ROUNDING = "rounding"  # bytes that tensors get beyond what they request
PER_PARAMETER = (PARAMETERS, GRADIENTS, STATE, COMPENSATION)  # kinds that do not depend on the batch

SMALLEST = 512  # bytes: torch's caching allocator rounds up to multiples of it


def rounded(nbytes: int) -> int:
    """Return the bytes that torch's allocator counts for a tensor.

    >>> rounded(0), rounded(4), rounded(512), rounded(513)
    (0, 512, 512, 1024)
    """
    return -(-nbytes // SMALLEST) * SMALLEST


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the step: the events from ``start`` on, before ``end``."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationLog:
    """Blocks of memory by number, and when each is allocated and freed.

    >>> phases = (Phase("forward", 1, 3),)
    >>> log = AllocationLog(sizes=(512, 1024), kinds=("inputs", "temporary"), events=(0, 1, ~1), phases=phases)
    >>> log.peak(log.phase("forward")), log.split(log.peak_at(log.phase("forward")))
    (1536, {'inputs': 512, 'temporary': 1024})
    """

    sizes: tuple[int, ...]  # bytes, as requested
    kinds: tuple[str, ...]
    events: tuple[int, ...]  # n: block n is allocated; ~n: it is freed
    phases: tuple[Phase, ...]
    matmuls: bool = True  # whether there were any, for which cuBLAS has workspaces

    def phase(self, name: str) -> Phase:
        """The phase with this name."""
        return next(phase for phase in self.phases if phase.name == name)

    def levels(self) -> list[int]:
        """Return the allocated bytes before the first event and after each, rounded as torch rounds them."""
        return list(accumulate(map(self._change, self.events), initial=0))

    def peak_at(self, *phases: Phase) -> int:
        """Return after how many events most is allocated, in these phases or at any time; the first if several."""
        levels = self.levels()
        within = (range(phase.start, phase.end + 1) for phase in phases or (Phase("", 0, len(self.events)),))
        return max((index for part in within for index in part), key=lambda index: levels[index])

    def peak(self, *phases: Phase) -> int:
        """Return the most bytes allocated."""
        return self.levels()[self.peak_at(*phases)]

    def alive(self, after: int) -> list[int]:
        """Return the blocks allocated after so many events."""
        found: dict[int, None] = {}
        for event in self.events[:after]:
            if event >= 0:
                found[event] = None
            else:
                found.pop(~event)
        return list(found)

    def split(self, after: int) -> dict[str, int]:
        """Return bytes by kind after so many events."""
        shares: dict[str, int] = {}
        for block in self.alive(after):
            shares[self.kinds[block]] = shares.get(self.kinds[block], 0) + rounded(self.sizes[block])
        return shares

    def most(self) -> dict[str, int]:
        """Return the most bytes of each kind from the first phase on, each at its own moment."""
        start = self.phases[0].start
        now = self.split(start)
        most = dict(now)
        for event in self.events[start:]:
            kind = self.kinds[event if event >= 0 else ~event]
            now[kind] = now.get(kind, 0) + self._change(event)
            most[kind] = max(most.get(kind, 0), now[kind])
        return most

    def without(self, kind: str) -> AllocationLog:
        """Return the log with empty blocks of that kind."""
        return self.scaled({kind: 0})

    def scaled(self, factors: Mapping[str, float]) -> AllocationLog:
        """Return the log with blocks of these kinds so many times as large, rounded up."""
        sizes = (math.ceil(size * factors.get(kind, 1)) for kind, size in zip(self.kinds, self.sizes, strict=True))
        return replace(self, sizes=tuple(sizes))

    def in_training(self, steps: int = 3) -> AllocationLog:
        """Repeat the step, as the allocator's cached blocks depend on the steps before.

        In the first one the optimizer creates its state in its first update. The phases are those of the last step.
        """
        start, update = self.phases[0].start, self.phases[-1].start
        there = self.alive(start)
        left = tuple(~block for block in self.alive(len(self.events)) if block not in {*there})
        state = tuple(block for block in there if self.kinds[block] == STATE)
        first = (*(block for block in there if block not in {*state}), *self.events[start:update], *state)
        between = (*self.events[update:], *left)
        again = (*self.events[start:update], *between)
        before = (*first, *between, *again * (steps - 2))
        shift = len(before) - start
        return replace(
            self,
            events=(*before, *self.events[start:]),
            phases=tuple(Phase(phase.name, phase.start + shift, phase.end + shift) for phase in self.phases),
        )

    def _change(self, event: int) -> int:
        return rounded(self.sizes[event]) if event >= 0 else -rounded(self.sizes[~event])
