from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity
from ampwise.tune.diff.wording import error_text, side_title

if TYPE_CHECKING:
    from ampwise.tune.diff.step_difference import StepDifference

RULE = Rule(
    code="AMP537",
    name="rounding-piles-up",
    severity=Severity.WARNING,
    summary="Rounding explains every location, yet the errors accumulate to a large one.",
    why=(
        "Each layer adds its own rounding error to its input's error, and may amplify it slightly. Over many layers, "
        "or in a format with few bits, that can reach a third of the signal or more. Training tolerates this kind of "
        "noise well, because it differs from batch to batch, but not without limit."
    ),
    fix=(
        "Compare the losses over a few hundred steps before relying on this format. To reduce the error, run fewer "
        "parts in it: the first and last layers in BF16. Block formats (MXFP8) instead of one scale per tensor, or "
        "added normalisation, also help."
    ),
    bad='ampwise.diff(loss_fn, x, y, b="nvfp4")  # 40% off at the last layer',
    good='ampwise.diff(loss_fn, x, y, b="mxfp8")',
)


def check_difference(differing: StepDifference) -> Findings:
    if differing.piled_up is None:
        return
    phase, growth = differing.piled_up
    what = "what" if phase == "forward" else "the gradient of what"
    pace = "" if growth.factor is None else f" (growing {growth.factor:.2g}x from one module to the next)"
    yield RULE.at(
        Place(module=growth.largest_at),
        f"{what} `{growth.largest_at}` returns is {error_text(growth.largest)} off in {side_title(differing.b)}, after "
        f"{error_text(growth.first)} at the first of {growth.modules} modules{pace}; rounding explains each one by "
        "itself",
        evidence={"phase": phase, "largest": growth.largest, "first": growth.first, "modules": growth.modules},
    )
