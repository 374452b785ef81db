"""How often one may look, if looking is to cost no more than a given share of the time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

__all__ = ["Pace"]

MEMORY = 0.9  # how much an average keeps of what it was
SELDOM = 1000  # at least once in so many steps
LONGEST = 2.0  # what counts as a step, in steps


class Pace:
    """Decides at which steps to do something whose cost is measured as one goes.

    share: of the time that it may take. every: at each n-th step instead, whatever it costs.
    """

    def __init__(self, share: float, every: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share, self._every, self._clock = share, every, clock
        self._cost: float | None = None  # of doing it once
        self._period: float | None = None  # of a step
        self._last: float | None = None
        self._waited = 0

    def step(self) -> None:
        """A step is over."""
        now = self._clock()
        if self._last is not None:
            # A validation between two steps, or a compilation, is no step: it must not make looking seem cheap.
            most = math.inf if self._period is None else LONGEST * self._period
            self._period = _average(self._period, min(now - self._last, most))
        self._last = now
        self._waited += 1

    @property
    def stride(self) -> int:
        """Steps from one time to the next."""
        if self._every is not None:
            return self._every
        if self._cost is None or not self._period:
            return 1
        return min(max(math.ceil(self._cost / (self._share * self._period)), 1), SELDOM)

    @property
    def due(self) -> bool:
        return self._waited >= self.stride or self._cost is None

    def begins(self) -> float:
        return self._clock()

    def ended(self, began: float) -> None:
        """It was done."""
        self._cost = _average(self._cost, self._clock() - began)
        self._waited = 0


def _average(before: float | None, now: float) -> float:
    return now if before is None else MEMORY * before + (1 - MEMORY) * now
