"""Values that are finite on one side alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ampwise.evidence.difference import Differing, SideFacts, Spot
from ampwise.evidence.difference_words import evidence_of, keep_fix, proof, title
from ampwise.evidence.wording import number
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP532",
    name="overflow-on-one-side",
    severity=Severity.ERROR,
    summary="Values that are finite on one side are infinite, or NaN, on the other.",
    why=(
        "FP16 ends at 65,504; FP32 and BF16 near 3.4e38. What is larger becomes infinite, and NaN a few operations "
        "later (inf − inf, 0 · inf). The weights themselves are fine: the other side computes the same numbers and "
        "gets finite ones."
    ),
    fix=(
        "Keep this part in FP32, or train in BF16, which has FP32's range. If the values are not meant to be so large, "
        "bound them: normalise, subtract the maximum before exp, clip. `ampwise.trace` names the operation."
    ),
    bad="weights = torch.exp(scores)  # under FP16's autocast, scores up to 12",
    good="weights = torch.exp(scores.float() - scores.float().amax(-1, keepdim=True))",
)

MOST = 5


def check(differing: Differing) -> Iterator[Finding]:
    for spot in islice(differing.caused_by("overflow"), MOST):
        measured = spot.compared.measured
        if measured is None:
            continue
        bad, fine = (differing.a, differing.b) if measured.bad_a > measured.bad_b else (differing.b, differing.a)
        largest = number(max(measured.largest_a, measured.largest_b))
        told = f"not finite in {title(bad)} and are in {title(fine)}, where the largest is {largest}"
        if measured.bad_a == measured.bad_b:
            told = f"not finite in {title(bad)}, and others in {title(fine)} or not there"
        yield RULE.at(
            spot.place,
            f"{spot.where} has {measured.apart:,} of {measured.values:,} values that are {told}",
            evidence=evidence_of(spot) | {"not_finite_a": measured.bad_a, "not_finite_b": measured.bad_b},
            fix=_fix(differing, spot, bad),
        )


def _fix(differing: Differing, spot: Spot, bad: SideFacts) -> str:
    other = ", or train in BF16, which has FP32's range" if bad.precision == "fp16" else ""
    return f"{keep_fix(differing, spot)}{other}. {proof(differing, spot)}"
