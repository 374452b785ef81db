"""How the loss scale moves from step to step: torch's rule, between two limits, with patience.

``advance_`` is the definition, in torch operations that wait for nothing; ``kernel.py`` does it in one launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ampwise.census.launcher import has_kernels
from ampwise.errors import BadInput

__all__ = ["Fact", "Limits", "Tally", "advance_", "advance_there_", "new_tally"]

LARGEST = torch.finfo(torch.float32).max


class Tally(IntEnum):
    """What is counted on the device, besides torch's growth tracker."""

    IN_A_ROW = 0  # steps with an overflow, up to now
    APPLIED = 1
    SKIPPED = 2


class Fact(IntEnum):
    """What a closed step is known by, in FP64. For each optimizer its norm follows, and whether it skipped."""

    SCALE = 0
    GROWTH_TRACKER = 1
    IN_A_ROW = 2
    APPLIED = 3
    SKIPPED = 4
    STUCK = 5  # an overflow with the scale at its floor
    FIRST_OPTIMIZER = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """By how much the scale moves, when, and how far."""

    growth: float
    backoff: float
    interval: int
    floor: float
    ceiling: float
    hysteresis: int

    @classmethod
    def checked(cls, init_scale: float, floor: float, ceiling: float | None, hysteresis: int, **torchs: Any) -> Limits:
        """Limits that make sense, or an error that says which does not."""
        top = LARGEST if ceiling is None else ceiling
        for name, value in (("init_scale", init_scale), ("min_scale", floor), ("max_scale", top)):
            if not (math.isfinite(value) and value > 0):
                raise BadInput(f"GradScaler({name}={value}): a positive, finite number is expected.")
        if not floor <= init_scale <= top:
            raise BadInput(
                f"GradScaler(init_scale={init_scale:g}, min_scale={floor:g}, max_scale={top:g}): "
                "the scale must start between its limits."
            )
        if isinstance(hysteresis, bool) or not isinstance(hysteresis, int) or hysteresis < 1:
            raise BadInput(f"GradScaler(hysteresis={hysteresis!r}): a number of overflows in a row, 1 or more.")
        return cls(floor=floor, ceiling=top, hysteresis=hysteresis, **torchs)


def new_tally(device: torch.device, in_a_row: int = 0, applied: int = 0, skipped: int = 0) -> Tensor:
    """The counts, on the device. Filled one by one: a copy from the host would wait, or could not be captured."""
    tally = torch.zeros(len(Tally), dtype=torch.int64, device=device)
    for place, count in ((Tally.IN_A_ROW, in_a_row), (Tally.APPLIED, applied), (Tally.SKIPPED, skipped)):
        if count:
            tally[place].fill_(count)
    return tally


def advance_there_(scale: Tensor, *rest: Any, move: bool) -> Tensor:
    """``advance_`` where the scale is: in one launch on a GPU."""
    if scale.is_cuda and has_kernels():
        from ampwise.engine.kernel import launch_advance_

        return launch_advance_(scale, *rest, move=move)
    return advance_(scale, *rest, move=move)


def advance_(
    scale: Tensor,
    growth_tracker: Tensor,
    tally: Tensor,
    outcomes: Tensor,
    stepped: int,
    limits: Limits,
    *,
    move: bool = True,
) -> Tensor:
    """Close a step: move the scale, count, and return the facts.

    ``outcomes`` has a row for each optimizer: the norm and found_inf. An overflow of any of them lowers the
    scale; the first ``stepped`` of them are counted. With ``move`` false, the scale is left alone.
    """
    found = outcomes[:, 1]
    overflowed = found.max() > 0
    stuck = torch.zeros_like(overflowed)
    if move:
        tally[Tally.IN_A_ROW].copy_(torch.where(overflowed, tally[Tally.IN_A_ROW] + 1, 0))
        stuck = _move_(scale, growth_tracker, overflowed, tally[Tally.IN_A_ROW] >= limits.hysteresis, limits)
    skipped = found[:stepped].sum().long()
    tally[Tally.SKIPPED].add_(skipped)
    tally[Tally.APPLIED].add_(stepped - skipped)
    state = [scale, growth_tracker, tally[Tally.IN_A_ROW], tally[Tally.APPLIED], tally[Tally.SKIPPED], stuck]
    return torch.cat([torch.stack([number.double() for number in state]), outcomes.double().flatten()])


def _move_(scale: Tensor, growth_tracker: Tensor, overflowed: Tensor, impatient: Tensor, limits: Limits) -> Tensor:
    """Move the scale in place; returns whether it should have gone below its floor."""
    lowered = overflowed & impatient
    stuck = lowered & (scale <= limits.floor)
    # A scale that the user has set below the floor is not raised to it by an overflow.
    less = torch.minimum(scale, (scale.double() * limits.backoff).clamp(min=limits.floor).float())
    calm = torch.where(overflowed, 0, growth_tracker + 1)
    grown = calm == limits.interval
    # As with torch, growth beyond what FP32 holds is none; a scale above the ceiling stays where it was put.
    more = (scale.double() * limits.growth).float()
    more = torch.where(more.isfinite(), torch.maximum(scale, more.clamp(max=limits.ceiling)), scale)
    scale.copy_(torch.where(lowered, less, torch.where(grown, more, scale)))
    growth_tracker.copy_(torch.where(grown, 0, calm))
    return stuck
