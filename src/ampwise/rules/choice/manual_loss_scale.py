"""A loss scale by hand, proposed."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import USUAL_FACTOR, Choice
from ampwise.evidence.wording import number
from ampwise.finding import Finding
from ampwise.formats import find_scalar_format
from ampwise.rules.source.manual_loss_scale import RULE

__all__ = ["RULE", "check"]

START = 65536.0  # of torch's GradScaler


def check(choice: Choice) -> Iterator[Finding]:
    by_hand = choice.scaling is not None and choice.scaling.kind == "manual"
    if not (by_hand or choice.proposes("manual-scale")):
        return
    factor = (choice.scaling.factor if by_hand and choice.scaling else None) or USUAL_FACTOR
    yield no(
        RULE,
        choice,
        _fact(choice, factor),
        costs={
            f"times {factor:g} by hand": "one overflow puts NaN into the weights; clipping needs a division first, "
            "which is easily forgotten",
            "GradScaler": "four lines; a few of the first steps are skipped, later about one in 2000",
            "BF16, where there are units": "no scale at all",
        },
        know=ToKnow("ampwise run train.py", "what share of the gradients FP16 loses at the scale they have"),
        do=_do(choice),
    )


def _do(choice: Choice) -> str:
    if choice.half == "bf16":
        return "Leave the scale out: BF16 needs none, nor does FP32; a GradScaler is for FP16."
    if choice.half is None and choice.target.known:
        return "Leave the scale out: FP32 needs none."
    return "In FP16 use torch.amp.GradScaler or ampwise.GradScaler; FP32 needs no scale."


def _fact(choice: Choice, factor: float) -> str:
    if choice.want == "bf16":
        return f"BF16 has the range of FP32: a loss times {factor:g} rescues nothing, and no one divides it out"
    fp16 = find_scalar_format("fp16")
    assert fp16.flush_exponent is not None
    flushed = math.ldexp(1.0, fp16.flush_exponent)
    return (
        f"a loss times {factor:g} looks after nothing: gradients above {number(fp16.max / factor)} become inf and are "
        f"applied, those below {flushed / factor:.1e} become zero (a GradScaler starts at {START:.0f}: "
        f"{flushed / START:.1e}), and it never changes"
    )
