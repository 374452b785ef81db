from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.tune.diff.wording import first_spots, keep_fix, side_title, spot_text, times_text

if TYPE_CHECKING:
    from ampwise.tune.diff.step_difference import StepDifference

RULE = Rule(
    code="AMP530",
    name="cancellation-amplifies-rounding",
    severity=Severity.WARNING,
    summary="Terms that nearly cancel are rounded first, so the result is mostly rounding error.",
    why=(
        "Each rounding changes a number by a fraction of itself: up to 1/256 in BF16. When two such numbers are nearly "
        "equal, their difference is small but the rounding errors are not: at a difference of 1%, BF16 leaves an error "
        "of tens of percent. The same happens inside a matmul whose terms cancel. No later layer and no loss scale "
        "recovers it: what is missing is mantissa bits, so FP16, with three more, has an eighth of the error."
    ),
    fix=(
        "Compute the difference in FP32, together with the operations that produce the two terms. Once they are "
        "rounded, it is too late."
    ),
    bad="score = self.compress(x) - self.particularize(x)  # two heads, nearly equal, each rounded to BF16",
    good="""@ampwise.keep("fp32")
def score(self, x):
    return self.compress(x) - self.particularize(x)""",
)


def check_difference(differing: StepDifference) -> Findings:
    for spot in first_spots(differing, "cancellation"):
        shrinks = spot.shrinks if spot.op is None else spot.op.shrinks or spot.shrinks
        smaller = ""
        if shrinks is not None and shrinks >= 2:
            smaller = f", and the result is {times_text(shrinks)} times smaller than its inputs"
        yield RULE.at(
            spot.place,
            f"{spot.where} {spot_text(spot)}{smaller}; the error is {side_title(differing.b)} rounding of terms that "
            "cancel",
            evidence=spot.evidence(),
            fix=keep_fix(differing, spot),
        )
