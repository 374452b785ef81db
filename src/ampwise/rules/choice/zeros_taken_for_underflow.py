"""Zero gradients that are taken for lost ones."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP720",
    name="zeros-taken-for-underflow",
    severity=Severity.INFO,
    summary="A share of zero gradients is taken for underflow.",
    why=(
        "Zeros are ordinary: a healthy run in FP32 had 65% of them, embedding rows 98.7%, for tokens that a batch "
        "does not have, units that ReLU switches off, masks. What counts is the share that is not zero in wider "
        "arithmetic and lost in FP16 at the present scale, and whether it grows."
    ),
    fix="Look at what FP16 loses at the present scale, by layer and over time.",
    bad="zeros = sum((p.grad == 0).sum() for p in model.parameters())  # above 5%: alarm",
    good='lost = ampwise.census(gradients).total().flushed("fp16", 16)',
)


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("zeros-mean-underflow"):
        yield no(
            RULE,
            choice,
            "zero gradients are ordinary (65% in a healthy FP32 run, 98.7% in embedding rows): what counts is what "
            "FP16 loses at the present scale, and its trend",
            costs={
                "an alarm on zeros": "false alarms on every model with an embedding or ReLU",
                "the share that is lost": "one read of the gradients",
            },
            know=ToKnow("ampwise run train.py", "the share lost, by layer, and whether it rises (AMP601, AMP602)"),
        )
