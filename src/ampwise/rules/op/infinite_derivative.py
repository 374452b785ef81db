"""A derivative that is infinite where it is taken."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.incident import Birth, Incident
from ampwise.evidence.incident_words import derivative, made_of
from ampwise.evidence.telling_incident import told
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP910",
    name="infinite-derivative",
    severity=Severity.ERROR,
    summary="The forward pass is finite, and a derivative is infinite where it is taken.",
    why=(
        "sqrt(0) is 0, and its slope there is infinite; so it is with norms of zero vectors, powers below 1 at 0, "
        "log at 0, acos and asin at 1 and -1. Times a gradient of 0 it becomes NaN, which is how `torch.where` fails: "
        "it passes a gradient of 0 to the branch not taken, and 0 · inf is NaN. A loss that is finite says nothing "
        "about this, and no loss scale helps."
    ),
    fix=(
        "Keep what goes in away from the point: add or clamp *inside* of the function (`(x.float() + 1e-6).sqrt()`; in "
        "FP16 1e-12 is 0), and choose with `torch.where` before the function as well as after it."
    ),
    bad="length = torch.where(x > 0, x.sqrt(), 0.0)",
    good="safe = torch.where(x > 0, x, 1.0)\nlength = torch.where(x > 0, safe.sqrt(), 0.0)",
)


def check(incident: Incident) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield told(RULE, incident, _what(incident.birth))


def _what(birth: Birth) -> str:
    forward = f"so was its result ({made_of(birth.hidden)}), which a later operation hides" if birth.hidden else ""
    finite = "though the forward pass is finite there"
    return f"{derivative(birth)} is {made_of(birth.made)}{f'; {forward}' if forward else f', {finite}'}"
