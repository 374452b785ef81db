"""A function that is steep where it is evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ampwise.evidence.difference import Differing, Spot
from ampwise.evidence.difference_words import evidence_of, keep_fix, proof, spot_text, title
from ampwise.evidence.op_families import base_name
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP535",
    name="steep-function-amplifies-rounding",
    severity=Severity.WARNING,
    summary="A function turns a small relative error of what it is given into a large one.",
    why=(
        "exp and softmax make a relative error of an absolute one: logits of 100 that are off by 0.4%, as BF16 leaves "
        "them, are off by 0.4, and exp(0.4) is half as much again. A division by something near zero, a normalisation "
        "of values that hardly differ, a power, an ill-conditioned layer do the same."
    ),
    fix=(
        "Compute what goes into it in FP32, too: the error is there before. Or make it less steep: smaller logits "
        "(a larger temperature, normalised queries and keys), an epsilon. `ampwise.diff` shows what is left."
    ),
    bad="weights = torch.softmax(logits / 0.01, -1)  # logits in BF16",
    good="weights = torch.softmax(logits.float() / 0.01, -1)  # and the product that makes them in FP32",
)

MOST = 5


def check(differing: Differing) -> Iterator[Finding]:
    for spot in islice(differing.caused_by("steep"), MOST):
        yield RULE.at(
            spot.place,
            f"{spot.where}{_by(spot)} {spot_text(spot)}",
            evidence=evidence_of(spot),
            fix=f"{keep_fix(differing, spot, 'what makes its inputs')}. {proof(differing, spot)} If it is still there, "
            f"this is no rounding: the code does something else in {title(differing.b)}.",
        )


def _by(spot: Spot) -> str:
    return "" if spot.op is None else f" ({base_name(spot.op.op)})"
