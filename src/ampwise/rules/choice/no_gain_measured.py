"""Proposal: use 16-bit precision although a measurement showed no speedup."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against, caution
from ampwise.rules.evidence.choice.choice import HALVES, PrecisionChoice
from ampwise.rules.evidence.speed_verdict import SpeedVerdict, verdict_of

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP723",
    name="no-gain-measured",
    severity=Severity.INFO,
    summary="16-bit is requested, but a whole step was measured to be less than 1.1x faster with it.",
    why=(
        "A speedup below 1.1x is within run-to-run variation, and the price is rounding to 8 or 11 bits and, in FP16, "
        "a loss scale. A low ratio has a cause that can often be fixed: a small batch, misaligned sizes, waiting for "
        "data, TF32 that was already on."
    ),
    fix="Stay in FP32 until the cause is found and fixed; 16-bit may still be worth it to save activation memory.",
    bad='engine = ampwise.Engine(model, optimizer, "bf16")  # only 1.05x faster',
    good="$ ampwise compare train:make    # says why the ratio is low",
)


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.measured is None or choice.want not in HALVES or verdict_of(choice.measured) is not SpeedVerdict.STAY:
        return
    fact = f"the measured {choice.measured:.2f}x over FP32 is no gain"
    costs = {
        choice.want.upper(): "rounding, casts" + (", a loss scale" if choice.want == "fp16" else ""),
        "FP32": "nothing",
    }
    know = SuggestedCommand(
        f"ampwise compare {choice.subject}", "the cause: a small model, misaligned sizes, casts, waiting for data"
    )
    if choice.symptom == "memory":
        yield caution(RULE, choice, f"{fact}; what remains is the activation memory saved", costs=costs, know=know)
    else:
        yield advise_against(RULE, choice, fact, costs=costs, know=know, refuses=choice.want)
