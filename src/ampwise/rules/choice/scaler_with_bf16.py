"""A GradScaler for BF16, proposed."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding
from ampwise.rules.source.scaler_with_bf16 import RULE

__all__ = ["RULE", "check"]

FOR_FP16 = "Leave the scaler to FP16, which needs it; in BF16 there is nothing for it to do."


def check(choice: Choice) -> Iterator[Finding]:
    scaled = choice.scaling is not None and choice.scaling.kind == "dynamic" and choice.want == "bf16"
    if not scaled and not choice.proposes("scaler-with-bf16"):
        return
    yield no(
        RULE,
        choice,
        "BF16 has the exponents of FP32: nothing underflows that FP32 would keep, so a loss scale has nothing to "
        "rescue",
        costs={
            "BF16 with a GradScaler": "a pass over all gradients each step, a state to save and restore, and a NaN "
            "that passes for one more skipped step",
            "BF16 without": "nothing; a guard against NaN is a check of the norm, which the code below has",
        },
        know=ToKnow(
            f"ampwise compare {choice.subject} --precisions fp32,bf16", "that the losses agree without a scale"
        ),
        do=FOR_FP16 if choice.half == "fp16" else None,
    )
