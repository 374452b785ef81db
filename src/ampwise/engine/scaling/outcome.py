"""How steps went, wherever that is known by now."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from ampwise.engine.scaling.facts import Posted
from ampwise.engine.scaling.scale import Fact

__all__ = ["Counts", "Outcome"]

NORM, FOUND_INF = range(2)


@dataclass(slots=True)
class Outcome:
    """Of an optimizer's last step: on the device first, then among facts that were posted."""

    numbers: Tensor | None  # norm and found_inf first; None of a step that nobody looked at, or once let go
    known_to_skip: bool | None = None  # where the host had to be told at once
    posted: Posted | None = None
    place: int = 0  # of the numbers, among the posted facts
    scaled: bool = False  # they begin with the scale

    @property
    def skipped(self) -> bool:
        """Waits if asked before the device has come so far."""
        return bool(self._number(FOUND_INF)) if self.known_to_skip is None else self.known_to_skip

    @property
    def norm(self) -> float:
        """Waits if asked before the device has come so far."""
        return self._number(NORM)

    @property
    def scale(self) -> float:
        """As it stood after the step; 1 where scaling is off."""
        return self.posted.read()[Fact.SCALE] if self.scaled and self.posted is not None else 1.0

    @property
    def scale_before(self) -> float:
        """The scale that the gradients of the step had; 1 where scaling is off."""
        return self.posted.read()[Fact.SCALE_BEFORE] if self.scaled and self.posted is not None else 1.0

    @property
    def backoff(self) -> float:
        """What the step divided the scale by: 1 if it was applied."""
        return max(self.scale_before / self.scale, 1.0)

    @property
    def clean_steps(self) -> int:
        """The growth tracker before the step."""
        return int(self.posted.read()[Fact.TRACKER_BEFORE]) if self.scaled and self.posted is not None else 0

    @property
    def aside(self) -> float:
        """The number that travelled with the facts, where one did."""
        return math.nan if self.posted is None else self.posted.read()[-1]

    @property
    def known(self) -> bool:
        """Asking would not wait."""
        return self.posted.arrived if self.posted is not None else self.numbers is None

    @property
    def skip_known(self) -> bool:
        """Asking whether it was skipped would not wait."""
        return self.known_to_skip is not None or self.known

    def _number(self, which: int) -> float:
        if self.posted is not None:
            return self.posted.read()[self.place + which]
        return math.nan if self.numbers is None else float(self.numbers[which].item())

    def let_go(self) -> None:
        """Of memory on the device, where the numbers travel by themselves.

        Held for as long as someone may ask, it would move the next gradients to other addresses at every step.
        """
        if self.posted is not None and not self.posted.captured:
            self.numbers = None


class Counts:
    """How many steps were applied and how many skipped: counted as the news arrives, in the order of the steps."""

    def __init__(self, applied: int = 0, skipped: int = 0, in_a_row: int = 0) -> None:
        self.applied, self.skipped = applied, skipped
        self.in_a_row = in_a_row  # skips, up to the last step that is known
        self._awaited: deque[Outcome] = deque()

    def add(self, outcome: Outcome) -> bool:
        """Count what is known; whether that was anything."""
        self._awaited.append(outcome)
        known = self._awaited[0].skip_known
        while self._awaited and self._awaited[0].skip_known:
            self._count(self._awaited.popleft().skipped)
        return known

    def settle(self) -> Counts:
        """Up to date; waits for the last step."""
        while self._awaited:
            self._count(self._awaited.popleft().skipped)
        return self

    def _count(self, skipped: bool) -> None:
        self.skipped += skipped
        self.applied += not skipped
        self.in_a_row = self.in_a_row + 1 if skipped else 0
