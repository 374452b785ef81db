"""What ``diff`` returns: the evidence, what follows from it, and its forms for terminals, notebooks and machines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ampwise.evidence.difference import BACKWARD, FORWARD, Differing, ModuleRow, OpRow, ParameterRow, Spot
from ampwise.evidence.difference_words import BASES, headline
from ampwise.finding import Finding, Place, Severity
from ampwise.rules.judging import judged

__all__ = ["Difference"]

ROOM = "difference"


@dataclass(frozen=True, slots=True, repr=False)
class Difference:
    """A training step on two sides, held against each other: ``ampwise.diff`` returns one.

    ``rows`` are modules in the order of their calls, ``parameters`` the gradients as the optimizer gets them, ``first``
    is the first place beyond what rounding explains, if there is one, and ``findings`` say what it is and what to do.
    ``print`` shows what ``ampwise diff`` does, a notebook the same as tables, ``page()`` is one HTML file with plots.
    """

    evidence: Differing

    @property
    def rows(self) -> tuple[ModuleRow, ...]:
        """Calls of modules, in their order."""
        return self.evidence.rows

    @property
    def ops(self) -> tuple[OpRow, ...]:
        """Operations, where they were asked for."""
        return self.evidence.ops

    @property
    def parameters(self) -> tuple[ParameterRow, ...]:
        """Gradients of parameters."""
        return self.evidence.parameters

    @property
    def first(self) -> Spot | None:
        """The first place beyond what rounding explains."""
        return self.evidence.first

    @property
    def verdict(self) -> str:
        """In a sentence."""
        return headline(self.evidence)

    @property
    def findings(self) -> list[Finding]:
        """What is not explained, and why: the first place first, then the worst."""
        first = None if self.first is None else self.first.place
        if self.evidence.unsteady:  # before all else
            first = Place(module=self.evidence.floor_at)
        found = judged(self.evidence, ROOM)
        return sorted(found, key=lambda each: (each.place != first, each.severity.rank, each.rule.code))

    @property
    def explained(self) -> bool:
        """Whether rounding is all there is."""
        return not any(finding.severity is not Severity.INFO for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; ``basis`` says what each number rests on."""
        evidence = self.evidence
        growths = {phase: evidence.growth(phase) for phase in (FORWARD, BACKWARD)}
        return {
            "subject": evidence.subject,
            "a": evidence.a.as_dict(),
            "b": evidence.b.as_dict(),
            "verdict": self.verdict,
            "explained": self.explained,
            "loss_relative_error": evidence.loss_error,
            "first": None if self.first is None else self.first.as_dict(),
            "beyond": [spot.as_dict() for spot in evidence.spots],
            "growth": {phase: None if growth is None else asdict(growth) for phase, growth in growths.items()},
            "modules": [row.as_dict() for row in self.rows],
            "returned": [each.as_dict() for each in evidence.returned],
            "parameters": [row.as_dict() for row in self.parameters],
            "ops": [row.as_dict() for row in self.ops],
            "noise_floor": {"largest": evidence.floor, "at": evidence.floor_at or None},
            "findings": [finding.as_dict() for finding in self.findings],
            "notes": list(evidence.notes),
            "basis": BASES,
        }

    def page(self) -> str:
        """One HTML file that needs nothing else: the error along the depth, and all tables."""
        from ampwise.tune.diff.page import page_of

        return page_of(self)

    def __repr__(self) -> str:
        return f"<Difference: {self.verdict}>"

    def __str__(self) -> str:
        from ampwise.tune.diff.text import difference_text

        return difference_text(self)

    def _repr_html_(self) -> str:
        from ampwise.tune.diff.notebook import difference_html

        return difference_html(self)
