"""A run that has its old precision again."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.fault_words import evidence_of, one_line, steps
from ampwise.evidence.faults import ClimbedBack
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP806",
    name="climbed-back",
    severity=Severity.INFO,
    summary="After a healthy stretch the run has the precision again that it had before.",
    why=(
        "A wider format was taken because of a fault. Where one is asked to, the guard goes back to the faster one "
        "after a stated number of healthy steps. If the fault comes back, so does the wider format."
    ),
    fix="Nothing to do. If the precision changes back and forth, ask for the wider one from the start.",
    bad='engine = Engine(model, optimizer, precision="fp16")',
    good='engine = Engine(model, optimizer, precision="bf16")',
)


def check(climbed: ClimbedBack) -> Iterator[Finding]:
    yield RULE.at(
        Place(step=climbed.step),
        f"back from {one_line(climbed.before)} to {one_line(climbed.after)}, after {steps(climbed.healthy_steps)} "
        "without trouble",
        evidence=evidence_of(climbed),
    )
