"""Values that one side flushes to zero."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ampwise.evidence.compared import Measured
from ampwise.evidence.difference import BACKWARD, Differing, Spot
from ampwise.evidence.difference_words import error_text, evidence_of, keep_fix, proof, title
from ampwise.evidence.wording import number, scale_text
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP531",
    name="lost-in-narrow-format",
    severity=Severity.WARNING,
    summary="Values that one side holds are zero on the other, or have fewer bits: they lie below its range.",
    why=(
        "FP16 turns what is at most 2⁻²⁵ to zero, and keeps what is below 2⁻¹⁴ with fewer bits. FP32 and BF16 go down "
        "to 2⁻¹²⁶. What was flushed is gone for all that follows, without an infinity that anyone would notice. In the "
        "backward pass the loss scale lifts gradients above that; in the forward pass nothing does."
    ),
    fix=(
        "Scale the values up before the narrow format gets them, compute this part in FP32, or use BF16, which has "
        "FP32's range. For gradients: a larger loss scale. `ampwise.diff` shows what is left."
    ),
    bad="y = self.project(x * 1e-8) * 1e8  # under FP16's autocast",
    good="y = self.project(x)",
)

MOST = 5


def check(differing: Differing) -> Iterator[Finding]:
    for spot in islice(differing.caused_by("underflow"), MOST):
        measured = spot.compared.measured
        if measured is None:
            continue
        yield RULE.at(
            spot.place,
            f"{spot.where} {_what(spot, measured)} in {title(differing.b)}: their typical magnitude is "
            f"{number(measured.rms)}{_scaled(differing, spot)}",
            evidence=evidence_of(spot) | {"lost_share": measured.lost_share},
            fix=_fix(differing, spot),
        )


def _what(spot: Spot, measured: Measured) -> str:
    if spot.flushed:
        return f"loses {error_text(measured.lost_share)} of its values to zero"
    return f"is {error_text(spot.compared.error)} off, as its values have fewer bits"


def _scaled(differing: Differing, spot: Spot) -> str:
    scale = differing.b.scale
    if spot.phase != BACKWARD:
        return ""
    return " and the loss is not scaled" if scale in (None, 1.0) else f", at a loss scale of {scale_text(scale or 1.0)}"


def _fix(differing: Differing, spot: Spot) -> str:
    if spot.phase == BACKWARD:
        return (
            f"A larger loss scale, as far as the largest gradients allow, or BF16. `ampwise.diff(fn, …, "
            f'b="{differing.b.precision},scale=65536")` and `b="bf16"` show what is left.'
        )
    return f"{keep_fix(differing, spot)}, or use BF16, which has FP32's range. {proof(differing, spot)}"
