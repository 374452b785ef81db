"""16 bits where somebody has measured that they gain nothing."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, careful, no
from ampwise.evidence.choice.choice import HALVES, Choice
from ampwise.evidence.speed_verdict import Verdict, verdict_of
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP723",
    name="no-gain-measured",
    severity=Severity.INFO,
    summary="16 bits are wanted, and a whole step was measured to be less than 1.1 times as fast with them.",
    why=(
        "Below 1.1 the gain is within what runs differ by, and the price is rounding to 8 or 11 bits, and in FP16 a "
        "loss scale. There is a reason for a low ratio, and often it can be mended: a small batch, sizes that are "
        "off, waiting for data, TF32 that was on before."
    ),
    fix="Stay in FP32 until the reason is found and mended; 16 bits may still be worth it for activations' memory.",
    bad='engine = ampwise.Engine(model, optimizer, "bf16")  # 1.05 times as fast',
    good="$ ampwise compare train:make    # says why the ratio is low",
)


def check(choice: Choice) -> Iterator[Finding]:
    if choice.measured is None or choice.want not in HALVES or verdict_of(choice.measured) is not Verdict.STAY:
        return
    fact = f"{choice.measured:.2f} times the speed of FP32, as you measured it, is no gain"
    costs = {
        choice.want.upper(): "rounding, casts" + (", a loss scale" if choice.want == "fp16" else ""),
        "FP32": "nothing",
    }
    know = ToKnow(f"ampwise compare {choice.subject}", "the reason: too small, off sizes, casts, waiting for data")
    if choice.symptom == "memory":
        yield careful(RULE, choice, f"{fact}; what is left is the memory of activations", costs=costs, know=know)
    else:
        yield no(RULE, choice, fact, costs=costs, know=know, refuses=choice.want)
