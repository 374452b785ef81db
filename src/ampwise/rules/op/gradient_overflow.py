"""A gradient beyond what FP16 holds."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.incident import Birth, Incident
from ampwise.evidence.incident_words import because, derivative, how_far, title
from ampwise.evidence.telling_incident import told
from ampwise.evidence.wording import scale_text
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP911",
    name="gradient-overflow",
    severity=Severity.ERROR,
    summary="A gradient overflows its format in the backward pass, and lowering the loss scale has not helped.",
    why=(
        "Gradients in FP16 end at 65504, loss scale included. A scaler that overflows now and then, skips and halves "
        "its scale is at work as it should be, and is not reported. This is: gradients that are too large at a scale "
        "of 1 as well, or at each scale that the scaler has come to. Mostly it is a sum where a mean is meant, a "
        "loss multiplied by a large factor, or a steep function (a division by a small number, a power)."
    ),
    fix=(
        "Make the loss a mean, and take large factors out of it; train in BF16, which needs no loss scale; or keep the "
        "module in FP32."
    ),
    bad='loss = 1000 * F.mse_loss(output, target, reduction="sum")',
    good="loss = F.mse_loss(output, target)",
)


def check(incident: Incident) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield told(RULE, incident, _what(incident, incident.birth), advice=_advice(incident))


def _what(incident: Incident, birth: Birth) -> str:
    at = f"overflows in {title(birth.dtype)} {_at_scale(incident)}"
    return f"{derivative(birth)} {at}{because(how_far(birth))}{_fitting(incident)}"


def _at_scale(incident: Incident) -> str:
    """A replay has a scale of 1, and so have the numbers that it has shown."""
    if incident.fitting_scale is not None:
        return f"at a loss scale of {scale_text(incident.scale)}"
    was = f" (it was {scale_text(incident.scale)})" if incident.scale != 1 else ""
    return f"even at a loss scale of 1{was}"


def _fitting(incident: Incident) -> str:
    fits = incident.fitting_scale
    if fits is None or fits >= incident.scale:
        return ""
    if fits < 1:
        return f"; not even a scale of 1 would do, it would take {scale_text(fits)}"
    return f"; it would fit at a scale of {scale_text(fits)}"


def _advice(incident: Incident) -> str:
    fits = incident.fitting_scale
    if fits is None or not 1 <= fits < incident.scale:
        return ""
    engine = f'ampwise.Engine(model, optimizer, scaling={{"init_scale": {scale_text(fits)}}})'
    return f"Begin at a loss scale that fits: `{engine}`. {RULE.fix}"
