from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp9xx_nan.failure_text import counted_text, failure_finding, gives_text

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure

RULE = Rule(
    code="AMP907",
    name="division-by-zero",
    severity=Severity.ERROR,
    summary="A division by zero.",
    why=(
        "x/0 is inf and 0/0 is NaN. Typical zero divisors are norms of zero vectors, standard deviations of constant "
        "inputs, and counts of masks without a single True. A guard like `+ 1e-8` has no effect in FP16, where it is "
        "0; and `torch.where` around the division hides its result but not its derivative."
    ),
    fix=(
        "Clamp the divisor, not the quotient. Use `clamp_min(1)` for a count, otherwise a value that the format can "
        "represent (1e-4 in FP16)."
    ),
    bad="loss = (error * mask).sum() / mask.sum()",
    good="loss = (error * mask).sum() / mask.sum().clamp_min(1)",
)


def check_op(failure: Failure) -> Findings:
    origin = failure.origin
    if failure.kind != RULE.name or origin is None:
        return
    if origin.family == "normalisation":
        why = "the standard deviation or norm it divides by is 0, and no eps is added"
    elif not origin.zero_divisors:
        why = "the divisor is 0, or close to it"
    else:  # the divisor is the last input with that many zeros
        censuses = [each.census for each in origin.inputs if each.census is not None]
        counts = [census.count for census in censuses if census.zeros == origin.zero_divisors]
        why = f"{counted_text(origin.zero_divisors, counts[-1] if counts else None, 'divisor')} 0"
    yield failure_finding(RULE, failure, f"{gives_text(origin)}: {why}")
