from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.numbers.number_text import number_text
from ampwise.tune.diff.wording import first_spots, keep_fix, side_title

if TYPE_CHECKING:
    from ampwise.tune.diff.step_difference import StepDifference

RULE = Rule(
    code="AMP532",
    name="overflow-on-one-side",
    severity=Severity.ERROR,
    summary="Values that are finite on one side are inf or NaN on the other.",
    why=(
        "FP16 ends at 65,504; FP32 and BF16 near 3.4e38. Larger values become inf, and NaN a few operations later (inf "
        "− inf, 0 · inf). The weights themselves are fine: on the other side the same values are finite."
    ),
    fix=(
        "Keep this part in FP32, or train in BF16, which has FP32's range. If the values should not be that large, "
        "bound them: normalise, subtract the maximum before exp, clip. `ampwise.trace` reports the operation."
    ),
    bad="weights = torch.exp(scores)  # under FP16 autocast, scores up to 12",
    good="weights = torch.exp(scores.float() - scores.float().amax(-1, keepdim=True))",
)

BF16 = ", or train in BF16, which has FP32's range"


def check_difference(differing: StepDifference) -> Findings:
    for spot in first_spots(differing, "overflow"):
        measured = spot.compared.measured
        if measured is None:
            continue
        bad, fine = (differing.a, differing.b) if measured.bad_a > measured.bad_b else (differing.b, differing.a)
        if measured.bad_a == measured.bad_b:
            rest = f"and different in {side_title(fine)}"
        else:
            largest = number_text(max(measured.largest_a, measured.largest_b))
            rest = f"but finite in {side_title(fine)}, where the largest is {largest}"
        count = f"{measured.apart:,} of {measured.values:,} values"
        yield RULE.at(
            spot.place,
            f"{spot.where} has {count} that are not finite in {side_title(bad)} {rest}",
            evidence=spot.evidence() | {"not_finite_a": measured.bad_a, "not_finite_b": measured.bad_b},
            fix=keep_fix(differing, spot, other=BF16 if bad.precision == "fp16" else ""),
        )
