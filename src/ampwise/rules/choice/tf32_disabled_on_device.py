"""TF32 taken for granted."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding
from ampwise.rules.hardware.tf32_disabled_on_device import RULE

__all__ = ["RULE", "check"]


def check(choice: Choice) -> Iterator[Finding]:
    if not choice.proposes("tf32-is-on"):
        return
    target = choice.target
    ratio = target.ratio("tf32", "fp32")
    faster = "" if ratio is None else f"{ratio.show(digits=1)}× the FP32 peak, for products that stay in FP32"
    yield no(
        RULE,
        choice,
        "TF32 is on by default for cuDNN's convolutions, and off for matrix products: a transformer gets none of it",
        costs={
            "the default": "full FP32 products on ordinary cores",
            'set_float32_matmul_precision("high")': f"10 mantissa bits instead of 23; {faster}"
            if faster
            else "10 mantissa bits instead of 23",
        },
        know=ToKnow("ampwise gpu", "what the switches are set to, and what the device has"),
        do=None if target.has("tf32") is not False else f"{target.title} has no TF32 units: nothing to switch.",
    )
