from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity
from ampwise.tune.diff.wording import error_text, side_title

if TYPE_CHECKING:
    from ampwise.tune.diff.step_difference import StepDifference

RULE = Rule(
    code="AMP533",
    name="gradient-direction-lost",
    severity=Severity.WARNING,
    summary="A parameter's gradient points in a different direction on the two sides.",
    why=(
        "A gradient error that is spread evenly over the values averages out over the steps, like batch noise. An "
        "error that turns the gradient does not: the cosine of the angle says how much of a step still goes in the "
        "right direction. Below 0.9, a fifth of its squared length goes elsewhere. Tiny gradients are not counted: "
        "some are zero in exact arithmetic (the key bias in attention) and consist only of rounding error."
    ),
    fix=(
        "Start at the first reported location that rounding does not explain, and keep it in FP32. If rounding "
        "explains every location, the format is too narrow for this depth."
    ),
    bad="loss = ((x - target) * 1e-3).square().mean()  # in BF16: x and target have cancelled",
    good="loss = ((x.float() - target.float()) * 1e-3).square().mean()",
)

LEAST_COSINE = 0.9
LEAST_SHARE = 1e-3  # relative to the typical gradient
NAMED = 5
EVERYWHERE = (
    "No single location is responsible: many rounding errors add up. Try a wider format for the first or last "
    'layers, and check with `ampwise.diff(fn, …, b=Policy("bf16").keep("fp32", "…"))`.'
)


def check_difference(differing: StepDifference) -> Findings:
    turned = []
    for row in differing.parameters:
        cosine = None if row.compared.measured is None else row.compared.measured.cosine
        matters = row.share is None or row.share >= LEAST_SHARE
        beyond_noise = row.compared.error > 3 * (row.compared.floor or 0.0)
        if cosine is not None and cosine < LEAST_COSINE and matters and beyond_noise:
            turned.append((cosine, row))
    if not turned:
        return
    turned.sort(key=lambda pair: pair[0])
    (cosine, worst), first = turned[0], differing.first
    others = f" (and of {len(turned) - 1} more of {len(differing.parameters)})" if len(turned) > 1 else ""
    starts = "" if first is None else f"It starts at {first.where}: fix that first, then run `ampwise diff` again."
    yield RULE.at(
        Place(parameter=worst.name),
        f"the gradient of `{worst.name}`{others} has a cosine of {cosine:.2f} with the one in "
        f"{side_title(differing.a)}, and is {error_text(worst.compared.error)} off",
        evidence={
            "cosine": cosine,
            "relative_error": worst.compared.error,
            "parameters": len(turned),
            "of": len(differing.parameters),
            "worst": [row.name for _, row in turned[:NAMED]],
        },
        fix=starts or EVERYWHERE,
    )
