"""Gradients of parameters that point elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.difference import Differing, ParameterRow
from ampwise.evidence.difference_words import error_text, title
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP533",
    name="gradient-direction-lost",
    severity=Severity.WARNING,
    summary="The gradient of a parameter points elsewhere than on the other side.",
    why=(
        "An error of a gradient that is spread evenly over its values is averaged out over the steps, as the noise of "
        "a batch is. One that turns the gradient is not: the cosine of the angle says how much of a step still goes "
        "where it should. Below 0.9 a fifth of its square goes elsewhere. Gradients that are tiny beside all others "
        "are not counted: some are zero in exact arithmetic (the bias of the keys in an attention), and rounding is "
        "all that they are."
    ),
    fix=(
        "Look at the first place that rounding does not explain, which is where it begins, and keep that in FP32; "
        "where every place is explained, the format is too narrow for this depth."
    ),
    bad="loss = ((x - target) * 1e-3).square().mean()  # in BF16: x and target have cancelled",
    good="loss = ((x.float() - target.float()) * 1e-3).square().mean()",
)

LEAST_COSINE = 0.9
LEAST_SHARE = 1e-3  # of the typical gradient
NAMED = 5


def check(differing: Differing) -> Iterator[Finding]:
    turned = sorted((row for row in differing.parameters if _is_turned(row)), key=_cosine)
    if not turned:
        return
    worst = turned[0]
    others = f" (and of {len(turned) - 1} more of {len(differing.parameters)})" if len(turned) > 1 else ""
    yield RULE.at(
        Place(parameter=worst.name),
        f"the gradient of `{worst.name}`{others} has a cosine of {_cosine(worst):.2f} with that of "
        f"{title(differing.a)}, and is {error_text(worst.compared.error)} off",
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


def _fix(differing: Differing) -> str:
    if differing.first is not None:
        return f"It begins at {differing.first.where}: mend that first, then run `ampwise diff` again."
    return (
        "No place is to blame: the error of many roundings adds up. Try a wider format for the first or the last "
        'layers, and see with `ampwise.diff(fn, …, b=Policy("bf16").keep("fp32", "…"))`.'
    )
