"""Keep the cost of watching a small share of the time: do costly things seldom, and skip steps of tiny models."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["StepSkipper", "TimeBudget"]

MEMORY = 0.9  # weight of the old value in a moving average
LONGEST_STEP = 2.0  # times the average: a longer step, such as one with a validation, counts as this long
SELDOM = 1000  # steps; what has a budget is done at least this often
WARMING_UP = 3  # times, in which caches fill and kernels are compiled
TOO_EXPENSIVE = 0.05  # share of a step's time: steps that cost less than this to follow are always followed
SHARE = 0.01  # of the time, for following steps that cost more
IN_FULL = 128  # steps to follow at the start, and after something unusual
LONGEST = 1000  # most steps to skip in a row
EVALUATIONS = 32  # evaluation passes to follow in a series of skipped steps


def _average(before: float | None, now: float) -> float:
    return now if before is None else MEMORY * before + (1 - MEMORY) * now


class TimeBudget:
    """Decide at which steps to do something whose cost is measured.

    share: the share of the time that it may take. every: do it at each n-th step instead, whatever it costs.
    """

    def __init__(self, share: float, every: int | None = None) -> None:
        self._share, self._every = share, every
        self._cost: float | None = None  # seconds to do it once
        self._period: float | None = None  # seconds per step
        self._last: float | None = None
        self._steps_since = SELDOM  # steps since it was done
        self._steps = self._times = 0

    def is_due(self) -> bool:
        """Return whether to do it at this step; if so, it counts as done."""
        stride = 1 if self._every is None else self._every
        if self._every is None and self._cost is not None and self._period:
            stride = min(max(math.ceil(self._cost / (self._share * self._period)), 1), SELDOM)
        # At steps 1, 2, 4, 8 ... whatever it costs: this covers short runs, and costs long ones nothing.
        rare = self._every is None and (self._steps + 1).bit_count() == 1
        due = rare or self._steps_since >= stride
        self._steps_since = 0 if due else self._steps_since
        return due

    def took(self, seconds: float) -> None:
        """Note what doing it has cost."""
        self._times += 1
        self._cost = seconds if self._times <= WARMING_UP else _average(self._cost, seconds)

    def again(self) -> None:
        """Do it again at the next step, as it gave no result."""
        self._steps_since = SELDOM

    def step(self) -> None:
        """Count a step that has ended."""
        now = time.perf_counter()
        if self._last is not None:
            most = math.inf if self._period is None else LONGEST_STEP * self._period
            self._period = _average(self._period, min(now - self._last, most))
        self._last = now
        self._steps_since += 1
        self._steps += 1


class StepSkipper:
    """Decide which steps of a tiny model are skipped, and count them. All times are of the followed thread.

    Following a step takes about a millisecond of Python, whatever the model. Where a step itself takes as little, most
    steps are only counted: wrappers call the original function, and check that the loss is finite. Anything unusual
    ends the series of skipped steps at once: a non-finite loss, a scaler, a closure, a new optimizer.

    allowed: False where the user wants every step followed.
    """

    def __init__(self, *, allowed: bool = True, clock: Callable[[], float] = time.perf_counter) -> None:
        self.on = False
        self.clock = clock
        self.spent = 0.0  # seconds of ampwise's own work since the last step ended
        self.allowed = allowed  # may become False, but not True again
        self._in_full = IN_FULL  # steps still to be followed
        self._cost: float | None = None  # average seconds per step that ampwise takes
        self._plain: float | None = None  # and that the script itself takes
        self._last: float | None = None
        self.leader = 0  # id of the optimizer whose steps count: a series ends where it began in the script's loop
        self.leader_steps = 0  # the leader's steps to skip
        self._evaluations_left = self._series = 0
        self.thread = 0  # id of the followed thread; others may train at the same time
        self.skipped: dict[int, int] = {}  # steps skipped, by the id of the optimizer
        self._indices: dict[int, int] = {}  # indices of optimizers, by id
        self.running: Any = None  # the model whose training pass is running, within skipped steps
        # The function that called backward last in skipped steps, its instruction, and the loss.
        self.last_backward: tuple[FrameType, int, Any] | None = None
        self.last_call: tuple[Any, ...] | None = None  # of a model: the arguments of ``ModelCalls.adopt``

    def step_followed(self) -> int:
        """Note the end of a followed step. Return how many steps of its optimizer to skip from now on."""
        now = self.clock()
        period, ours, self.spent = 0.0 if self._last is None else now - self._last, self.spent, 0.0
        self._last = now
        if period <= ours or not self.allowed:
            return 0
        plain = period - ours
        self._cost = _average(self._cost, ours)
        self._plain = _average(self._plain, plain if self._plain is None else min(plain, LONGEST_STEP * self._plain))
        self._in_full -= self._in_full > 0
        if self._in_full or self._cost <= TOO_EXPENSIVE * self._plain:
            return 0
        self._series += 1
        # Vary the number: a script may do something at each n-th step, which must not always be skipped.
        return min(math.ceil(self._cost / (SHARE * self._plain)), LONGEST) + self._series % 3

    def begin(self, leader: Any, indices: dict[int, int], steps: int) -> None:
        """Start to skip this many steps of the leader. indices: optimizers' indices by id."""
        self.on, self.leader, self.leader_steps, self._evaluations_left = True, id(leader), steps, EVALUATIONS
        self.thread = threading.get_ident()
        self._indices, self.skipped = indices, dict.fromkeys(indices, 0)

    def follows_evaluation(self) -> bool:
        """Return whether to follow one more evaluation pass."""
        self._evaluations_left -= 1
        return self._evaluations_left >= 0

    def end(self) -> dict[int, int]:
        """Follow steps again. Return the number of skipped steps, by optimizer index."""
        skipped, self.skipped, self.on, self.running = self.skipped, {}, False, None
        self._last, self.spent = self.clock(), 0.0
        return {self._indices[key]: count for key, count in skipped.items() if count}

    def follow_next_steps(self) -> None:
        """Follow the next steps in full, as something unusual has happened."""
        self._in_full = IN_FULL
