"""Result of ``diff``: the evidence, the findings, and how to print or serialize them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ampwise.finding import Finding, Place, Severity
from ampwise.finding.registry import run_checks
from ampwise.finding.terminal import shortened
from ampwise.tune.diff.headline import BASES, difference_headline
from ampwise.tune.diff.step_difference import (
    BACKWARD,
    FORWARD,
    ErrorLocation,
    ModuleRow,
    OpRow,
    ParameterRow,
    StepDifference,
)
from ampwise.tune.diff.token_difference import TokenDifference, TriedPolicy


@dataclass(frozen=True, slots=True, repr=False)
class Difference:
    """A training step compared on two sides: ``ampwise.diff`` returns one.

    ``rows`` are modules in the order of their calls, ``parameters`` the gradients as the optimizer gets them, ``first``
    is the first place beyond what rounding explains, if any, and ``findings`` say what it is and how to fix it.
    ``print`` shows the same as ``ampwise diff``, a notebook shows tables, ``page()`` is one HTML file with plots.
    """

    evidence: StepDifference

    @property
    def rows(self) -> tuple[ModuleRow, ...]:
        """Calls of modules, in order."""
        return self.evidence.rows

    @property
    def ops(self) -> tuple[OpRow, ...]:
        """Operations; empty unless ``ops=True``."""
        return self.evidence.ops

    @property
    def parameters(self) -> tuple[ParameterRow, ...]:
        """Gradients of parameters."""
        return self.evidence.parameters

    @property
    def tokens(self) -> TokenDifference | None:
        """Differences of the targets' log-probabilities; None if none were seen on both sides."""
        return self.evidence.tokens

    @property
    def remedies(self) -> tuple[TriedPolicy, ...]:
        """Policies that were tried on held-back batches, cheapest first."""
        return self.evidence.remedies

    @property
    def first(self) -> ErrorLocation | None:
        """The first place beyond what rounding explains."""
        return self.evidence.first

    @property
    def verdict(self) -> str:
        """The verdict in a sentence."""
        return difference_headline(self.evidence)

    @property
    def findings(self) -> list[Finding]:
        """What rounding does not explain, and why: the first place first, then by severity."""
        first = None if self.first is None else self.first.place
        if self.evidence.unsteady:  # reported before all else
            first = Place(module=self.evidence.floor_at)
        found = run_checks(self.evidence)
        return sorted(found, key=lambda each: (each.place != first, each.severity.rank, each.rule.code))

    @property
    def explained(self) -> bool:
        """Whether rounding explains everything."""
        return not any(finding.severity is not Severity.INFO for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; ``basis`` says what each number rests on."""
        evidence = self.evidence
        growths = {phase: evidence.growth(phase) for phase in (FORWARD, BACKWARD)}
        return {
            "name": evidence.name,
            "a": evidence.a.as_dict(),
            "b": evidence.b.as_dict(),
            "verdict": self.verdict,
            "explained": self.explained,
            "loss_relative_error": evidence.loss_error,
            "first": None if self.first is None else self.first.as_dict(),
            "beyond": [spot.as_dict() for spot in evidence.spots],
            "tokens": None if evidence.tokens is None else evidence.tokens.as_dict() | {"noise": evidence.token_noise},
            "starts_in": None if evidence.starts_in is None else evidence.starts_in.name,
            "remedies": [remedy.as_dict() for remedy in evidence.remedies],
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
        """Return one self-contained HTML file: the error along the depth, and all tables."""
        from ampwise.tune.diff.page import render_page

        return render_page(self)

    def __repr__(self) -> str:
        return shortened(f"<Difference: {self.verdict}>")

    def __str__(self) -> str:
        from ampwise.tune.diff.text import difference_text

        return difference_text(self)

    def _repr_html_(self) -> str:
        from ampwise.tune.diff.text import difference_html

        return difference_html(self)
