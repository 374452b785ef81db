"""Detection of loss spikes, by the median and spread of the steps before."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ampwise.rules.evidence.trend import robust_spread

__all__ = ["Spike", "SpikeDetector"]

WINDOW = 50  # previous steps to judge by
SETTLED = 40  # initial steps that are not judged
SUDDEN = 10.0  # spreads above the median: a single step is enough
LASTING = 5.0  # spreads, if IN_A_ROW steps are above
IN_A_ROW = 5
FACTOR = 2.0  # times the median, at least; half of the increase for a lasting spike
LEAST_SPREAD = 0.02  # for a loss that hardly changes
FRESH = 8  # steps for which a median is reused
KEPT = 16  # first spikes kept
REMEMBERED = 1000  # steps: after a rollback of at most this many, steps are judged immediately


@dataclass(slots=True)
class Spike:
    """A loss spike."""

    step: int
    loss: float  # at its peak
    usual: float  # median of the steps before
    spreads: float
    length: int = 1  # steps


class SpikeDetector:
    """Detector that is given every step's loss; ``spikes`` are the first few, ``count`` is their total number."""

    def __init__(self) -> None:
        self.spikes: list[Spike] = []
        self.count = 0
        self._seen = 0
        self._ordinary: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)  # step and loss of ordinary steps
        self._levels: deque[tuple[int, int]] = deque(
            maxlen=KEPT
        )  # first step of a new level, and the step at which it was detected
        self._to_judge_by = 0  # ordinary steps of the current level
        self._usual: tuple[float, float, bool] | None = None
        self._age = 0
        self._high: list[tuple[int, float, float]] = []  # step, loss and spreads of consecutive high steps
        self._current: Spike | None = None

    def add(self, step: int, loss: float) -> Spike | None:
        """Add a loss; return the spike at the step at which it is detected: its first, or the last of a few high ones.

        A loss that is not finite is not a spike, and is not used to judge others.
        """
        if not math.isfinite(loss):
            return None
        self._seen += 1
        if self._seen > SETTLED and self._to_judge_by >= WINDOW // 2:
            usual, spread, logarithmic = self._typical()
            spreads = self._spreads(loss, usual, spread, logarithmic)
            if self._is_high(loss, spreads, usual, logarithmic):
                return self._add_high(step, loss, spreads, usual, logarithmic)
        self._end_of_high()
        self._keep([(step, loss)])
        self._age += 1
        return None

    def forget(self, since_step: int) -> None:
        """Forget this step and later ones, because they will be run again. Spikes already reported are kept."""
        self._end_of_high()
        while self._levels and self._levels[-1][1] >= since_step:
            # The level is no longer established, so its steps are only high.
            since_step = min(since_step, self._levels.pop()[0])
        while self._ordinary and self._ordinary[-1][0] >= since_step:
            self._ordinary.pop()
        self._usual, self._to_judge_by = None, len(self._window())

    def state(self) -> dict[str, Any]:
        """Return, as plain data, what another instance needs to judge the next steps in the same way."""
        return {
            "seen": self._seen,
            "ordinary": [list(each) for each in self._window()],
            "usual": None if self._usual is None else list(self._usual),
            "age": self._age,
            "high": [list(each) for each in self._high],
            "told": self._current is not None,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved ``state``."""
        self._seen, self._age = int(state["seen"]), int(state["age"])
        self._ordinary.clear()
        self._levels.clear()
        self._to_judge_by = 0
        self._keep([(int(step), float(loss)) for step, loss in state["ordinary"]])
        usual = state["usual"]
        self._usual = None if usual is None else (float(usual[0]), float(usual[1]), bool(usual[2]))
        self._high = [(int(step), float(loss), float(spreads)) for step, loss, spreads in state["high"]]
        self._current = _continued(self._high) if state["told"] and self._high else None

    def _window(self) -> list[tuple[int, float]]:
        """Return the steps to judge by, oldest first."""
        latest = list(islice(reversed(self._ordinary), WINDOW))[::-1]
        return [each for each in latest if each[0] >= self._levels[-1][0]] if self._levels else latest

    def _keep(self, ordinary: list[tuple[int, float]]) -> None:
        self._ordinary.extend(ordinary)
        self._to_judge_by += len(ordinary)

    def _typical(self) -> tuple[float, float, bool]:
        """Return median and spread of the steps before, of the logarithm if all are positive."""
        if self._usual is None or self._age >= FRESH:
            losses = [loss for _, loss in self._window()]
            logarithmic = min(losses) > 0
            middle, spread = robust_spread([math.log(loss) if logarithmic else loss for loss in losses])
            least = LEAST_SPREAD if logarithmic else LEAST_SPREAD * max(abs(middle), 1e-12)
            self._usual, self._age = (middle, max(spread, least), logarithmic), 0
        return self._usual

    def _spreads(self, loss: float, usual: float, spread: float, logarithmic: bool) -> float:
        if logarithmic and loss <= 0:
            return 0.0  # a drop is not a spike
        return ((math.log(loss) if logarithmic else loss) - usual) / spread

    def _is_high(self, loss: float, spreads: float, usual: float, logarithmic: bool) -> bool:
        if spreads <= LASTING:
            return False
        return not logarithmic or loss > math.exp(usual) * (1 + (FACTOR - 1) / 2)

    def _add_high(self, step: int, loss: float, spreads: float, usual: float, logarithmic: bool) -> Spike | None:
        """Return the spike if it is detected at this step."""
        self._high.append((step, loss, spreads))
        before = math.exp(usual) if logarithmic else usual
        sudden = spreads > SUDDEN and (not logarithmic or loss > FACTOR * before)
        detected = None
        if self._current is not None:
            self._current.length += 1
            self._current.loss, self._current.spreads = max(
                (self._current.loss, self._current.spreads), (loss, spreads)
            )
        elif sudden or len(self._high) >= IN_A_ROW:
            detected = self._start_spike(before)
        if len(self._high) >= WINDOW // 2:  # a new level replaces the old one
            self._levels.append((self._high[0][0], step))
            self._usual, self._to_judge_by = None, 0
            self._keep([(step, value) for step, value, _ in self._high])
            self._end_of_high()
        return detected

    def _start_spike(self, before: float) -> Spike:
        _, loss, spreads = max(self._high, key=lambda high: high[1])
        self._current = Spike(self._high[0][0], loss, before, spreads, len(self._high))
        self.count += 1
        if len(self.spikes) < KEPT:
            self.spikes.append(self._current)
        return self._current

    def _end_of_high(self) -> None:
        # High steps that did not become a spike are noise.
        if self._high and self._current is None:
            self._keep([(step, loss) for step, loss, _ in self._high])
        self._high.clear()
        self._current = None


def _continued(high: list[tuple[int, float, float]]) -> Spike:
    """Return a spike that was reported before the state was saved, and continues."""
    first = high[0][0]
    _, loss, spreads = max(high, key=lambda each: each[1])
    return Spike(first, loss, math.nan, spreads, len(high))
