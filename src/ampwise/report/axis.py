"""An axis: where a value lies on it, and which values are written beside it."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Axis", "axis_for", "round_numbers"]

WIDE = 50.0  # from this ratio of highest to lowest on, a straight scale shows only the highest
MOST_TICKS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """From ``low`` to ``high``, even in the values (``base`` 0) or in their logarithms."""

    low: float
    high: float
    base: int = 0

    def share(self, value: float) -> float:
        """Where ``value`` lies, from 0 at the low end to 1 at the high one."""
        low, value, high = (self._even(number) for number in (self.low, value, self.high))
        return (value - low) / (high - low) if high > low else 0.5

    def _even(self, value: float) -> float:
        # Halved, since the way from one end of FP64 to the other is longer than FP64 can say.
        return math.log2(value) if self.base else value / 2

    def ticks(self) -> list[tuple[float, str]]:
        """The values to write, each with its label."""
        if not self.base:
            return [(value, f"{value:g}") for value in round_numbers(self.low, self.high)]
        powers = self._powers()
        if len(powers) < 2 and self.base == 10:
            return [(value, f"{value:.3g}") for value in round_numbers(self.low, self.high) if value > 0]
        return [(float(self.base) ** power, f"{self.base}^{power}") for power in powers]

    def _powers(self) -> list[int]:
        first = math.ceil(math.log(self.low, self.base) - 1e-9)
        last = math.floor(math.log(self.high, self.base) + 1e-9)
        return list(range(first, last + 1, max(1, math.ceil((last - first + 1) / MOST_TICKS))))


def axis_for(values: Sequence[float], *, base: int = 10, always: bool = False) -> Axis:
    """An axis that holds finite ``values``, with room at the ends; logarithmic where they need it and can.

    ``always`` takes the logarithm however near they are to each other, as one thinks of a loss scale.
    """
    low, high = min(values), max(values)
    doublings = math.log2(high) - math.log2(low) if low > 1e-200 and high < 1e200 else None
    # Nearer to the ends of FP64 there is no room for a margin.
    if doublings is not None and (always or doublings > math.log2(WIDE)):
        margin = max(2 ** (doublings * 0.05), 1.2)
        return Axis(low=low / margin, high=high * margin, base=base)
    margin = (high / 2 - low / 2) * 0.1 or abs(high) * 0.6 or 1.0
    return Axis(low=max(low - margin, -sys.float_info.max), high=min(high + margin, sys.float_info.max))


def round_numbers(low: float, high: float) -> list[float]:
    """About six round numbers from ``low`` to ``high``.

    >>> round_numbers(1, 120)
    [20.0, 40.0, 60.0, 80.0, 100.0, 120.0]
    """
    rough = (high / MOST_TICKS) - (low / MOST_TICKS)
    if not rough > 1e-300:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    stride = next((power * times for times in (1, 2, 5) if power * times >= rough), power * 10)
    first, last = math.ceil(low / stride), math.floor(high / stride)
    return [number * stride if stride >= 1 else number / (1 / stride) for number in range(first, last + 1)]
