from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.tune.diff.wording import first_spots, op_text, spot_text

if TYPE_CHECKING:
    from ampwise.tune.diff.step_difference import StepDifference

RULE = Rule(
    code="AMP538",
    name="one-side-does-otherwise",
    severity=Severity.WARNING,
    summary="An operation that cannot amplify errors gives different results on the two sides: this is not rounding.",
    why=(
        "A multiplication by a constant, a copy or a selection passes on the error of its input and rounds once. If "
        "the result is off by more, the code does something different on one side: another branch under autocast, a "
        "constant that depends on the format, a kernel bug, different indices."
    ),
    fix=(
        "Check the line for anything that depends on the precision, the device or the kernel. Usual ones: "
        "`torch.is_autocast_enabled()`, `x.dtype`, `torch.finfo(x.dtype)`, a computed index."
    ),
    bad="x = x * (1.25 if torch.is_autocast_enabled() else 1.0)",
    good="x = x * 1.25",
)


def check_difference(differing: StepDifference) -> Findings:
    for spot in first_spots(differing, "otherwise"):
        message = f"{spot.where} {spot_text(spot)}.{op_text(spot)}".rstrip(".")
        if spot.in_parts:
            fix = (
                "Its result depends on which rows are computed together: batch statistics, a mean over the batch, a "
                "capacity per expert, padding to the longest row. Evaluate with `model.eval()`, or compute it per row."
            )
            yield RULE.at(spot.place, message, fix=fix, evidence=spot.evidence())
        else:
            yield RULE.at(spot.place, message, evidence=spot.evidence())
