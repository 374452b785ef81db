"""Results of optimizer steps, on the device or on the host, and the counts of applied and skipped steps."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from ampwise.train.scaler.async_scalars import AsyncScalars
from ampwise.train.scaler.loss_scale import UpdateField

__all__ = ["StepCounts", "StepResult"]

NORM, FOUND_INF = range(2)


@dataclass(slots=True)
class StepResult:
    """Result of an optimizer's step: on the device first, then among numbers that are copied to the host."""

    numbers: Tensor | None  # norm and found_inf first; None for an unchecked step, and after ``release``
    skipped_on_host: bool | None = None  # whether it was skipped, if the host had to know at once
    posted: AsyncScalars | None = None
    place: int = 0  # index of norm and found_inf among the copied numbers
    scaled: bool = False  # the copied numbers begin with the scale

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped. Syncs if the step is not finished."""
        return bool(self._number(FOUND_INF)) if self.skipped_on_host is None else self.skipped_on_host

    @property
    def norm(self) -> float:
        """Norm of the unscaled gradients. Syncs if the step is not finished."""
        return self._number(NORM)

    @property
    def scale(self) -> float:
        """Loss scale after the step; 1 with scaling off."""
        return self.posted.read()[UpdateField.SCALE] if self.scaled and self.posted is not None else 1.0

    @property
    def scale_before(self) -> float:
        """Loss scale of the step's gradients; 1 with scaling off."""
        return self.posted.read()[UpdateField.SCALE_BEFORE] if self.scaled and self.posted is not None else 1.0

    @property
    def backoff(self) -> float:
        """Factor by which the step lowered the scale; 1 if it was applied."""
        return max(self.scale_before / self.scale, 1.0)

    @property
    def clean_steps(self) -> int:
        """Growth tracker before the step."""
        return int(self.posted.read()[UpdateField.TRACKER_BEFORE]) if self.scaled and self.posted is not None else 0

    @property
    def extra_scalar(self) -> float:
        """Extra number that was copied with the others; NaN if nothing was copied."""
        return math.nan if self.posted is None else self.posted.read()[-1]

    @property
    def known(self) -> bool:
        """Whether reading the result would not sync."""
        return self.posted.arrived if self.posted is not None else self.numbers is None

    @property
    def is_skip_known(self) -> bool:
        """Whether reading ``skipped`` would not sync."""
        return self.skipped_on_host is not None or self.known

    def _number(self, which: int) -> float:
        if self.posted is not None:
            return self.posted.read()[self.place + which]
        return math.nan if self.numbers is None else float(self.numbers[which].item())

    def release(self) -> None:
        """Free the numbers on the device, if they are copied to the host.

        Keeping them would make the allocator place the next gradients at other addresses at every step.
        """
        if self.posted is not None and not self.posted.captured:
            self.numbers = None


class StepCounts:
    """Counts of applied and skipped steps, updated in order as results arrive on the host."""

    def __init__(self, applied: int = 0, skipped: int = 0, in_a_row: int = 0) -> None:
        self.applied, self.skipped = applied, skipped
        self.in_a_row = in_a_row  # consecutive skips, up to the last known step
        self._awaited: deque[StepResult] = deque()

    def add(self, outcome: StepResult) -> bool:
        """Add a step and count the results that have arrived; return whether any had."""
        self._awaited.append(outcome)
        known = self._awaited[0].is_skip_known
        while self._awaited and self._awaited[0].is_skip_known:
            self._count(self._awaited.popleft().skipped)
        return known

    def settle(self) -> StepCounts:
        """Count all steps and return self. Syncs with the last step."""
        while self._awaited:
            self._count(self._awaited.popleft().skipped)
        return self

    def _count(self, skipped: bool) -> None:
        self.skipped += skipped
        self.applied += not skipped
        self.in_a_row = self.in_a_row + 1 if skipped else 0
