"""What no rounding can do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ampwise.evidence.difference import Differing
from ampwise.evidence.difference_words import evidence_of, op_text, spot_text
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP538",
    name="one-side-does-otherwise",
    severity=Severity.WARNING,
    summary="An operation that cannot amplify an error gives something else on the two sides: that is no rounding.",
    why=(
        "A product with a number, a copy, a selection hand on the error that they are given, and round once. Where "
        "they are off by more, the code does something else on one side: another branch under autocast, a constant "
        "that depends on the format, a kernel with a mistake, other indices."
    ),
    fix=(
        "Look at the line for what depends on the precision, the device or the kernel: `torch.is_autocast_enabled()`, "
        "`x.dtype`, `torch.finfo(x.dtype)`, an index that was computed."
    ),
    bad="x = x * (1.25 if torch.is_autocast_enabled() else 1.0)",
    good="x = x * 1.25",
)

MOST = 5


def check(differing: Differing) -> Iterator[Finding]:
    for spot in islice(differing.caused_by("otherwise"), MOST):
        yield RULE.at(
            spot.place, f"{spot.where} {spot_text(spot)}.{op_text(spot)}".rstrip("."), evidence=evidence_of(spot)
        )
