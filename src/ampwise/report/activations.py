"""What modules put out, by how near it comes to the largest number of its format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ampwise.errors import UnknownName
from ampwise.formats import find_scalar_format
from ampwise.report.facts import mapping
from ampwise.report.wording import number, percent

if TYPE_CHECKING:
    from ampwise.record.reader import Run

__all__ = ["ABOUT", "HEADINGS", "MOST_MODULES", "Activation", "activations_of"]

MOST_MODULES = 12
HEADINGS = ["module", "format", "largest", "of the format's largest"]
ABOUT = "The largest magnitude that each module put out in the steps that were looked at"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The largest magnitude that a module put out."""

    module: str
    dtype: str
    largest: float
    share: float | None  # of the largest number of its format; None for a format that nobody knows

    @property
    def cells(self) -> list[str]:
        """A row under HEADINGS."""
        if not math.isfinite(self.largest):
            return [self.module, self.dtype, "NaN" if math.isnan(self.largest) else "inf", "beyond it"]
        return [self.module, self.dtype, f"{self.largest:.3g}", "" if self.share is None else percent(self.share)]


def activations_of(run: Run) -> list[Activation]:
    """Every module that was looked at, the nearest to overflow first; none where the run did not look."""
    found = mapping(run, "activations").items()
    read = [_read(str(module), row) for module, row in found if isinstance(row, Mapping)]
    return sorted((one for one in read if one is not None), key=_badness)


def _read(module: str, row: Mapping[str, object]) -> Activation | None:
    largest, dtype = number(row.get("largest")), str(row.get("dtype") or "")
    if largest is None:
        return None
    try:
        share = abs(largest) / find_scalar_format(dtype).max if math.isfinite(largest) else None
    except (UnknownName, ValueError):
        share = None
    return Activation(module=module, dtype=dtype, largest=largest, share=share)


def _badness(one: Activation) -> tuple[bool, float]:
    return math.isfinite(one.largest), -(one.share or 0.0)
