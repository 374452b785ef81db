"""A run that returned to its original precision."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.guard_event_text import event_evidence, one_line, step_count_text
from ampwise.rules.evidence.guard_events import PrecisionRestored

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP806",
    name="climbed-back",
    severity=Severity.INFO,
    summary="After a healthy period, the run returned to its previous precision.",
    why=(
        "The run had switched to a wider format because of a failure. If configured to, the guard returns to the "
        "faster format after a given number of healthy steps. If the failure recurs, so does the wider format."
    ),
    fix="Nothing to do. If the precision keeps changing back and forth, use the wider one from the start.",
    bad='engine = Engine(model, optimizer, precision="fp16")',
    good='engine = Engine(model, optimizer, precision="bf16")',
)


def check(climbed: PrecisionRestored) -> Iterator[Finding]:
    yield RULE.at(
        Place(step=climbed.step),
        f"back from {one_line(climbed.before)} to {one_line(climbed.after)}, after "
        f"{step_count_text(climbed.healthy_steps)} "
        "without failures",
        evidence=event_evidence(climbed),
    )
