"""Jumps of the loss, told from its ordinary noise by the median and spread of the steps before."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

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
REMEMBERED = 1000  # steps: a run that goes back so far at most is judged at once by what was usual there


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
        self._seen = 0
        self._ordinary: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)  # step and loss of those to judge by
        self._levels: deque[tuple[int, int]] = deque(maxlen=KEPT)  # first step of a new level, and when it was one
        self._to_judge_by = 0  # of the ordinary ones, how many are of this level
        self._usual: tuple[float, float, bool] | None = None
        self._age = 0
        self._high: list[tuple[int, float, float]] = []  # step, loss and spreads of those above, in a row
        self._told: Spike | None = None

    def add(self, step: int, loss: float) -> Spike | None:
        """The spike, at the one step at which it becomes known: its first, or the last of a few that are high.

        A loss that is not finite is no spike, and tells nothing of what is usual.
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
        """That step and those after it have not been: they are taken again. What was told stays told."""
        self._end_of_high()
        while self._levels and self._levels[-1][1] >= since_step:
            # It is not known yet to be one, so its steps are no more than high.
            since_step = min(since_step, self._levels.pop()[0])
        while self._ordinary and self._ordinary[-1][0] >= since_step:
            self._ordinary.pop()
        self._usual, self._to_judge_by = None, len(self._window())

    def state(self) -> dict[str, Any]:
        """As plain data, what another one needs to judge the next steps as this one would."""
        return {
            "seen": self._seen,
            "ordinary": [list(each) for each in self._window()],
            "usual": None if self._usual is None else list(self._usual),
            "age": self._age,
            "high": [list(each) for each in self._high],
            "told": self._told is not None,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Judge from now on as the one would whose ``state`` this is."""
        self._seen, self._age = int(state["seen"]), int(state["age"])
        self._ordinary.clear()
        self._levels.clear()
        self._to_judge_by = 0
        self._keep([(int(step), float(loss)) for step, loss in state["ordinary"]])
        usual = state["usual"]
        self._usual = None if usual is None else (float(usual[0]), float(usual[1]), bool(usual[2]))
        self._high = [(int(step), float(loss), float(spreads)) for step, loss, spreads in state["high"]]
        self._told = _continued(self._high) if state["told"] and self._high else None

    def _window(self) -> list[tuple[int, float]]:
        """What to judge by, oldest first."""
        latest = list(islice(reversed(self._ordinary), WINDOW))[::-1]
        return [each for each in latest if each[0] >= self._levels[-1][0]] if self._levels else latest

    def _keep(self, ordinary: list[tuple[int, float]]) -> None:
        self._ordinary.extend(ordinary)
        self._to_judge_by += len(ordinary)

    def _typical(self) -> tuple[float, float, bool]:
        """Median and spread of what came before, of the logarithm where all are above zero."""
        if self._usual is None or self._age >= FRESH:
            losses = [loss for _, loss in self._window()]
            logarithmic = min(losses) > 0
            middle, spread = robust_spread([math.log(loss) if logarithmic else loss for loss in losses])
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

    def _add_high(self, step: int, loss: float, spreads: float, usual: float, logarithmic: bool) -> Spike | None:
        """The spike, if it is known to be one now and was not before."""
        self._high.append((step, loss, spreads))
        before = math.exp(usual) if logarithmic else usual
        sudden = spreads > SUDDEN and (not logarithmic or loss > FACTOR * before)
        known_now = None
        if self._told is not None:
            self._told.length += 1
            self._told.loss, self._told.spreads = max((self._told.loss, self._told.spreads), (loss, spreads))
        elif sudden or len(self._high) >= IN_A_ROW:
            known_now = self._tell(before)
        if len(self._high) >= WINDOW // 2:  # a new level: what was usual is no more
            self._levels.append((self._high[0][0], step))
            self._usual, self._to_judge_by = None, 0
            self._keep([(step, value) for step, value, _ in self._high])
            self._end_of_high()
        return known_now

    def _tell(self, before: float) -> Spike:
        _, loss, spreads = max(self._high, key=lambda high: high[1])
        self._told = Spike(self._high[0][0], loss, before, spreads, len(self._high))
        self.count += 1
        if len(self.spikes) < KEPT:
            self.spikes.append(self._told)
        return self._told

    def _end_of_high(self) -> None:
        # What was high and is no spike belongs to the noise.
        if self._high and self._told is None:
            self._keep([(step, loss) for step, loss, _ in self._high])
        self._high.clear()
        self._told = None


def _continued(high: list[tuple[int, float, float]]) -> Spike:
    """One that was told elsewhere and goes on here."""
    first = high[0][0]
    _, loss, spreads = max(high, key=lambda each: each[1])
    return Spike(first, loss, math.nan, spreads, len(high))
