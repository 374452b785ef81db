"""A gradient that overflows FP16."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.failure import Failure, Origin
from ampwise.rules.evidence.failure_finding import failure_finding
from ampwise.rules.evidence.failure_text import derivative_text, format_title, overflow_text, reason_suffix
from ampwise.rules.evidence.number_text import scale_text

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP911",
    name="gradient-overflow",
    severity=Severity.ERROR,
    summary="A gradient overflows its format in the backward pass, and lowering the loss scale did not help.",
    why=(
        "FP16 gradients are limited to 65504, loss scale included. A scaler that occasionally overflows, skips and "
        "halves its scale works as intended, and is not reported. This is: gradients that are too large even at a "
        "scale of 1, or at every scale that the scaler tried. The usual cause is a sum that should be a mean, a loss "
        "multiplied by a large factor, or a steep function (a division by a small number, a power)."
    ),
    fix=(
        "Make the loss a mean and remove large factors from it; train in BF16, which needs no loss scale; or keep the "
        "module in FP32."
    ),
    bad='loss = 1000 * F.mse_loss(output, target, reduction="sum")',
    good="loss = F.mse_loss(output, target)",
)


def check(incident: Failure) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield failure_finding(RULE, incident, _what(incident, incident.birth), advice=_advice(incident))


def _what(incident: Failure, birth: Origin) -> str:
    at = f"overflows in {format_title(birth.dtype)} {_at_scale(incident)}"
    return f"{derivative_text(birth)} {at}{reason_suffix(overflow_text(birth))}{_fitting(incident)}"


def _at_scale(incident: Failure) -> str:
    """Return the scale at which it overflows; a replay runs at a scale of 1, so its numbers do too."""
    if incident.fitting_scale is not None:
        return f"at a loss scale of {scale_text(incident.scale)}"
    was = f" (it was {scale_text(incident.scale)})" if incident.scale != 1 else ""
    return f"even at a loss scale of 1{was}"


def _fitting(incident: Failure) -> str:
    fits = incident.fitting_scale
    if fits is None or fits >= incident.scale:
        return ""
    if fits < 1:
        return f"; even a scale of 1 is too high: it would need {scale_text(fits)}"
    return f"; it would fit at a scale of {scale_text(fits)}"


def _advice(incident: Failure) -> str:
    fits = incident.fitting_scale
    if fits is None or not 1 <= fits < incident.scale:
        return ""
    engine = f'ampwise.Engine(model, optimizer, scaling={{"init_scale": {scale_text(fits)}}})'
    return f"Start at a loss scale that fits: `{engine}`. {RULE.fix}"
