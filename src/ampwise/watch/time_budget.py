"""Decide how often to do something, such that it costs at most a given share of the time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["TimeBudget"]

MEMORY = 0.9  # weight of the old value in a moving average
SELDOM = 1000  # steps; it is done at least this often
WARMING_UP = 3  # times, in which caches fill and kernels are compiled
LONGEST = 2.0  # times the average: a longer step counts as this long


class TimeBudget:
    """Decide at which steps to do something whose cost is measured.

    share: the share of the time that it may take. every: do it at each n-th step instead, whatever it costs.
    """

    def __init__(self, share: float, every: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share, self._every, self._clock = share, every, clock
        self._cost: float | None = None  # seconds to do it once
        self._period: float | None = None  # seconds per step
        self._last: float | None = None
        self._steps_since = SELDOM  # steps since it was done
        self._steps = self._times = 0

    @property
    def stride(self) -> int:
        """Number of steps from one time to the next."""
        if self._every is not None:
            return self._every
        if self._cost is None or not self._period:
            return 1
        return min(max(math.ceil(self._cost / (self._share * self._period)), 1), SELDOM)

    def is_due(self) -> bool:
        """Return whether to do it at this step; if so, it counts as done."""
        # At steps 1, 2, 4, 8 ... whatever it costs: this covers short runs, and costs long ones nothing.
        rare = self._every is None and (self._steps + 1).bit_count() == 1
        due = rare or self._steps_since >= self.stride
        self._steps_since = 0 if due else self._steps_since
        return due

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the cost of the work in this context."""
        began = self._clock()
        yield
        cost = self._clock() - began
        self._times += 1
        self._cost = cost if self._times <= WARMING_UP else _average(self._cost, cost)

    def again(self) -> None:
        """Do it again at the next step, as it gave no result."""
        self._steps_since = SELDOM

    def step(self) -> None:
        """Count a step that has ended."""
        now = self._clock()
        if self._last is not None:
            # A validation or compilation between two steps is no long step: it would make the cost seem low.
            most = math.inf if self._period is None else LONGEST * self._period
            self._period = _average(self._period, min(now - self._last, most))
        self._last = now
        self._steps_since += 1
        self._steps += 1


def _average(before: float | None, now: float) -> float:
    return now if before is None else MEMORY * before + (1 - MEMORY) * now
