"""Peak of a step as torch would report it, what it consists of, what is reserved, and whether it fits a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ampwise.tune.memory.allocation_log import AllocationLog
from ampwise.tune.memory.allocator import Allocator, SimulatedOutOfMemory, levels

__all__ = ["SLACK", "WORKSPACES", "Fit", "Peak", "check_fit", "find_peak"]

WORKSPACES = "workspaces"  # cuBLAS's, which stay allocated
SLACK = "rounding"  # bytes that tensors get beyond what they request


class Fit(StrEnum):
    """Whether a step fits into a device's memory."""

    YES = "yes"
    TIGHT = "tight"  # only because the allocator releases cached memory in between, which takes time at every step
    NO = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes of a step; at its peak unless noted otherwise."""

    split: Mapping[str, int] = field(hash=False)  # by kind; they add up to ``allocated``
    most: Mapping[str, int] = field(hash=False)  # by kind, each at its own moment
    allocated: int  # torch.cuda.max_memory_allocated()
    reserved: int  # torch.cuda.max_memory_reserved()
    phase: str  # in which the peak occurs
    phases: Mapping[str, int] = field(hash=False)  # the peak of each


def find_peak(log: AllocationLog, extra: Mapping[str, int]) -> Peak:
    """Compute the peak of a step during training, with the allocator's cache of earlier steps, plus ``extra`` bytes."""
    again = log.in_training()
    after = levels(again)
    always = sum(extra.values())
    phases = {
        phase.name: always + max(level.allocated for level in after[phase.start : phase.end + 1])
        for phase in again.phases
    }
    name = max(phases, key=lambda phase: phases[phase])
    within = again.phase(name)
    moment = max(range(within.start, within.end + 1), key=lambda index: after[index].allocated)
    split = again.split(moment) | dict(extra)
    split[SLACK] = phases[name] - sum(split.values())
    return Peak(
        split=split,
        most=log.most() | dict(extra),
        allocated=phases[name],
        reserved=always + max(level.reserved for level in after),
        phase=name,
        phases=phases,
    )


def check_fit(log: AllocationLog, extra: Mapping[str, int], available: int) -> Fit:
    """Return whether the step fits the available bytes; if it is close, simulate the allocator with that limit."""
    left = available - sum(extra.values())
    if log.peak(*log.phases) > left:
        return Fit.NO
    allocator = Allocator(left)
    try:
        levels(log.in_training(), allocator)
    except SimulatedOutOfMemory:
        return Fit.NO
    return Fit.TIGHT if allocator.retries else Fit.YES
