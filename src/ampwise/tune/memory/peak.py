"""What torch would report of a step: the peak, what it consists of, what is reserved; and whether a device has room."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ampwise.tune.memory.allocator import Allocator, OutOfMemory, levels
from ampwise.tune.memory.log import Log

__all__ = ["SLACK", "WORKSPACES", "Fit", "Peak", "fit", "peak_of"]

WORKSPACES = "workspaces"  # cuBLAS's own, which it keeps
SLACK = "rounding"  # what tensors are given beyond what they ask for


class Fit(StrEnum):
    """Whether a step fits into a device's memory."""

    YES = "yes"
    TIGHT = "tight"  # only since the allocator gives cached memory back as it goes, which takes time at every step
    NO = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes of a step; at its peak where nothing else is said."""

    split: Mapping[str, int] = field(hash=False)  # by kind; they add up to ``allocated``
    most: Mapping[str, int] = field(hash=False)  # by kind, each at its own moment
    allocated: int  # torch.cuda.max_memory_allocated()
    reserved: int  # torch.cuda.max_memory_reserved()
    phase: str  # in which the peak is
    phases: Mapping[str, int] = field(hash=False)  # the peak of each


def peak_of(log: Log, extra: Mapping[str, int]) -> Peak:
    """Of a step in the midst of training, where the allocator has what the steps before left; and ``extra``, always."""
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


def fit(log: Log, extra: Mapping[str, int], room: int) -> Fit:
    """Whether the step goes into so many bytes; where that is close, by having the allocator do without more."""
    left = room - sum(extra.values())
    if log.peak(*log.phases) > left:
        return Fit.NO
    allocator = Allocator(left)
    try:
        levels(log.in_training(), allocator)
    except OutOfMemory:
        return Fit.NO
    return Fit.TIGHT if allocator.retries else Fit.YES
