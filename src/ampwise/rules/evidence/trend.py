"""Series of bounded length, and trend tests that are robust to outliers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

__all__ = ["Point", "Series", "mann_kendall", "robust_spread", "steady_slope", "theil_sen"]

SURE = 3.0  # standard deviations of the Mann-Kendall statistic: one false alarm in 700
ENOUGH = 12  # points, so that each quarter has three and its median is not an outlier
STEADY = 0.1  # fraction of the change required between neighbouring quarters; a single jump has none in two of three
NORMAL_MAD = 1.4826  # converts a median absolute deviation to a standard deviation, for a normal distribution


@dataclass(frozen=True, slots=True)
class Point:
    """A value, or several neighbouring values merged."""

    first: int  # step
    last: int
    count: int
    low: float
    mean: float
    high: float

    @property
    def middle(self) -> float:
        return (self.first + self.last) / 2

    def __add__(self, other: Point) -> Point:
        count = self.count + other.count
        return Point(
            min(self.first, other.first),
            max(self.last, other.last),
            count,
            min(self.low, other.low),
            (self.mean * self.count + other.mean * other.count) / count,
            max(self.high, other.high),
        )


class Series:
    """Values by step: recent ones unchanged, older ones repeatedly merged with their neighbours.

    >>> series = Series(recent=2, old=4)
    >>> for step in range(100):
    ...     series.add(step, float(step))
    >>> len(series.points) <= 6, series.points[0].low, series.points[-1].high, sum(p.count for p in series.points)
    (True, 0.0, 99.0, 100)
    """

    __slots__ = ("_old", "_old_limit", "_recent", "_stride")

    def __init__(self, *, recent: int = 24, old: int = 32) -> None:
        self._recent: deque[Point] = deque(maxlen=recent)
        self._old: list[Point] = []
        self._old_limit = old
        self._stride = 1  # values per old point

    def add(self, step: int, value: float) -> None:
        if len(self._recent) == self._recent.maxlen:
            self._merge_old(self._recent[0])
        self._recent.append(Point(step, step, 1, value, value, value))

    def _merge_old(self, point: Point) -> None:
        if self._old and self._old[-1].count < self._stride:
            self._old[-1] += point
            return
        if len(self._old) == self._old_limit:
            pairs = zip(self._old[::2], self._old[1::2], strict=False)
            odd = self._old[-1:] if len(self._old) % 2 else []
            self._old = [*(one + other for one, other in pairs), *odd]
            self._stride *= 2
        self._old.append(point)

    @property
    def points(self) -> list[Point]:
        """All points, oldest first."""
        return [*self._old, *self._recent]

    @property
    def recent(self) -> list[Point]:
        """Recent points, unmerged."""
        return list(self._recent)

    def __len__(self) -> int:
        return len(self._old) + len(self._recent)


def theil_sen(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the median slope over all pairs (Theil-Sen): robust to outliers in up to 29% of the points.

    >>> theil_sen([0, 1, 2, 3, 4], [0, 2, 4, 600, 8])
    2.0
    """
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(zip(xs, ys, strict=True), 2) if x2 != x1]
    return float(median(slopes)) if slopes else 0.0


def mann_kendall(ys: Sequence[float]) -> float:
    """Return the significance of a rise (negative: a fall), in standard deviations (Mann-Kendall).

    >>> round(mann_kendall(range(12)), 1), mann_kendall([1, 1, 1])
    (4.5, 0.0)
    """
    n = len(ys)
    balance = sum((later > earlier) - (later < earlier) for earlier, later in combinations(ys, 2))
    variance = n * (n - 1) * (2 * n + 5) / 18
    # Continuity correction.
    return math.copysign(abs(balance) - 1, balance) / math.sqrt(variance) if balance else 0.0


def steady_slope(points: Sequence[Point]) -> float | None:
    """Return the slope per step of a continuing change; None for noise, a jump, or a change that has ended."""
    if len(points) < ENOUGH:
        return None
    ys = [point.mean for point in points]
    medians = [median(part) for part in _quarters(ys)]
    whole = medians[-1] - medians[0]
    if not whole or any((later - earlier) / whole < STEADY for earlier, later in pairwise(medians)):
        return None
    if abs(mann_kendall(ys)) < SURE:
        return None
    return theil_sen([point.middle for point in points], ys)


def _quarters(values: Sequence[float]) -> list[Sequence[float]]:
    bounds = [len(values) * part // 4 for part in range(5)]
    return [values[start:stop] for start, stop in pairwise(bounds)]


def robust_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and a standard deviation estimate that is robust to outliers.

    >>> robust_spread([1.0, 2.0, 3.0, 4.0, 1000.0])
    (3.0, 1.4826)
    """
    middle = float(median(values))
    return middle, NORMAL_MAD * float(median(abs(value - middle) for value in values))
