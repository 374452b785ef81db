from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.numbers.number_text import number_text, scale_text
from ampwise.tune.diff.wording import error_text, first_spots, keep_fix, side_title

if TYPE_CHECKING:
    from ampwise.tune.diff.step_difference import StepDifference

RULE = Rule(
    code="AMP531",
    name="lost-in-narrow-format",
    severity=Severity.WARNING,
    summary="Values are zero, or have fewer bits, on one side because they are below the range of its format.",
    why=(
        "FP16 rounds magnitudes up to 2⁻²⁵ to zero, and keeps those below 2⁻¹⁴ with fewer bits. FP32 and BF16 reach "
        "down to 2⁻¹²⁶. An underflowed value is lost for everything that follows, without an inf to notice. In the "
        "backward pass, loss scaling lifts gradients above that limit; in the forward pass nothing does."
    ),
    fix=(
        "Scale the values up before they are cast, compute this part in FP32, or use BF16, which has FP32's range. "
        "For gradients, use a larger loss scale. `ampwise.diff` shows the remaining error."
    ),
    bad="y = self.project(x * 1e-8) * 1e8  # under FP16 autocast",
    good="y = self.project(x)",
)


def check_difference(differing: StepDifference) -> Findings:
    for spot in first_spots(differing, "underflow"):
        measured, scale = spot.compared.measured, differing.b.scale
        if measured is None:
            continue
        if spot.flushed:
            what = f"underflows to zero for {error_text(measured.lost_share)} of its values"
        else:
            what = f"is {error_text(spot.compared.error)} off because its values have fewer bits"
        if spot.phase == "backward":
            unscaled = scale is None or scale == 1.0
            scaled = " and the loss is not scaled" if unscaled else f", at a loss scale of {scale_text(scale or 1.0)}"
            fix = (
                "Use a larger loss scale, as far as the largest gradients allow, or BF16. `ampwise.diff(fn, …, "
                f'b="{differing.b.precision},scale=65536")` and `b="bf16"` show the remaining error.'
            )
        else:
            scaled, fix = "", keep_fix(differing, spot, other=", or use BF16, which has FP32's range")
        yield RULE.at(
            spot.place,
            f"{spot.where} {what} in {side_title(differing.b)}: their typical magnitude is "
            f"{number_text(measured.rms)}{scaled}",
            evidence=spot.evidence() | {"lost_share": measured.lost_share},
            fix=fix,
        )
