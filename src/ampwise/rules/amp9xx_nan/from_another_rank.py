from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp9xx_nan.failure_text import failure_finding, operation_text, value_text

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure

RULE = Rule(
    code="AMP914",
    name="from-another-rank",
    severity=Severity.ERROR,
    summary="NaN or inf came from another rank, through a reduction or a gather.",
    why=(
        "A reduction sums over all ranks: a NaN on one reaches all of them, and each fails at the same step. The "
        "other ranks are fine; check the one that had it first, and its batch."
    ),
    fix=(
        "Check the reported rank: its batch of this step, and its log. If it is always the same rank, even with other "
        "data, suspect its device."
    ),
    bad="dist.all_reduce(statistics)  # sums of a batch that is empty on one rank: 0/0 there, NaN everywhere",
    good="dist.all_reduce(sums)\ndist.all_reduce(counts)\nmean = sums / counts.clamp_min(1)",
    consequence_of=("AMP9",),
)


def check_op(failure: Failure) -> Findings:
    origin = failure.origin
    if failure.kind != RULE.name or origin is None:
        return
    whose = "from another rank; it is unknown which one" if failure.rank is None else f"from rank {failure.rank}"
    came = f"a collective among {failure.ranks} ranks, received {value_text(origin.made)} {whose}"
    yield failure_finding(RULE, failure, f"{operation_text(origin)}, {came}")
