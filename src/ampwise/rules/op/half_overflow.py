"""A result that FP32 holds and FP16 does not."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.incident import Birth, Incident
from ampwise.evidence.incident_words import because, how_far, made_of, operation, title
from ampwise.evidence.telling_incident import told
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP904",
    name="half-overflow",
    severity=Severity.ERROR,
    summary="A result of the forward pass is beyond what FP16 holds; FP32 and BF16 hold it.",
    why=(
        "FP16 ends at 65504: what is larger becomes inf, and a subtraction, a softmax or a normalisation makes NaN of "
        "it later, often far from here. The loss scale has no part in it, since it multiplies the loss and not the "
        "activations. BF16 reaches 3.39e38, as FP32 does, with 8 bits of precision instead of 11."
    ),
    fix=(
        "Train in BF16 where the hardware has it. Else keep this module, or this line, in FP32; or make what goes in "
        "smaller: normalise before it, divide before a product and not after."
    ),
    bad='with torch.autocast("cuda", torch.float16):\n    scores = q @ k.transpose(-2, -1) / math.sqrt(d)',
    good='with torch.autocast("cuda", torch.float16):\n    scores = (q / math.sqrt(d)) @ k.transpose(-2, -1)',
)


def check(incident: Incident) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield told(RULE, incident, _what(incident.birth))


def _what(birth: Birth) -> str:
    does = "overflows" if birth.made == "inf" else f"gives {made_of(birth.made)}"
    return f"{operation(birth)} {does} in {title(birth.dtype)}{because(how_far(birth))}"
