"""Skip steps of tiny models, so that watching them costs a small share of the time.

Following a step takes about a millisecond of Python, whatever the model. Where a step itself takes as little, most
steps are only counted: wrappers call the original function, and check that the loss is finite. Anything unusual ends
the series of skipped steps at once: a non-finite loss, a scaler, a closure, a new optimizer.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Set
from typing import Any

__all__ = ["StepSkipper"]

TOO_EXPENSIVE = 0.05  # share of a step's time: steps that cost less than this to follow are always followed
SHARE = 0.01  # of the time, for following steps that cost more
IN_FULL = 128  # steps to follow at the start, and after something unusual
LONGEST = 1000  # most steps to skip in a row
MEMORY = 0.9  # weight of the old value in a moving average
EVALUATIONS = 32  # evaluation passes to follow in a series of skipped steps


class StepSkipper:
    """Decide which steps are skipped, and count them. All times are of the followed thread.

    allowed: False where the user wants every step followed.
    """

    def __init__(self, *, allowed: bool = True, clock: Callable[[], float] = time.perf_counter) -> None:
        self.on = False
        self.clock = clock
        self.spent = 0.0  # seconds of ampwise's own work since the last step ended
        self._allowed = allowed
        self._in_full = IN_FULL  # steps still to be followed
        self._cost = self._plain = 0.0  # average seconds per step: ampwise's, and the script's own
        self._last: float | None = None
        self.leader = 0  # id of the optimizer whose steps count: a series ends where it began in the script's loop
        self.leader_steps = 0  # the leader's steps to skip
        self._evaluations_left = self._series = 0
        self.thread = 0  # id of the followed thread; others may train at the same time
        self.skipped: dict[int, int] = {}  # steps skipped, by the id of the optimizer
        self._indices: dict[int, int] = {}  # indices of optimizers, by id
        self.running: Any = None  # the model whose training pass is running, within skipped steps
        self.last_call: tuple[Any, ...] | None = None  # of a model, as in ``Passed``
        self.random_models: Set[type] = frozenset()  # classes of models that draw random numbers from torch

    def step_followed(self) -> int:
        """Note the end of a followed step. Return how many steps of its optimizer to skip from now on."""
        now = self.clock()
        period, ours, self.spent = 0.0 if self._last is None else now - self._last, self.spent, 0.0
        self._last = now
        if period <= ours or not self._allowed:
            return 0
        first = not self._plain
        self._cost = ours if first else MEMORY * self._cost + (1 - MEMORY) * ours
        # A validation between two steps is no long step: it would make the cost seem low.
        plain = period - ours if first else min(period - ours, 2 * self._plain)
        self._plain = plain if first else MEMORY * self._plain + (1 - MEMORY) * plain
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

    def never_skip_again(self) -> None:
        """Follow every step from now on."""
        self._allowed = False
