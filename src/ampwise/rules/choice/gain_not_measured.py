"""Proposal: assume a speedup without measuring it."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP713",
    name="gain-not-measured",
    severity=Severity.INFO,
    summary="Mixed precision is assumed to be faster, but it was not measured.",
    why=(
        "The speedup ranges from none (small models, slow data loaders, misaligned sizes, convolutions that already "
        "used TF32) to 6x and more. Timing a few dozen whole steps of each precision in turn (forward, backward, "
        "clipping and optimizer) tells which, in minutes."
    ),
    fix="Measure whole steps: below 1.1x stay in FP32, up to 1.5x it is optional, above that use it.",
    bad="# it is faster anyway, no time to measure",
    good="$ ampwise compare train:make --precisions fp32,bf16",
)


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("always-helps", "skip-measuring"):
        half = choice.half or "bf16"
        yield advise_against(
            RULE,
            choice,
            f"it does not always help{_expected(choice, half)}: small models, slow data loaders and misaligned sizes "
            "gain nothing, and measuring takes five minutes",
            costs={
                "assuming": "code to maintain, for a speedup that may not exist",
                "measuring": "five minutes",
            },
            know=SuggestedCommand(
                f"ampwise compare {choice.subject} --precisions fp32,{half}",
                "the speedup, and the reason when it is low",
            ),
        )


def _expected(choice: PrecisionChoice, half: str) -> str:
    gain = choice.gain(half)
    return "" if gain is None else f" ({gain.text} expected here, derived)"
