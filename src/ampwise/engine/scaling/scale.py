"""How the loss scale moves from step to step: torch's rule, between two limits, with patience.

``State.after`` is the definition, in plain numbers; ``kernel.py`` does it on a GPU, where nothing waits.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ampwise.census.launcher import has_kernels
from ampwise.errors import BadInput

__all__ = ["FORGIVEN", "Fact", "Limits", "State", "Tally", "advance_", "in_fp32", "is_number", "new_tally"]

LARGEST = torch.finfo(torch.float32).max
# A step whose loss is not finite says nothing about the scale. After so many without a good one between it is no longer
# a matter of bad batches: the scale falls to its floor, where it is reported.
FORGIVEN = 30


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def in_fp32(number: float) -> float:
    """Rounded to nearest, or infinity."""
    return ctypes.c_float(number).value


class Tally(IntEnum):
    """What is counted on the device, besides torch's growth tracker."""

    IN_A_ROW = 0  # steps with an overflow, up to now
    APPLIED = 1
    SKIPPED = 2
    BAD_LOSSES = 3  # steps skipped since the last one applied because the loss itself was not finite


class Fact(IntEnum):
    """What a closed step is known by, in FP64. For each optimizer its norm follows, and whether it skipped."""

    SCALE = 0
    GROWTH_TRACKER = 1
    IN_A_ROW = 2
    APPLIED = 3
    SKIPPED = 4
    STUCK = 5  # an overflow with the scale at its floor
    SCALE_BEFORE = 6  # what the gradients of the step were scaled by
    TRACKER_BEFORE = 7
    FIRST_OPTIMIZER = 8


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
    def checked(cls, init_scale: Any, floor: Any, ceiling: Any, hysteresis: Any, **torchs: Any) -> Limits:
        """Limits that make sense, or an error that says which does not."""
        top = LARGEST if ceiling in (None, math.inf) else ceiling
        for name, value in (("init_scale", init_scale), ("min_scale", floor), ("max_scale", top)):
            if not is_number(value) or not 0 < in_fp32(value) < math.inf:
                raise BadInput(f"GradScaler({name}={value!r}): a positive, finite number is expected.")
        for name, count in (("hysteresis", hysteresis), ("growth_interval", torchs["interval"])):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise BadInput(f"GradScaler({name}={count!r}): a whole number of steps is expected, 1 or more.")
        limits = cls(floor=floor, ceiling=top, hysteresis=hysteresis, **torchs)
        limits.checked_scale(init_scale, f"GradScaler(init_scale={init_scale:g})")
        return limits

    def checked_scale(self, scale: Any, asked: str = "update()") -> Any:
        """A scale to be set; that of a tensor is not looked at, which would wait for the device."""
        if isinstance(scale, Tensor):
            return scale
        if not is_number(scale) or not (math.isfinite(scale) and scale > 0):
            raise BadInput(f"{asked}: a positive, finite scale is expected, not {scale!r}.")
        if scale < self.floor:
            raise BadInput(f"{asked}: a scale of {scale:g} is below min_scale={self.floor:g}. Set min_scale lower.")
        if scale > self.ceiling:
            raise BadInput(f"{asked}: a scale of {scale:g} is above max_scale={self.ceiling:g}. Set max_scale higher.")
        return float(scale)


def new_tally(device: torch.device, in_a_row: int = 0, applied: int = 0, skipped: int = 0) -> Tensor:
    """The counts, on the device. Filled one by one: a copy from the host would wait, or could not be captured."""
    with torch.inference_mode(False):  # it outlives a block that the first step may be in
        tally = torch.zeros(len(Tally), dtype=torch.int64, device=device)
    for place, count in ((Tally.IN_A_ROW, in_a_row), (Tally.APPLIED, applied), (Tally.SKIPPED, skipped)):
        if count:
            tally[place].fill_(count)
    return tally


def advance_(
    scale: Tensor,
    growth_tracker: Tensor,
    tally: Tensor,
    outcomes: Tensor,
    stepped: int,
    limits: Limits,
    *,
    move: bool = True,
    loss: Tensor | None = None,
) -> Tensor:
    """Close a step: move the scale, count, and return the facts.

    ``outcomes`` has a row for each optimizer: the norm and found_inf. An overflow of any of them lowers the
    scale, unless the ``loss`` is known and was not finite itself, for FORGIVEN steps in a row; the first ``stepped`` of
    them are counted. With ``move`` false, the scale is left alone.
    """
    if scale.is_cuda and has_kernels():
        from ampwise.engine.scaling.kernel import launch_advance_

        return launch_advance_(scale, growth_tracker, tally, outcomes, stepped, limits, move=move, loss=loss)
    found = [row[1] > 0 for row in outcomes.tolist()]
    in_a_row, applied, skipped, bad_losses = tally.tolist()
    before = now = State(scale.item(), int(growth_tracker.item()), in_a_row)
    stuck = False
    loss_is_bad = any(found) and loss is not None and not math.isfinite(loss.item())
    bad_losses = bad_losses + loss_is_bad if any(found) else 0
    if move and not (loss_is_bad and bad_losses <= FORGIVEN):
        now, stuck = now.after(any(found), limits)
        scale.fill_(now.scale)
        growth_tracker.fill_(now.growth_tracker)
    skips = sum(found[:stepped])
    counts = [now.in_a_row, applied + stepped - skips, skipped + skips]
    tally.copy_(torch.tensor([*counts, bad_losses], device=tally.device))
    facts = [scale.item(), now.growth_tracker, *counts, stuck, before.scale, before.growth_tracker]
    return torch.tensor(facts + outcomes.flatten().tolist(), dtype=torch.float64, device=scale.device)


@dataclass(frozen=True, slots=True)
class State:
    """Where the scale stands."""

    scale: float
    growth_tracker: int
    in_a_row: int

    def after(self, overflowed: bool, limits: Limits) -> tuple[State, bool]:
        """Where it stands a step later, and whether it should have gone below its floor."""
        if overflowed:
            return self._lowered(limits)
        calm = self.growth_tracker + 1
        if calm != limits.interval:
            return State(self.scale, calm, 0), False
        # As with torch, growth beyond what FP32 holds is none; a scale above the ceiling stays where it was put.
        grown = in_fp32(self.scale * limits.growth)
        return State(
            max(self.scale, min(grown, in_fp32(limits.ceiling))) if math.isfinite(grown) else self.scale, 0, 0
        ), False

    def _lowered(self, limits: Limits) -> tuple[State, bool]:
        in_a_row = self.in_a_row + 1
        if in_a_row < limits.hysteresis:
            return State(self.scale, 0, in_a_row), False
        # A scale that the user has set below the floor is not raised to it by an overflow.
        floor = in_fp32(limits.floor)
        less = min(self.scale, max(in_fp32(self.scale * limits.backoff), floor))
        return State(less, 0, in_a_row), self.scale <= floor
