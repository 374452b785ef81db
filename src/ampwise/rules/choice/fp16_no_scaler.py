"""Proposal: train in FP16 without loss scaling."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.source.fp16_no_scaler import RULE

__all__ = ["RULE", "check"]

SCALE = "In FP16 scale the loss with `torch.amp.GradScaler`."


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    unscaled = choice.scaling is not None and choice.scaling.kind == "none" and choice.half == "fp16"
    if not unscaled and not (choice.proposes("no-scaler") and choice.want != "bf16"):
        return
    yield advise_against(
        RULE,
        choice,
        "FP16 rounds values of 2⁻²⁵ (3e-8) and below to zero, and many gradients are that small: layers stop learning "
        "while the loss still looks reasonable",
        costs={
            "FP16 without a scaler": "no error and no NaN, but learning stops layer by layer",
            "FP16 with a scaler": "four lines, and a few skipped steps at the start",
            "BF16": "no scaler, 8 significant bits instead of 11"
            + ("; emulated on this device" if choice.target.emulates_bf16 else ""),
        },
        know=SuggestedCommand("ampwise run train.py", "the fraction of gradients lost in FP16, per layer"),
        do=SCALE if choice.target.has("bf16") is False or choice.stays_wide else None,
    )
