"""How the loss scale changes from step to step: torch's rule, with a minimum, a maximum and hysteresis.

``ScaleState.after`` is the definition, in plain numbers; ``kernel.py`` does it on a GPU without a sync.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ampwise.errors import BadInput
from ampwise.numbers.census.kernels import has_kernels
from ampwise.train.scaler.grad_stats import in_fp32

__all__ = [
    "COUNT_KEYS",
    "MAX_FORGIVEN",
    "CounterField",
    "ScaleLimits",
    "ScaleState",
    "UpdateField",
    "checked_state",
    "is_number",
    "new_counters",
    "update_scale_",
]

LARGEST = torch.finfo(torch.float32).max
# A step whose loss is not finite says nothing about the scale. After this many in a row it is no longer a matter of bad
# batches: the scale then falls to its minimum, where it is reported.
MAX_FORGIVEN = 30

TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
MOST = 2**31  # torch's counters are int32
COUNT_KEYS = ("overflows_in_a_row", "applied_steps", "skipped_steps")  # added by ampwise; torch's states lack them


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class CounterField(IntEnum):
    """Indices of the step counters on the device, besides torch's growth tracker."""

    IN_A_ROW = 0  # consecutive steps with an overflow, up to now
    APPLIED = 1
    SKIPPED = 2
    BAD_LOSSES = 3  # steps skipped since the last one applied because the loss itself was not finite


class UpdateField(IntEnum):
    """Indices of the numbers (FP64) known after a step. Norm and found_inf of each optimizer follow."""

    SCALE = 0
    GROWTH_TRACKER = 1
    IN_A_ROW = 2
    APPLIED = 3
    SKIPPED = 4
    STUCK = 5  # an overflow with the scale at its minimum
    SCALE_BEFORE = 6  # what the gradients of the step were scaled by
    TRACKER_BEFORE = 7
    FIRST_OPTIMIZER = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleLimits:
    """How the scale grows and backs off, and its limits."""

    growth: float
    backoff: float
    interval: int
    floor: float
    ceiling: float
    hysteresis: int

    @classmethod
    def checked(cls, init_scale: Any, floor: Any, ceiling: Any, hysteresis: Any, **torchs: Any) -> ScaleLimits:
        """Check all values and return the limits, or raise BadInput for the first that is wrong."""
        top = LARGEST if ceiling in (None, math.inf) else ceiling
        for name, value in (("init_scale", init_scale), ("min_scale", floor), ("max_scale", top)):
            if not is_number(value) or not 0 < in_fp32(value) < math.inf:
                raise BadInput(f"GradScaler({name}={value!r}): expected a positive, finite number.")
        for name, count in (("hysteresis", hysteresis), ("growth_interval", torchs["interval"])):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise BadInput(f"GradScaler({name}={count!r}): expected a whole number of steps, 1 or more.")
        limits = cls(floor=floor, ceiling=top, hysteresis=hysteresis, **torchs)
        limits.checked_scale(init_scale, f"GradScaler(init_scale={init_scale:g})")
        return limits

    def checked_scale(self, scale: Any, asked: str = "update()") -> Any:
        """Check a scale that is to be set; a tensor is not read, as that would sync with the device."""
        if isinstance(scale, Tensor):
            return scale
        if not is_number(scale) or not (math.isfinite(scale) and scale > 0):
            raise BadInput(f"{asked}: expected a positive, finite scale, got {scale!r}.")
        if scale < self.floor:
            raise BadInput(f"{asked}: a scale of {scale:g} is below min_scale={self.floor:g}. Set min_scale lower.")
        if scale > self.ceiling:
            raise BadInput(f"{asked}: a scale of {scale:g} is above max_scale={self.ceiling:g}. Set max_scale higher.")
        return float(scale)


def new_counters(device: torch.device, in_a_row: int = 0, applied: int = 0, skipped: int = 0) -> Tensor:
    """Return the counters on the device. Filled one by one: a copy from the host would sync, or break a capture."""
    with torch.inference_mode(False):  # it outlives an inference_mode block around the first step
        tally = torch.zeros(len(CounterField), dtype=torch.int64, device=device)
    for place, count in (
        (CounterField.IN_A_ROW, in_a_row),
        (CounterField.APPLIED, applied),
        (CounterField.SKIPPED, skipped),
    ):
        if count:
            tally[place].fill_(count)
    return tally


def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    tally: Tensor,
    outcomes: Tensor,
    stepped: int,
    limits: ScaleLimits,
    *,
    move: bool = True,
    loss: Tensor | None = None,
    forgives: bool = True,
) -> Tensor:
    """Update scale and counters after a step, and return the numbers indexed by ``UpdateField``, and the loss if given.

    ``outcomes`` has a row for each optimizer: norm and found_inf. An overflow of any of them lowers the scale, unless
    it ``forgives`` and the loss is not finite itself, for at most MAX_FORGIVEN steps in a row. The first ``stepped``
    rows are counted. With ``move`` false, the scale stays.
    """
    if scale.is_cuda and has_kernels():
        from ampwise.train.scaler.kernel import launch_update_scale_

        return launch_update_scale_(
            scale, growth_tracker, tally, outcomes, stepped, limits, move=move, loss=loss, forgives=forgives
        )
    found = [row[1] > 0 for row in outcomes.tolist()]
    in_a_row, applied, skipped, bad_losses = tally.tolist()
    before = now = ScaleState(scale.item(), int(growth_tracker.item()), in_a_row)
    stuck = False
    loss_is_bad = any(found) and forgives and loss is not None and not math.isfinite(loss.item())
    bad_losses = bad_losses + loss_is_bad if any(found) else 0
    if move and not (loss_is_bad and bad_losses <= MAX_FORGIVEN):
        now, stuck = now.after(any(found), limits)
        scale.fill_(now.scale)
        growth_tracker.fill_(now.growth_tracker)
    skips = sum(found[:stepped])
    counts = [now.in_a_row, applied + stepped - skips, skipped + skips]
    tally.copy_(torch.tensor([*counts, bad_losses], device=tally.device))
    facts = [scale.item(), now.growth_tracker, *counts, stuck, before.scale, before.growth_tracker]
    facts += outcomes.flatten().tolist()
    if loss is not None:
        facts.append(loss.item())
    return torch.tensor(facts, dtype=torch.float64, device=scale.device)


@dataclass(frozen=True, slots=True)
class ScaleState:
    """Loss scale, growth tracker and consecutive overflows."""

    scale: float
    growth_tracker: int
    in_a_row: int

    def after(self, overflowed: bool, limits: ScaleLimits) -> tuple[ScaleState, bool]:
        """Return the state after a step, and whether the scale would have gone below its minimum."""
        if not overflowed:
            calm = self.growth_tracker + 1
            if calm != limits.interval:
                return ScaleState(self.scale, calm, 0), False
            # As in torch, the scale does not grow beyond FP32's range; a scale set above the maximum stays.
            grown = in_fp32(self.scale * limits.growth)
            grown = max(self.scale, min(grown, in_fp32(limits.ceiling))) if math.isfinite(grown) else self.scale
            return ScaleState(grown, 0, 0), False
        in_a_row = self.in_a_row + 1
        if in_a_row < limits.hysteresis:
            return ScaleState(self.scale, 0, in_a_row), False
        # An overflow does not raise a scale that the user has set below the minimum.
        floor = in_fp32(limits.floor)
        lowered = min(self.scale, max(in_fp32(self.scale * limits.backoff), floor))
        return ScaleState(lowered, 0, in_a_row), self.scale <= floor


def checked_state(state: Any, limits: ScaleLimits) -> dict[str, Any]:
    """Return the state as plain numbers; raise BadInput if it is invalid, before anything is loaded."""
    if not isinstance(state, Mapping):
        raise BadInput(f"load_state_dict(): not the state of a GradScaler. Got {type(state).__name__}.")
    if missing := [key for key in TORCH_KEYS if key not in state]:
        inside = [key for key, value in state.items() if isinstance(value, Mapping) and "growth_factor" in value]
        hint = f"Try state[{inside[0]!r}]." if inside else f"Missing: {', '.join(missing)}."
        raise BadInput(f"load_state_dict(): not the state of a GradScaler. {hint}")
    numbers = {}
    for key in (*TORCH_KEYS, *COUNT_KEYS):
        if key in state:
            value = state[key]
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            if not is_number(value) or not abs(value) <= sys.float_info.max:
                raise BadInput(f"load_state_dict(): {key}={value!r}: expected a finite number.")
            numbers[key] = value
    limits.checked_scale(numbers["scale"], "load_state_dict()")
    if not numbers["growth_factor"] > 1:
        raise BadInput(f"load_state_dict(): growth_factor={numbers['growth_factor']}: expected a number above 1.")
    if not 0 < numbers["backoff_factor"] < 1:
        raise BadInput(f"load_state_dict(): backoff_factor={numbers['backoff_factor']}: expected a number from 0 to 1.")
    for key in ("growth_interval", "_growth_tracker", *COUNT_KEYS):
        least = int(key == "growth_interval")
        if key in numbers and not (least <= numbers[key] < MOST and numbers[key] == int(numbers[key])):
            raise BadInput(f"load_state_dict(): {key}={numbers[key]}: expected a whole number, {least} or more.")
    return numbers
