"""Durations and intervals: "10min", "90s", "2h", or "500 steps"."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from ampwise.errors import BadInput

__all__ = ["Interval", "seconds"]

UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
FORM = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*")


class Interval(NamedTuple):
    """Interval in seconds or in steps; the other is None."""

    seconds: float | None
    steps: int | None

    def __str__(self) -> str:
        return f"{self.steps} steps" if self.steps is not None else f"{self.seconds:g} s"

    @classmethod
    def checked(cls, given: Any) -> Interval:
        """Parse an interval.

        >>> Interval.checked("10min"), Interval.checked("500 steps")
        (Interval(seconds=600.0, steps=None), Interval(seconds=None, steps=500))
        """
        found = FORM.fullmatch(given) if isinstance(given, str) else None
        if found is not None and found[2] in ("step", "steps"):
            if not found[1].isdigit() or int(found[1]) < 1:
                raise BadInput(f"Guard(every={given!r}): expected a whole number of steps, 1 or more.")
            return cls(None, int(found[1]))
        return cls(seconds(given, "every"), None)


def seconds(given: Any, name: str) -> float:
    """Return the seconds of a duration, which is a number or a number with a unit."""
    number = math.nan
    if isinstance(given, int | float) and not isinstance(given, bool):
        number = float(given)
    elif isinstance(given, str) and (found := FORM.fullmatch(given)) and found[2] in UNITS:
        number = float(found[1]) * UNITS[found[2]]
    if not 0 < number < math.inf:
        raise BadInput(f"Guard({name}={given!r}): expected a duration such as '10min', '90s', '2h'.")
    return number
