"""Differences that rounding cannot cause."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.difference import StepDifference
from ampwise.rules.evidence.difference_text import location_evidence, op_text, spot_text

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP538",
    name="one-side-does-otherwise",
    severity=Severity.WARNING,
    summary="An operation that cannot amplify errors gives different results on the two sides: this is not rounding.",
    why=(
        "A multiplication by a constant, a copy or a selection passes on the error of its input and rounds once. If "
        "the result is off by more, the code does something different on one side: another branch under autocast, a "
        "constant that depends on the format, a kernel bug, different indices."
    ),
    fix=(
        "Check the line for anything that depends on the precision, the device or the kernel: "
        "`torch.is_autocast_enabled()`, `x.dtype`, `torch.finfo(x.dtype)`, a computed index."
    ),
    bad="x = x * (1.25 if torch.is_autocast_enabled() else 1.0)",
    good="x = x * 1.25",
)

MOST = 5


def check(differing: StepDifference) -> Iterator[Finding]:
    for spot in islice(differing.caused_by("otherwise"), MOST):
        yield RULE.at(
            spot.place, f"{spot.where} {spot_text(spot)}.{op_text(spot)}".rstrip("."), evidence=location_evidence(spot)
        )
