"""Proposal: treat zero gradients as underflow."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP720",
    name="zeros-taken-for-underflow",
    severity=Severity.INFO,
    summary="Zero gradients are mistaken for underflow.",
    why=(
        "Zeros are normal: a healthy FP32 run had 65% of them, and 98.7% in embedding rows. They come from tokens "
        "that are not in the batch, units switched off by ReLU, and masks. What matters is the fraction of values "
        "that are nonzero at higher precision but lost in FP16 at the current scale, and whether it grows."
    ),
    fix="Look at what FP16 loses at the current scale, per layer and over time.",
    bad="zeros = sum((p.grad == 0).sum() for p in model.parameters())  # above 5%: alarm",
    good='lost = ampwise.census(gradients).total().flushed("fp16", 16)',
)


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("zeros-mean-underflow"):
        yield advise_against(
            RULE,
            choice,
            "zero gradients are normal (65% in a healthy FP32 run, 98.7% in embedding rows): what matters is what "
            "FP16 loses at the current scale, and its trend",
            costs={
                "an alarm on zeros": "false alarms on every model with an embedding or ReLU",
                "the fraction that is lost": "one pass over the gradients",
            },
            know=SuggestedCommand(
                "ampwise run train.py", "the fraction lost per layer, and whether it rises (AMP601, AMP602)"
            ),
        )
