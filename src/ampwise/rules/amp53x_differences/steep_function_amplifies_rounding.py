from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.numbers.op_families import base_name
from ampwise.tune.diff.wording import first_spots, keep_fix, side_title, spot_text

if TYPE_CHECKING:
    from ampwise.tune.diff.step_difference import StepDifference

RULE = Rule(
    code="AMP535",
    name="steep-function-amplifies-rounding",
    severity=Severity.WARNING,
    summary="A function turns a small relative error in its input into a large one.",
    why=(
        "exp and softmax turn an absolute error into a relative one: logits of 100 with an error of 0.4%, typical for "
        "BF16, are off by 0.4, and exp(0.4) is 1.5. Dividing by something near zero, normalising values that hardly "
        "differ, a power, or an ill-conditioned layer has the same effect."
    ),
    fix=(
        "Compute its inputs in FP32 too: the error is already there. Or make it less steep: smaller logits (a larger "
        "temperature, normalised queries and keys), an epsilon. `ampwise.diff` shows the remaining error."
    ),
    bad="weights = torch.softmax(logits / 0.01, -1)  # logits in BF16",
    good="weights = torch.softmax(logits.float() / 0.01, -1)  # and compute the logits in FP32",
)


def check_difference(differing: StepDifference) -> Findings:
    for spot in first_spots(differing, "steep"):
        by = "" if spot.op is None else f" ({base_name(spot.op.op)})"
        yield RULE.at(
            spot.place,
            f"{spot.where}{by} {spot_text(spot)}",
            evidence=spot.evidence(),
            fix=f"{keep_fix(differing, spot, 'the code that computes its inputs')} If the error remains, it is not "
            f"rounding: the code does something different in {side_title(differing.b)}.",
        )
