"""Growth of an error along the depth of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Growth"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Growth of the error along the depth, over the modules that have one."""

    first: float
    last: float
    largest: float
    largest_at: str
    modules: int
    factor: float | None  # per module, from a linear fit to the logarithms

    @classmethod
    def of(cls, errors: Iterable[tuple[str, float | None]]) -> Growth | None:
        """
        >>> Growth.of([("a", 0.0), ("b", 0.001), ("c", 0.002), ("d", 0.004)]).factor
        2.0
        """
        known = [(name, error) for name, error in errors if error is not None and 0 < error < math.inf]
        if not known:
            return None
        largest = max(known, key=lambda pair: pair[1])
        factor = _factor([error for _, error in known])
        return cls(
            first=known[0][1],
            last=known[-1][1],
            largest=largest[1],
            largest_at=largest[0],
            modules=len(known),
            factor=factor,
        )


def _factor(errors: list[float]) -> float | None:
    """
    >>> _factor([1.0, 8.0, 64.0]), _factor([3.0])
    (8.0, None)
    """
    count = len(errors)
    if count < 2:
        return None
    middle = (count - 1) / 2
    slope = sum((place - middle) * math.log2(error) for place, error in enumerate(errors))
    return float(2 ** (slope / sum((place - middle) ** 2 for place in range(count))))
