"""How often one may look, if looking is to cost no more than a given share of the time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Pace"]

MEMORY = 0.9  # how much an average keeps of what it was
SELDOM = 1000  # at least once in so many steps
WARMING_UP = 3  # times, in which caches fill and kernels are compiled
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
        self._waited = SELDOM  # steps since it was done
        self._steps = self._times = 0

    @property
    def stride(self) -> int:
        """Steps from one time to the next."""
        if self._every is not None:
            return self._every
        if self._cost is None or not self._period:
            return 1
        return min(max(math.ceil(self._cost / (self._share * self._period)), 1), SELDOM)

    def asked(self) -> bool:
        """Whether it is to be done at this step; then it counts as done."""
        # At steps 1, 2, 4, 8 and so on whatever it costs: a short run is to be seen too, a long one does not notice.
        rare = self._every is None and (self._steps + 1).bit_count() == 1
        due = rare or self._waited >= self.stride
        self._waited = 0 if due else self._waited
        return due

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Around what is done, or a part of it."""
        began = self._clock()
        yield
        cost = self._clock() - began
        self._times += 1
        self._cost = cost if self._times <= WARMING_UP else _average(self._cost, cost)

    def again(self) -> None:
        """It came to nothing: do it at the next step."""
        self._waited = SELDOM

    def step(self) -> None:
        """A step is over."""
        now = self._clock()
        if self._last is not None:
            # A validation between two steps, or a compilation, is no step: it must not make looking seem cheap.
            most = math.inf if self._period is None else LONGEST * self._period
            self._period = _average(self._period, min(now - self._last, most))
        self._last = now
        self._waited += 1
        self._steps += 1


def _average(before: float | None, now: float) -> float:
    return now if before is None else MEMORY * before + (1 - MEMORY) * now
