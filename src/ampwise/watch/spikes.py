"""Detection of loss spikes, by the median of the steps before and their median absolute deviation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

__all__ = ["Spike", "SpikeDetector"]

WINDOW = 50  # previous steps to judge by
ENOUGH = 25  # of them, to judge at all; and high steps that make a new level
SETTLED = 40  # initial steps that are not judged
SUDDEN = 14.0  # median absolute deviations above the median: a single step is enough
LASTING = 7.0  # deviations, if IN_A_ROW steps are above
IN_A_ROW = 5
SUDDEN_RISE, LASTING_RISE = 2.0, 1.5  # times the median, at least
FEW_ZEROS = 0.1  # of the steps: they are left out of the usual noise
LEAST_DEVIATION = 0.0135  # of the median, for a loss that hardly changes
HABIT = 3  # earlier rises of half the size (of logarithms) that were over at once: such a rise is the usual noise
NEAR = 5  # steps within which they were over
LEAST_HABIT = 4.0  # times what is around them, at least
KEPT = 16  # first spikes kept
REMEMBERED = 1000  # steps: after a rollback of at most this many, steps are judged immediately


@dataclass(slots=True)
class Spike:
    """A loss spike."""

    step: int
    loss: float  # at its peak
    usual: float  # median of the steps before
    spreads: float  # median absolute deviations above the median
    length: int = 1  # steps


class SpikeDetector:
    """Detector that is given every step's loss; ``spikes`` are the first few, ``count`` is their total number."""

    def __init__(self) -> None:
        self.spikes: list[Spike] = []
        self.count = 0
        self._seen = 0
        self._history: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)  # step and loss
        self._begin()

    def _begin(self) -> None:
        self._ordinary: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # step and loss, to judge by
        self._high: list[tuple[int, float, float]] = []  # step, loss and deviations of consecutive high steps
        self._current: Spike | None = None

    def add(self, step: int, loss: float) -> Spike | None:
        """Add a loss; return the spike at the step at which it is detected: its first, or the last of a few high ones.

        A loss that is not finite is not a spike, and is not used to judge others.
        """
        if not math.isfinite(loss):
            return None
        self._seen += 1
        self._history.append((step, loss))
        spike = self._judge(step, loss)
        if spike is not None:
            self.count += 1
            if len(self.spikes) < KEPT:
                self.spikes.append(spike)
        return spike

    def _judge(self, step: int, loss: float) -> Spike | None:
        usual, deviations, rise = self._compare(loss)
        if deviations <= LASTING or rise <= LASTING_RISE:
            if self._current is None:  # high steps that did not become a spike are noise
                self._ordinary.extend((step, loss) for step, loss, _ in self._high)
            self._high, self._current = [], None
            self._ordinary.append((step, loss))
            return None
        self._high.append((step, loss, deviations))
        detected = None
        if self._current is not None:
            self._current.length += 1
            peak = max((self._current.loss, self._current.spreads), (loss, deviations))
            self._current.loss, self._current.spreads = peak
        elif len(self._high) >= IN_A_ROW or (
            deviations > SUDDEN and rise > SUDDEN_RISE and (self.count or not self._is_habit(rise))
        ):
            detected = self._current = _spike(self._high, usual)
        if len(self._high) >= ENOUGH:  # a new level replaces the old one
            level = [(step, loss) for step, loss, _ in self._high]
            self._begin()
            self._ordinary.extend(level)
        return detected

    def _compare(self, loss: float) -> tuple[float, float, float]:
        """Return the median of the steps before, and how far the loss is above it: in deviations, and as a ratio.

        Positive losses are compared by their logarithms, as their noise is proportional to their size. Where all are
        negative, it is the rise as a share of the median's size; where many are 0 it is the ratio to the largest one.
        Losses of both signs, as of a policy gradient or of networks that compete, have no usual size: not judged.
        """
        losses = [loss for _, loss in self._ordinary]
        if self._seen <= SETTLED or len(losses) < ENOUGH:
            return loss, 0.0, 1.0
        usual = median(losses)
        if min(losses) < 0 < max(losses):
            return usual, 0.0, 1.0
        many_zeros = losses.count(0.0) > FEW_ZEROS * len(losses)  # as of a hinge loss: the median deviation may be 0
        if min(losses) < 0 or many_zeros:
            deviations = [abs(each - usual) for each in losses]
            deviation = fmean(deviations) if many_zeros else median(deviations)
            if not deviation:
                return usual, 0.0, 1.0
            rise = loss / max(losses) if many_zeros else 1 + (loss - usual) / max(abs(usual), 1e-30)
            return usual, (loss - usual) / max(deviation, LEAST_DEVIATION * abs(usual)), rise
        if loss <= LASTING_RISE * usual:  # as nearly always: the rest need not be computed
            return usual, 0.0, 1.0
        deviation = median([abs(math.log(each / usual)) for each in losses if each > 0])
        return usual, math.log(loss / usual) / max(deviation, LEAST_DEVIATION), loss / usual

    def _is_habit(self, rise: float) -> bool:
        """Whether the loss has risen like this before, for a few steps each time, as if layers are dropped at random.

        Such rises were not spikes if they were frequent among the steps before, or the loss was still falling.
        """
        least = max(rise**0.5, LEAST_HABIT)
        judged = list(self._history)[SETTLED : -len(self._high)]
        count, last = 0, -1
        for at in range(NEAR, len(judged) - NEAR):
            before = min(loss for _, loss in judged[at - NEAR : at])
            after = min(loss for _, loss in judged[at + 1 : at + 1 + NEAR])
            if min(before, after) > 0 and judged[at][1] > least * max(before, after):
                count, last = count + (at - last > 1), at
        return count >= HABIT

    def restart(self) -> None:
        """Judge by the next steps only: what the losses are measured against has changed."""
        self._begin()

    def forget(self, since_step: int) -> None:
        """Forget this step and later ones, because they will be run again. Spikes already reported are kept."""
        kept = [(step, loss) for step, loss in self._history if step < since_step]
        self._history.clear()
        self._history.extend(kept)
        self._begin()
        for step, loss in kept:
            self._judge(step, loss)

    def state(self) -> dict[str, Any]:
        """Return, as plain data, what another instance needs to judge the next steps in the same way."""
        return {
            "seen": self._seen,
            "ordinary": [list(each) for each in self._ordinary],
            "high": [list(each) for each in self._high],
            "told": self._current is not None,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved ``state``."""
        self._begin()
        self._seen = int(state["seen"])
        self._ordinary.extend((int(step), float(loss)) for step, loss in state["ordinary"])
        self._high = [(int(step), float(loss), float(deviations)) for step, loss, deviations in state["high"]]
        self._current = _spike(self._high, math.nan) if state["told"] and self._high else None
        self._history.clear()
        self._history.extend([*self._ordinary, *((step, loss) for step, loss, _ in self._high)])


def _spike(high: list[tuple[int, float, float]], usual: float) -> Spike:
    _, loss, deviations = max(high, key=lambda each: each[1])
    return Spike(high[0][0], loss, usual, deviations, len(high))
