"""Count: a number of values, known exactly or within bounds."""

from __future__ import annotations

__all__ = ["Count"]


class Count(int):
    """Integer with bounds: the true count is between ``low`` and ``high``, and the value is ``high``.

    It counts lost values, so the value never understates the loss.

    >>> Count(3, 3), Count(0, 7)
    (Count(3), Count(0..7))
    >>> Count(0, 7) + 1, Count(0, 7).exact, f"{Count(0, 7)}"
    (8, False, '0–7')
    """

    low: int
    high: int

    def __new__(cls, low: int, high: int | None = None) -> Count:
        high = low if high is None else high
        if low > high:
            raise ValueError(f"a count cannot be at least {low} and at most {high}")
        count = super().__new__(cls, high)
        count.low, count.high = int(low), int(high)
        return count

    @property
    def exact(self) -> bool:
        """Whether the bounds are equal."""
        return self.low == self.high

    def __str__(self) -> str:
        return str(self.high) if self.exact else f"{self.low}–{self.high}"

    def __format__(self, spec: str) -> str:
        low, high = format(self.low, spec), format(self.high, spec)
        return high if self.exact else f"{low}–{high}"

    def __repr__(self) -> str:
        return f"Count({self.high})" if self.exact else f"Count({self.low}..{self.high})"

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]  # copies keep the bounds
        return self.low, self.high
