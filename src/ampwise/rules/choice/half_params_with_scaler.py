"""FP16 weights, proposed."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding
from ampwise.rules.source.half_params_with_scaler import RULE

__all__ = ["RULE", "check"]


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("half-weights") and choice.half != "bf16":
        yield no(
            RULE,
            choice,
            "FP16 weights lose each update below about 1/2048 of a weight, Adam's eps of 1e-8 is zero in FP16, and a "
            "GradScaler refuses them: Attempting to unscale FP16 gradients",
            costs={
                "model.half()": "weights that stop moving, or NaN after one step of Adam; weights and gradients halved",
                "autocast over FP32 weights": "4 bytes a weight; the products run as fast",
            },
            know=ToKnow("ampwise check train.py", "whether a model in half meets a scaler or Adam (AMP304, AMP305)"),
            do=None if choice.half == "fp16" else "Leave the model in FP32; autocast casts what it needs.",
        )
