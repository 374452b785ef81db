"""Proposal: assume that TF32 is on."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.hardware.tf32_disabled_on_device import RULE

__all__ = ["RULE", "check"]


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if not choice.proposes("tf32-is-on"):
        return
    target = choice.target
    ratio = target.ratio("tf32", "fp32")
    faster = "" if ratio is None else f"{ratio.show(digits=1)}× the FP32 peak, for matmuls that stay in FP32"
    yield advise_against(
        RULE,
        choice,
        "TF32 is on by default for cuDNN convolutions but off for matmuls: a transformer does not benefit from it",
        costs={
            "the default": "full FP32 matmuls on the regular cores",
            'set_float32_matmul_precision("high")': f"10 mantissa bits instead of 23; {faster}"
            if faster
            else "10 mantissa bits instead of 23",
        },
        know=SuggestedCommand("ampwise gpu", "the current settings, and what the device supports"),
        do=None
        if target.has("tf32") is not False
        else f"{target.title} has no TF32 tensor cores: nothing to switch on.",
    )
