"""Proposal: keep the weights in FP16."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.source.half_params_with_scaler import RULE

__all__ = ["RULE", "check"]


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("half-weights") and choice.half != "bf16":
        yield advise_against(
            RULE,
            choice,
            "FP16 weights lose every update below about 1/2048 of the weight, Adam's eps of 1e-8 is zero in FP16, and "
            "a GradScaler rejects them: Attempting to unscale FP16 gradients",
            costs={
                "model.half()": "weights that stop changing, or NaN after one Adam step; half the memory for weights "
                "and gradients",
                "autocast over FP32 weights": "4 bytes per weight; the matmuls are just as fast",
            },
            know=SuggestedCommand(
                "ampwise check train.py", "whether an FP16 model is used with a scaler or Adam (AMP304, AMP305)"
            ),
            do=None if choice.half == "fp16" else "Leave the model in FP32; autocast casts what it needs.",
        )
