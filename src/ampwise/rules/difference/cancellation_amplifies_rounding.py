"""What is nearly equal, subtracted: what is left is mostly rounding."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ampwise.evidence.difference import Differing, Spot
from ampwise.evidence.difference_words import evidence_of, keep_fix, proof, spot_text, times_text, title
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP530",
    name="cancellation-amplifies-rounding",
    severity=Severity.WARNING,
    summary="Terms that nearly cancel are rounded first: what is left of them is mostly rounding.",
    why=(
        "Each rounding changes a number by a share of itself: up to 1/256 in BF16. Where two such numbers are nearly "
        "equal, their difference is small and the changes are not: at a difference of 1%, BF16 leaves an error of tens "
        "of percent. The same happens inside a matrix product whose terms cancel. No later layer gets that back, and "
        "no loss scale helps: what is missing is mantissa, so FP16, with three bits more, has an eighth of it."
    ),
    fix=(
        "Compute the difference in FP32, and with it what makes the two terms: once they are rounded, it is too late. "
        "Or change the formula so that the small difference is computed directly. `ampwise.diff` shows what is left."
    ),
    bad="score = self.compress(x) - self.particularize(x)  # two heads, nearly equal, each rounded to BF16",
    good="""@ampwise.keep("fp32")
def score(self, x):
    return self.compress(x) - self.particularize(x)""",
)

MOST = 5


def check(differing: Differing) -> Iterator[Finding]:
    for spot in islice(differing.caused_by("cancellation"), MOST):
        yield RULE.at(
            spot.place,
            f"{spot.where} {spot_text(spot)}{_smaller(spot)}; the error is {title(differing.b)}'s rounding, of "
            "what has cancelled",
            evidence=evidence_of(spot),
            fix=f"{keep_fix(differing, spot)}. {proof(differing, spot)}",
        )


def _smaller(spot: Spot) -> str:
    shrinks = spot.shrinks if spot.op is None else spot.op.shrinks or spot.shrinks
    if shrinks is None or shrinks < 2:
        return ""
    return f", and makes something {times_text(shrinks)} times smaller of it"
