"""A gain that is taken for granted."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP713",
    name="gain-not-measured",
    severity=Severity.INFO,
    summary="Mixed precision is assumed to be faster, and nobody has measured it.",
    why=(
        "What it gains goes from nothing (small models, loaders that are waited for, sizes that are off, "
        "convolutions that had TF32 already) to six times and more. A whole step, forward, backward, clip and "
        "optimizer, taken a few dozen times in turns tells which, in minutes."
    ),
    fix="Measure whole steps: below 1.1 stay in FP32, to 1.5 it is optional, above use it.",
    bad="# it is faster anyway, no time to look",
    good="$ ampwise compare train:make --precisions fp32,bf16",
)


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("always-helps", "skip-measuring"):
        half = choice.half or "bf16"
        yield no(
            RULE,
            choice,
            f"it does not always help{_expected(choice, half)}: small models, waiting for data and sizes that are "
            "off gain nothing, and five minutes tell",
            costs={
                "assuming": "code to look after for weeks, for a gain that may be none",
                "measuring": "five minutes",
            },
            know=ToKnow(
                f"ampwise compare {choice.subject} --precisions fp32,{half}", "the ratio, and the reason when it is low"
            ),
        )


def _expected(choice: Choice, half: str) -> str:
    gain = choice.gain(half)
    return "" if gain is None else f" ({gain.text} to be expected here, derived)"
