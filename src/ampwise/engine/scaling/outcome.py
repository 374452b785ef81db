"""How an optimizer's last step went, wherever that is known by now."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ampwise.engine.scaling.facts import Posted
from ampwise.engine.scaling.scale import Fact

__all__ = ["Outcome"]

NORM, FOUND_INF = range(2)


@dataclass(slots=True)
class Outcome:
    """On the device first, then among the facts of the step that was closed."""

    numbers: Tensor | None  # norm and found_inf; None of a step that nobody looked at
    known_to_skip: bool | None = None  # where the host had to be told at once
    posted: Posted | None = None
    index: int = 0  # of the optimizer, among the posted facts

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
        """As it stood after the step; 1 where scaling is off. Known once the iteration is closed."""
        return math.nan if self.posted is None else self.posted.read()[Fact.SCALE]

    @property
    def aside(self) -> float:
        """The number that travelled with the facts, where one did."""
        return math.nan if self.posted is None else self.posted.read()[-1]

    @property
    def known(self) -> bool:
        """Asking would not wait."""
        return self.numbers is None or (self.posted is not None and self.posted.arrived)

    @property
    def skip_known(self) -> bool:
        """Asking whether it was skipped would not wait."""
        return self.known_to_skip is not None or self.known

    def _number(self, which: int) -> float:
        if self.numbers is None:
            return math.nan
        if self.posted is None:
            return float(self.numbers[which].item())
        return self.posted.read()[Fact.FIRST_OPTIMIZER + 2 * self.index + which]
