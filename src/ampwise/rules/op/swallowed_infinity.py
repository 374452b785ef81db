"""An infinity that ended as a finite, wrong value."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.incident import Birth, Incident
from ampwise.evidence.incident_words import because, how_far, made_of, operation, title
from ampwise.evidence.telling_incident import told
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP916",
    name="swallowed-infinity",
    severity=Severity.WARNING,
    summary="A result overflowed, and a later operation made a finite, wrong value of the infinity.",
    why=(
        "x/inf is 0, and so a variance that overflows in FP16 makes a normalised output of exactly 0; a sigmoid, a "
        "tanh, a softmax or a clamp makes 1, 0 or a limit of an infinity. The loss is finite, nothing is skipped, and "
        "the model learns from numbers that are wrong. Masks of -inf are meant to be swallowed, and are not reported."
    ),
    fix=(
        "Keep this module in FP32 (normalisations, sums of squares, means over many values above all), or train in "
        "BF16, which reaches 3.39e38."
    ),
    bad="scale = x.half().square().mean(-1, keepdim=True).rsqrt()  # inf above 256: a scale of 0",
    good="scale = x.float().square().mean(-1, keepdim=True).rsqrt()",
)


def check(incident: Incident) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield told(RULE, incident, _what(incident.birth))


def _what(birth: Birth) -> str:
    return (
        f"{operation(birth)} gives {made_of(birth.made)} in {title(birth.dtype)}{because(how_far(birth))}; later "
        "operations hide it, so that nothing was skipped"
    )
