"""What a comparison gives: the evidence, what follows from it, and its forms for terminals, notebooks and machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ampwise.evidence.speed import Row, Speeds
from ampwise.evidence.speed_words import BASES, headline
from ampwise.finding import Finding
from ampwise.rules.judging import judged

__all__ = ["PrecisionComparison"]

ROOM = "speed"


@dataclass(frozen=True, slots=True)
class PrecisionComparison:
    """A training step in several precisions: ``ampwise.compare`` returns one.

    ``speeds`` has every number, ``findings`` are reasons and warnings, ``best`` is the row to go over to, if there is
    one. ``print`` shows what ``ampwise compare`` does, a notebook the same as tables and bars.
    """

    speeds: Speeds

    @property
    def rows(self) -> tuple[Row, ...]:
        """One for each precision, eager or compiled."""
        return self.speeds.rows

    @property
    def best(self) -> Row | None:
        """The fastest that computes the same, of those that are less trouble if noise cannot tell them apart."""
        return self.speeds.best

    @property
    def verdict(self) -> str:
        """In a sentence."""
        return headline(self.speeds)

    @property
    def findings(self) -> list[Finding]:
        """Why it is not faster, and what makes a number doubtful; worst first."""
        found = judged(self.speeds, ROOM)
        return sorted(found, key=lambda finding: (finding.severity.rank, finding.rule.code))

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; ``basis`` says what each number rests on."""
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
