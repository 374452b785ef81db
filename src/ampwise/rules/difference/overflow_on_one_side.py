"""Values that are finite on one side only."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.difference import ErrorLocation, SideFacts, StepDifference
from ampwise.rules.evidence.difference_text import diff_command, keep_fix, location_evidence, side_title
from ampwise.rules.evidence.number_text import number_text

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP532",
    name="overflow-on-one-side",
    severity=Severity.ERROR,
    summary="Values that are finite on one side are inf or NaN on the other.",
    why=(
        "FP16 ends at 65,504; FP32 and BF16 near 3.4e38. Larger values become inf, and NaN a few operations later "
        "(inf − inf, 0 · inf). The weights themselves are fine: the other side computes the same values and they are "
        "finite."
    ),
    fix=(
        "Keep this part in FP32, or train in BF16, which has FP32's range. If the values should not be that large, "
        "bound them: normalise, subtract the maximum before exp, clip. `ampwise.trace` reports the operation."
    ),
    bad="weights = torch.exp(scores)  # under FP16 autocast, scores up to 12",
    good="weights = torch.exp(scores.float() - scores.float().amax(-1, keepdim=True))",
)

MOST = 5


def check(differing: StepDifference) -> Iterator[Finding]:
    for spot in islice(differing.caused_by("overflow"), MOST):
        measured = spot.compared.measured
        if measured is None:
            continue
        bad, fine = (differing.a, differing.b) if measured.bad_a > measured.bad_b else (differing.b, differing.a)
        largest = number_text(max(measured.largest_a, measured.largest_b))
        description = (
            f"not finite in {side_title(bad)} but finite in {side_title(fine)}, where the largest is {largest}"
        )
        if measured.bad_a == measured.bad_b:
            description = f"not finite in {side_title(bad)} and different in {side_title(fine)}"
        yield RULE.at(
            spot.place,
            f"{spot.where} has {measured.apart:,} of {measured.values:,} values that are {description}",
            evidence=location_evidence(spot) | {"not_finite_a": measured.bad_a, "not_finite_b": measured.bad_b},
            fix=_fix(differing, spot, bad),
        )


def _fix(differing: StepDifference, spot: ErrorLocation, bad: SideFacts) -> str:
    other = ", or train in BF16, which has FP32's range" if bad.precision == "fp16" else ""
    return f"{keep_fix(differing, spot)}{other}. {diff_command(differing, spot)}"
