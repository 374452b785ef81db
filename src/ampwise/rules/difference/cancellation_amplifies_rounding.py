"""Subtraction of nearly equal values, which leaves mostly rounding error."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.difference import ErrorLocation, StepDifference
from ampwise.rules.evidence.difference_text import (
    diff_command,
    keep_fix,
    location_evidence,
    side_title,
    spot_text,
    times_text,
)

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP530",
    name="cancellation-amplifies-rounding",
    severity=Severity.WARNING,
    summary="Terms that nearly cancel are rounded first, so the result is mostly rounding error.",
    why=(
        "Each rounding changes a number by a fraction of itself: up to 1/256 in BF16. When two such numbers are "
        "nearly equal, their difference is small but the rounding errors are not: at a difference of 1%, BF16 leaves "
        "an error of tens of percent. The same happens inside a matmul whose terms cancel. No later layer can recover "
        "it, and loss scaling does not help: the missing part is mantissa bits, so FP16, with three more, has an "
        "eighth of the error."
    ),
    fix=(
        "Compute the difference in FP32, together with the operations that produce the two terms: once they are "
        "rounded, it is too late. Or change the formula so that the small difference is computed directly. "
        "`ampwise.diff` shows the remaining error."
    ),
    bad="score = self.compress(x) - self.particularize(x)  # two heads, nearly equal, each rounded to BF16",
    good="""@ampwise.keep("fp32")
def score(self, x):
    return self.compress(x) - self.particularize(x)""",
)

MOST = 5


def check(differing: StepDifference) -> Iterator[Finding]:
    for spot in islice(differing.caused_by("cancellation"), MOST):
        yield RULE.at(
            spot.place,
            f"{spot.where} {spot_text(spot)}{_smaller(spot)}; the error is {side_title(differing.b)} rounding of terms "
            "that cancel",
            evidence=location_evidence(spot),
            fix=f"{keep_fix(differing, spot)}. {diff_command(differing, spot)}",
        )


def _smaller(spot: ErrorLocation) -> str:
    shrinks = spot.shrinks if spot.op is None else spot.op.shrinks or spot.shrinks
    if shrinks is None or shrinks < 2:
        return ""
    return f", and the result is {times_text(shrinks)} times smaller than its inputs"
