"""Errors that no place is to blame for, and that are large in the end."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.difference import FORWARD, Differing
from ampwise.evidence.difference_growth import Growth
from ampwise.evidence.difference_words import error_text, title
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP537",
    name="rounding-piles-up",
    severity=Severity.WARNING,
    summary="Every place is explained by rounding, and still the errors add up to a large one.",
    why=(
        "Each layer adds its own rounding to what it is given, and may amplify a little of it. Over many layers, or in "
        "a format of few bits, that is a third of the signal or more. Training tolerates noise of that kind better "
        "than one would think, as it differs from batch to batch, but not without a limit."
    ),
    fix=(
        "Compare the losses over some hundred steps before relying on this format. What helps: fewer parts in it (the "
        "first and last layers in BF16), block formats (MXFP8) instead of one scale for a tensor, normalised layers."
    ),
    bad='ampwise.diff(loss_fn, x, y, b="nvfp4")  # 40% off at the last layer',
    good='ampwise.diff(loss_fn, x, y, b="mxfp8")',
)


def check(differing: Differing) -> Iterator[Finding]:
    if differing.piled_up is not None:
        phase, growth = differing.piled_up
        yield _found(differing, growth, phase)


def _found(differing: Differing, growth: Growth, phase: str) -> Finding:
    what = "what" if phase == FORWARD else "the gradient by what"
    pace = "" if growth.factor is None else f" (times {growth.factor:.2g} from one module to the next)"
    return RULE.at(
        Place(module=growth.largest_at),
        f"{what} `{growth.largest_at}` returns is {error_text(growth.largest)} off in {title(differing.b)}, after "
        f"{error_text(growth.first)} at the first of {growth.modules} modules{pace}; each by itself is explained",
        evidence={"phase": phase, "largest": growth.largest, "first": growth.first, "modules": growth.modules},
    )
