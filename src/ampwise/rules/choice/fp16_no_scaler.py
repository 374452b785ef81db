"""FP16 without a loss scale, proposed."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding
from ampwise.rules.source.fp16_no_scaler import RULE

__all__ = ["RULE", "check"]

SCALE = "In FP16 scale the loss with `torch.amp.GradScaler`."


def check(choice: Choice) -> Iterator[Finding]:
    unscaled = choice.scaling is not None and choice.scaling.kind == "none" and choice.half == "fp16"
    if not unscaled and not (choice.proposes("no-scaler") and choice.want != "bf16"):
        return
    yield no(
        RULE,
        choice,
        "FP16 rounds what is at or below 2⁻²⁵ (3e-8) to zero, and many gradients are: layers stop learning while "
        "the loss looks reasonable",
        costs={
            "FP16 without a scaler": "no error and no NaN: only learning that stops, layer by layer",
            "FP16 with one": "four lines, and a few skipped steps at the start",
            "BF16": "no scaler, 8 significant bits instead of 11"
            + ("; emulated on this device" if choice.target.emulates_bf16 else ""),
        },
        know=ToKnow("ampwise run train.py", "the share of gradients that FP16 loses, layer by layer"),
        do=SCALE if choice.target.has("bf16") is False or choice.stays_wide else None,
    )
