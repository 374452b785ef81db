"""Parameter gradients that point in a different direction."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.difference import ParameterRow, StepDifference
from ampwise.rules.evidence.difference_text import error_text, side_title

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP533",
    name="gradient-direction-lost",
    severity=Severity.WARNING,
    summary="A parameter's gradient points in a different direction on the two sides.",
    why=(
        "A gradient error that is spread evenly over the values averages out over the steps, like batch noise. An "
        "error that turns the gradient does not: the cosine of the angle says how much of a step still goes in the "
        "right direction. Below 0.9, a fifth of its squared length goes elsewhere. Gradients that are tiny compared "
        "to all others are not counted: some are zero in exact arithmetic (such as the key bias in attention) and "
        "consist only of rounding error."
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


def check(differing: StepDifference) -> Iterator[Finding]:
    turned = sorted((row for row in differing.parameters if _is_turned(row)), key=_cosine)
    if not turned:
        return
    worst = turned[0]
    others = f" (and of {len(turned) - 1} more of {len(differing.parameters)})" if len(turned) > 1 else ""
    yield RULE.at(
        Place(parameter=worst.name),
        f"the gradient of `{worst.name}`{others} has a cosine of {_cosine(worst):.2f} with the one in "
        f"{side_title(differing.a)}, and is {error_text(worst.compared.error)} off",
        evidence={
            "cosine": _cosine(worst),
            "relative_error": worst.compared.error,
            "parameters": len(turned),
            "of": len(differing.parameters),
            "worst": [row.name for row in turned[:NAMED]],
        },
        fix=_fix(differing),
    )


def _is_turned(row: ParameterRow) -> bool:
    floor = row.compared.floor or 0.0
    matters = row.share is None or row.share >= LEAST_SHARE
    return _cosine(row) < LEAST_COSINE and matters and row.compared.error > 3 * floor


def _cosine(row: ParameterRow) -> float:
    cosine = None if row.compared.measured is None else row.compared.measured.cosine
    return 1.0 if cosine is None else cosine


def _fix(differing: StepDifference) -> str:
    if differing.first is not None:
        return f"It starts at {differing.first.where}: fix that first, then run `ampwise diff` again."
    return (
        "No single location is responsible: many rounding errors add up. Try a wider format for the first or last "
        'layers, and check with `ampwise.diff(fn, …, b=Policy("bf16").keep("fp32", "…"))`.'
    )
