"""An exponential or a logarithm, written by hand, in a loss function."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.incident import Birth, Incident
from ampwise.evidence.incident_words import because, how_far, operation, outside, result_of, title
from ampwise.evidence.telling_incident import told
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP918",
    name="unstable-loss",
    severity=Severity.ERROR,
    summary="A loss written by hand takes exp of a large number, or log of zero.",
    why=(
        "exp leaves FP16 at 11.1 and FP32 at 88.7, and a probability that was rounded to 0 has the logarithm -inf. The "
        "loss as a whole is harmless: the exponential and the logarithm cancel, if they are taken together. torch's "
        "own functions do that, and autocast runs them in FP32; code written by hand gets neither."
    ),
    fix=(
        "Use the function that takes both together, on the logits and not on probabilities: F.cross_entropy, "
        "F.binary_cross_entropy_with_logits, log_softmax, logsumexp, logsigmoid, F.softplus."
    ),
    bad="loss = -torch.log(torch.softmax(logits, -1)[rows, labels] + 1e-8).mean()",
    good="loss = F.cross_entropy(logits, labels)",
)


def check(incident: Incident) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.birth is not None:
        yield told(RULE, incident, _what(incident.birth))


def _what(birth: Birth) -> str:
    if birth.name.endswith("ctc_loss"):
        return (
            f"{operation(birth)} gives {result_of(birth)}: a target is longer than its input (repeats need one more), "
            "so that no alignment has a probability above 0; leave it out, or `zero_infinity=True`"
        )
    gives = f"in the loss, {operation(birth)} gives {result_of(birth)} in {title(birth.dtype)}"
    return f"{gives}{because(outside(birth) if birth.outside_domain else how_far(birth))}"
