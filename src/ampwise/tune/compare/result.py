"""Result of a comparison: the measurements, the findings, and how to print or serialize them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ampwise.finding import Finding
from ampwise.rules import run_checks
from ampwise.tune.compare.speed_text import BASES, speed_headline
from ampwise.tune.compare.speeds import PrecisionRow, SpeedComparison

__all__ = ["PrecisionComparison"]


@dataclass(frozen=True, slots=True)
class PrecisionComparison:
    """A training step in several precisions: ``ampwise.compare`` returns one.

    ``speeds`` has every number, ``findings`` are reasons and warnings, ``best`` is the row to switch to, if there is
    one. ``print`` shows the same as ``ampwise compare``; a notebook shows it as tables.
    """

    speeds: SpeedComparison

    @property
    def rows(self) -> tuple[PrecisionRow, ...]:
        """The rows: one for each precision, eager or compiled."""
        return self.speeds.rows

    @property
    def best(self) -> PrecisionRow | None:
        """The fastest row with the same loss; among rows noise cannot separate, the one that takes least change."""
        return self.speeds.best

    @property
    def verdict(self) -> str:
        """The verdict in a sentence."""
        return speed_headline(self.speeds)

    @property
    def findings(self) -> list[Finding]:
        """Why it is not faster, and what makes a number doubtful; worst first."""
        found = run_checks(self.speeds)
        return sorted(found, key=lambda finding: (finding.severity.rank, finding.rule.code))

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; ``basis`` says what each number rests on."""
        best = self.best
        return self.speeds.as_dict() | {
            "verdict": self.verdict,
            "best": None if best is None else best.label,
            "findings": [finding.as_dict() for finding in self.findings],
            "basis": BASES,
        }

    def __str__(self) -> str:
        from ampwise.tune.compare.text import comparison_text

        return comparison_text(self)

    def _repr_html_(self) -> str:
        from ampwise.tune.compare.notebook import comparison_html

        return comparison_html(self)
