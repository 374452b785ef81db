"""Proposal: multiply the loss by a fixed scale."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.numbers.formats import find_scalar_format
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import USUAL_FACTOR, PrecisionChoice
from ampwise.rules.evidence.number_text import number_text
from ampwise.rules.source.manual_loss_scale import RULE

__all__ = ["RULE", "check"]

START = 65536.0  # the initial scale of torch's GradScaler


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    fixed = choice.scaling is not None and choice.scaling.kind == "manual"
    if not (fixed or choice.proposes("manual-scale")):
        return
    factor = (choice.scaling.factor if fixed and choice.scaling else None) or USUAL_FACTOR
    yield advise_against(
        RULE,
        choice,
        _fact(choice, factor),
        costs={
            f"fixed factor of {factor:g}": "one overflow puts NaN into the weights; clipping needs a division first, "
            "which is easy to forget",
            "GradScaler": "four lines; a few of the first steps are skipped, later about one in 2000",
            "BF16, where supported": "no scale at all",
        },
        know=SuggestedCommand("ampwise run train.py", "the fraction of gradients lost in FP16 at their current scale"),
        do=_do(choice),
    )


def _do(choice: PrecisionChoice) -> str:
    if choice.half == "bf16":
        return "Drop the scale: neither BF16 nor FP32 needs one; a GradScaler is for FP16."
    if choice.half is None and choice.target.known:
        return "Drop the scale: FP32 needs none."
    return "In FP16 use torch.amp.GradScaler or ampwise.GradScaler; FP32 needs no scale."


def _fact(choice: PrecisionChoice, factor: float) -> str:
    if choice.want == "bf16":
        return (
            f"BF16 has the range of FP32: multiplying the loss by {factor:g} gains nothing, and nothing divides it "
            "out again"
        )
    fp16 = find_scalar_format("fp16")
    assert fp16.flush_exponent is not None
    flushed = math.ldexp(1.0, fp16.flush_exponent)
    return (
        f"a fixed factor of {factor:g} does not adapt: gradients above "
        f"{number_text(fp16.max / factor)} become inf and are "
        f"applied, and gradients below {flushed / factor:.1e} become zero (a GradScaler starts at {START:.0f}: "
        f"{flushed / START:.1e})"
    )
