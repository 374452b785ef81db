"""Values that underflow on one side."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.difference import BACKWARD, ErrorLocation, StepDifference
from ampwise.rules.evidence.difference_text import diff_command, error_text, keep_fix, location_evidence, side_title
from ampwise.rules.evidence.number_text import number_text, scale_text
from ampwise.rules.evidence.tensor_difference import TensorDifference

__all__ = ["RULE", "check"]

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

MOST = 5


def check(differing: StepDifference) -> Iterator[Finding]:
    for spot in islice(differing.caused_by("underflow"), MOST):
        measured = spot.compared.measured
        if measured is None:
            continue
        yield RULE.at(
            spot.place,
            f"{spot.where} {_what(spot, measured)} in {side_title(differing.b)}: their typical magnitude is "
            f"{number_text(measured.rms)}{_scaled(differing, spot)}",
            evidence=location_evidence(spot) | {"lost_share": measured.lost_share},
            fix=_fix(differing, spot),
        )


def _what(spot: ErrorLocation, measured: TensorDifference) -> str:
    if spot.flushed:
        return f"underflows to zero for {error_text(measured.lost_share)} of its values"
    return f"is {error_text(spot.compared.error)} off because its values have fewer bits"


def _scaled(differing: StepDifference, spot: ErrorLocation) -> str:
    scale = differing.b.scale
    if spot.phase != BACKWARD:
        return ""
    return " and the loss is not scaled" if scale in (None, 1.0) else f", at a loss scale of {scale_text(scale or 1.0)}"


def _fix(differing: StepDifference, spot: ErrorLocation) -> str:
    if spot.phase == BACKWARD:
        return (
            "Use a larger loss scale, as far as the largest gradients allow, or BF16. `ampwise.diff(fn, …, "
            f'b="{differing.b.precision},scale=65536")` and `b="bf16"` show the remaining error.'
        )
    return f"{keep_fix(differing, spot)}, or use BF16, which has FP32's range. {diff_command(differing, spot)}"
