"""Jumps of the loss, told from its ordinary noise by the median and spread of the steps before."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from ampwise.evidence.trend import robust_spread

__all__ = ["Spike", "SpikeWatch"]

WINDOW = 50  # steps before, to judge by
SETTLED = 40  # steps at the start are not judged: there the loss may do anything
SUDDEN = 10.0  # spreads above the median: a single step is enough
LASTING = 5.0  # spreads, when so many steps in a row are above
IN_A_ROW = 5
FACTOR = 2.0  # times the median, or it is no jump that anyone would see; half of it for a lasting one
LEAST_SPREAD = 0.02  # of a loss that hardly moves
FRESH = 8  # steps for which a median is used before it is taken anew
KEPT = 16  # spikes, the first ones


@dataclass(slots=True)
class Spike:
    """A jump of the loss."""

    step: int
    loss: float  # the highest of it
    usual: float  # the median before
    spreads: float
    length: int = 1  # steps


class SpikeWatch:
    """Fed with every step's loss; ``spikes`` are the first few jumps, ``count`` is how many there were."""

    def __init__(self) -> None:
        self.spikes: list[Spike] = []
        self.count = 0
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._seen = 0
        self._usual: tuple[float, float, bool] | None = None
        self._age = 0
        self._high: list[tuple[int, float, float]] = []  # step, loss and spreads of those above, in a row
        self._told: Spike | None = None

    def add(self, step: int, loss: float) -> None:
        self._seen += 1
        if self._seen > SETTLED and len(self._window) >= WINDOW // 2:
            usual, spread, logarithmic = self._typical()
            spreads = self._spreads(loss, usual, spread, logarithmic)
            if self._is_high(loss, spreads, usual, logarithmic):
                self._add_high(step, loss, spreads, usual, logarithmic)
                return
        self._end_of_high()
        self._window.append(loss)
        self._age += 1

    def _typical(self) -> tuple[float, float, bool]:
        """Median and spread of what came before, of the logarithm where all are above zero."""
        if self._usual is None or self._age >= FRESH:
            logarithmic = min(self._window) > 0
            middle, spread = robust_spread([math.log(loss) if logarithmic else loss for loss in self._window])
            least = LEAST_SPREAD if logarithmic else LEAST_SPREAD * max(abs(middle), 1e-12)
            self._usual, self._age = (middle, max(spread, least), logarithmic), 0
        return self._usual

    def _spreads(self, loss: float, usual: float, spread: float, logarithmic: bool) -> float:
        if logarithmic and loss <= 0:
            return 0.0  # far down is no spike
        return ((math.log(loss) if logarithmic else loss) - usual) / spread

    def _is_high(self, loss: float, spreads: float, usual: float, logarithmic: bool) -> bool:
        if spreads <= LASTING:
            return False
        return not logarithmic or loss > math.exp(usual) * (1 + (FACTOR - 1) / 2)

    def _add_high(self, step: int, loss: float, spreads: float, usual: float, logarithmic: bool) -> None:
        self._high.append((step, loss, spreads))
        before = math.exp(usual) if logarithmic else usual
        sudden = spreads > SUDDEN and (not logarithmic or loss > FACTOR * before)
        if self._told is None and (sudden or len(self._high) >= IN_A_ROW):
            self._tell(before)
        elif self._told is not None:
            self._told.length += 1
            self._told.loss, self._told.spreads = max((self._told.loss, self._told.spreads), (loss, spreads))
        if len(self._high) >= WINDOW // 2:  # a new level: what was usual is no more
            self._window.clear()
            self._window.extend(value for _, value, _ in self._high)
            self._usual = None
            self._end_of_high()

    def _tell(self, before: float) -> None:
        _, loss, spreads = max(self._high, key=lambda high: high[1])
        self._told = Spike(self._high[0][0], loss, before, spreads, len(self._high))
        self.count += 1
        if len(self.spikes) < KEPT:
            self.spikes.append(self._told)

    def _end_of_high(self) -> None:
        # What was high and is no spike belongs to the noise.
        if self._high and self._told is None:
            self._window.extend(loss for _, loss, _ in self._high)
        self._high.clear()
        self._told = None
