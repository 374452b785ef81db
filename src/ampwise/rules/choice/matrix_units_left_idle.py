"""Proposal: train in FP32 on a device with 16-bit tensor cores."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against, caution
from ampwise.rules.evidence.choice.choice import HALVES, PrecisionChoice

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP711",
    name="matrix-units-left-idle",
    severity=Severity.INFO,
    summary="FP32 is requested on a device whose tensor cores run 16-bit formats many times faster.",
    why=(
        "FP32 matmuls run on the regular cores, at a fraction of the tensor cores' rate. Where 16-bit precision is "
        "enough, it takes a few lines: autocast, plus a GradScaler for FP16. Where it is not, TF32 takes one line and "
        "keeps the range of FP32."
    ),
    fix="Measure 16-bit and TF32 against FP32 before ruling them out.",
    bad='engine = ampwise.Engine(model, optimizer, "fp32")',
    good='engine = ampwise.Engine(model, optimizer, "auto")',
)


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    half = choice.target.half
    know = SuggestedCommand(
        f"ampwise compare {choice.subject}", "whole-step times in every precision that the device supports"
    )
    if choice.proposes("too-complex") and (half is not None or not choice.target.known):
        yield advise_against(
            RULE,
            choice,
            "mixed precision is one `with` block, plus four lines for the GradScaler in FP16; Engine(model, "
            "optimizer) is the whole step",
            costs=_costs(choice, half),
            know=know,
            do="Paste the code below; `ampwise check` then checks your version of it.",
        )
    elif choice.want == "fp32" and half is not None and choice.model.small is False:
        gain = choice.gain(half)
        faster = "" if gain is None else f": {gain.text} over {gain.over.upper()} is possible (derived)"
        yield caution(
            RULE,
            choice,
            f"FP32 leaves the {half.upper()} tensor cores idle{faster}",
            costs=_costs(choice, half),
            know=know,
        )


def _costs(choice: PrecisionChoice, half: str | None) -> dict[str, str]:
    costs = {"FP32": "the speed of the tensor cores"}
    if choice.target.tf32_gains:
        costs["TF32"] = "one line, FP32's range, 10 mantissa bits"
    for fmt in HALVES if half is None else (half,):
        costs[fmt.upper()] = (
            "a `with` block, 8 significant bits" if fmt == "bf16" else "a `with` block and a GradScaler"
        )
    return costs
