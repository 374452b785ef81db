"""The largest output of each module, relative to the largest number of its format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ampwise.errors import UnknownName
from ampwise.numbers.formats import find_scalar_format
from ampwise.report.formatting import format_percent, read_number
from ampwise.report.run_facts import mapping

if TYPE_CHECKING:
    from ampwise.runs.reader import Run

__all__ = ["ABOUT", "HEADINGS", "MOST_MODULES", "Activation", "activations_of"]

MOST_MODULES = 12
HEADINGS = ["module", "format", "largest", "of the format's maximum"]
ABOUT = "The largest output magnitude of each module in the sampled steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The largest output magnitude of a module."""

    module: str
    dtype: str
    largest: float
    share: float | None  # of the largest number of its format; None for an unknown format

    @property
    def cells(self) -> list[str]:
        """Table row under HEADINGS."""
        if not math.isfinite(self.largest):
            return [self.module, self.dtype, "NaN" if math.isnan(self.largest) else "inf", "not finite"]
        return [
            self.module,
            self.dtype,
            f"{self.largest:.3g}",
            "" if self.share is None else format_percent(self.share),
        ]


def activations_of(run: Run) -> list[Activation]:
    """Return every sampled module, the nearest to overflow first; none if the run sampled no activations."""
    found = mapping(run, "activations").items()
    read = [_read(str(module), row) for module, row in found if isinstance(row, Mapping)]
    return sorted((one for one in read if one is not None), key=_badness)


def _read(module: str, row: Mapping[str, object]) -> Activation | None:
    largest, dtype = read_number(row.get("largest")), str(row.get("dtype") or "")
    if largest is None:
        return None
    try:
        share = abs(largest) / find_scalar_format(dtype).max if math.isfinite(largest) else None
    except (UnknownName, ValueError):
        share = None
    return Activation(module=module, dtype=dtype, largest=largest, share=share)


def _badness(one: Activation) -> tuple[bool, float]:
    return math.isfinite(one.largest), -(one.share or 0.0)
