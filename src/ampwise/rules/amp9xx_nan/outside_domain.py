from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp9xx_nan.failure_text import domain_text, failure_finding, gives_text

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure

RULE = Rule(
    code="AMP906",
    name="outside-domain",
    severity=Severity.ERROR,
    summary="A logarithm, root, power or inverse trigonometric function received an input for which it is not finite.",
    why=(
        "log(0) is -inf; log and sqrt of a negative number are NaN. Often the input is valid in exact arithmetic and "
        "rounding pushed it over the edge: a variance computed as a difference is -1e-7, a cosine is 1.0000001, a "
        "probability rounds to 0. A guard like `+ 1e-8` has no effect in FP16, where everything up to 3e-8 is 0."
    ),
    fix=(
        "Keep the argument away from the edge with `clamp`, by an amount the format can represent (1e-4 in FP16). Or "
        "use the function made for it: log_softmax, logsigmoid, F.gaussian_nll_loss."
    ),
    bad="std = (x.square().mean() - x.mean().square()).sqrt()",
    good="std = x.var(correction=0).clamp_min(1e-12).sqrt()",
)


def check_op(failure: Failure) -> Findings:
    if failure.kind == RULE.name and failure.origin is not None:
        yield failure_finding(RULE, failure, f"{gives_text(failure.origin)}: {domain_text(failure.origin)}")
