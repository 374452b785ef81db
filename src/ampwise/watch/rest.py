"""Steps that are passed over, so that following a run of tiny steps costs a small share of its time.

Following a step takes about a millisecond of Python, whatever the model. Where steps take as little themselves, most of
them are only counted: wrappers pass on what they get, and look at the loss. What may be out of the ordinary ends the
rest at once: a loss that is not finite, a scaler, a closure, a new optimizer.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Rest"]

TOO_DEAR = 0.05  # of a step's time: a step that costs less than this to follow is always followed
SHARE = 0.01  # of the time, for following where steps cost more
IN_FULL = 128  # steps at first, and after something out of the ordinary
LONGEST = 1000  # steps in a row that are passed over
MEMORY = 0.9  # how much an average keeps of what it was
LOOKS = 32  # evaluation passes that are followed within a rest


class Rest:
    """Whether the present step is passed over. All times are of the thread that is followed.

    allowed: False where the user wants to see every step.
    """

    def __init__(self, *, allowed: bool = True, clock: Callable[[], float] = time.perf_counter) -> None:
        self.on = False
        self.clock = clock
        self.spent = 0.0  # by us, since the last step ended
        self._allowed = allowed
        self._in_full = IN_FULL  # steps that are still to be followed
        self._cost = self._plain = 0.0  # of a step, averages: ours, and the script's own
        self._last: float | None = None
        self._leader = 0  # the optimizer whose steps are counted: a rest ends where it began in the script's loop
        self._left = self._looks = self._rests = 0
        self.thread = 0  # the one that is followed; others may train besides
        self.passed: dict[int, int] = {}  # steps by optimizer, by the index of its state
        self.indices: dict[int, int] = {}  # of optimizers, by id

    def step_followed(self) -> int:
        """A step has ended that was followed. How many of the leader's steps to pass over, from now on."""
        now = self.clock()
        period, ours, self.spent = 0.0 if self._last is None else now - self._last, self.spent, 0.0
        self._last = now
        if period <= ours or not self._allowed:
            return 0
        first = not self._plain
        self._cost = ours if first else MEMORY * self._cost + (1 - MEMORY) * ours
        # A validation between two steps is no step: it must not make following seem cheap.
        plain = period - ours if first else min(period - ours, 2 * self._plain)
        self._plain = plain if first else MEMORY * self._plain + (1 - MEMORY) * plain
        self._in_full -= self._in_full > 0
        if self._in_full or self._cost <= TOO_DEAR * self._plain:
            return 0
        self._rests += 1
        # By turns one more or less: a script that does something at each n-th step is not to hide it from us.
        return min(math.ceil(self._cost / (SHARE * self._plain)), LONGEST) + self._rests % 3

    def begin(self, leader: Any, indices: dict[int, int], steps: int) -> None:
        """Pass over so many steps of the leader."""
        self.on, self._leader, self._left, self._looks = True, id(leader), steps, LOOKS
        self.thread = threading.get_ident()
        self.indices, self.passed = indices, dict.fromkeys(indices.values(), 0)

    def step_passed(self, optimizer: Any) -> bool:
        """A step was passed over. Whether the rest is over."""
        key = id(optimizer)
        if key not in self.indices:  # it has come since
            return True
        self.passed[self.indices[key]] += 1
        self._left -= key == self._leader
        return self._left <= 0

    def looks(self) -> bool:
        """Whether to follow one more pass of a model that does not train."""
        self._looks -= 1
        return self._looks >= 0

    def end(self) -> dict[int, int]:
        """Follow again. The steps that were passed over, by optimizer."""
        passed, self.passed, self.on = self.passed, {}, False
        self._last, self.spent = self.clock(), 0.0
        return {index: count for index, count in passed.items() if count}

    def out_of_the_ordinary(self) -> None:
        """Follow all of the next steps."""
        self._in_full = IN_FULL

    def never_again(self) -> None:
        """What the script does needs to be followed step by step."""
        self._allowed = False
