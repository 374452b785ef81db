"""How often: "10min", "90s", "2h", or "500 steps"."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from ampwise.errors import BadInput

__all__ = ["Every", "seconds"]

UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
FORM = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*")


class Every(NamedTuple):
    """One of the two."""

    seconds: float | None
    steps: int | None

    def __str__(self) -> str:
        return f"{self.steps} steps" if self.steps is not None else f"{self.seconds:g} s"

    @classmethod
    def checked(cls, given: Any) -> Every:
        """
        >>> Every.checked("10min"), Every.checked("500 steps")
        (Every(seconds=600.0, steps=None), Every(seconds=None, steps=500))
        """
        found = FORM.fullmatch(given) if isinstance(given, str) else None
        if found is not None and found[2] in ("step", "steps"):
            if not found[1].isdigit() or int(found[1]) < 1:
                raise BadInput(f"Guard(every={given!r}): a whole number of steps is expected.")
            return cls(None, int(found[1]))
        return cls(seconds(given, "every"), None)


def seconds(given: Any, name: str) -> float:
    """Of a duration: a number, or a number with a unit."""
    number = math.nan
    if isinstance(given, int | float) and not isinstance(given, bool):
        number = float(given)
    elif isinstance(given, str) and (found := FORM.fullmatch(given)) and found[2] in UNITS:
        number = float(found[1]) * UNITS[found[2]]
    if not 0 < number < math.inf:
        raise BadInput(f"Guard({name}={given!r}): a duration is expected: '10min', '90s', '2h'.")
    return number
