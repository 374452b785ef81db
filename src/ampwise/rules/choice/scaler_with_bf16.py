"""Proposal: use a GradScaler with BF16."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.source.scaler_with_bf16 import RULE

__all__ = ["RULE", "check"]

FOR_FP16 = "Use the scaler for FP16 only; in BF16 it has nothing to do."


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    scaled = choice.scaling is not None and choice.scaling.kind == "dynamic" and choice.want == "bf16"
    if not scaled and not choice.proposes("scaler-with-bf16"):
        return
    yield advise_against(
        RULE,
        choice,
        "BF16 has the exponent range of FP32: nothing underflows that FP32 would keep, so loss scaling has no effect",
        costs={
            "BF16 with a GradScaler": "a pass over all gradients per step, state to save and restore, and a NaN that "
            "passes for one more skipped step",
            "BF16 without": "nothing; to guard against NaN, check the gradient norm, as the code below does",
        },
        know=SuggestedCommand(
            f"ampwise compare {choice.subject} --precisions fp32,bf16", "that the losses agree without a loss scale"
        ),
        do=FOR_FP16 if choice.half == "fp16" else None,
    )
