"""BF16 asked for where it is emulated."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding
from ampwise.rules.hardware.bf16_without_matrix_units import RULE

__all__ = ["RULE", "check"]

# By whether there are units for FP16.
INSTEAD = {
    True: None,
    False: "Train in FP32: there are no matrix units for FP16 either.",
    None: "Train in FP16 with a GradScaler if it has units for that (T4, RTX 20), in FP32 if it has none (GTX 16).",
}


def check(choice: Choice) -> Iterator[Finding]:
    target = choice.target
    if choice.want != "bf16" or not target.emulates_bf16:
        return
    costs = {"BF16 here": "emulated products: no faster than FP32, as a rule slower, and the memory of 16 bits"}
    ratio = target.ratio("fp16", "fp32")
    if target.has("fp16"):
        peak = "" if ratio is None else f"; products at up to {ratio.show(digits=0)}× the FP32 peak"
        costs["FP16"] = f"a GradScaler, and the few steps it skips while it finds its scale{peak}"
    costs["FP32"] = "nothing to look after, and nothing gained"
    yield no(
        RULE,
        choice,
        f"{target.title} has no BF16 matrix units: torch emulates BF16 there, and says that it is supported",
        costs=costs,
        know=ToKnow(
            f"ampwise compare {choice.subject} --precisions fp32,fp16,bf16", "how BF16 fares on that very device"
        ),
        do=INSTEAD[target.has("fp16")],
        refuses="bf16",
    )
