"""A choice that falls otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ampwise.evidence.difference import Differing, Spot
from ampwise.evidence.difference_words import keep_fix, proof, spot_text, title
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP536",
    name="discrete-choice-flips",
    severity=Severity.WARNING,
    summary="A choice falls otherwise on the two sides: an index, a mask, the size of a part, a module that runs.",
    why=(
        "A router that picks an expert, a top-k, an argmax, a threshold decide by comparing. Where two candidates are "
        "closer than a rounding, the choice flips, and what follows is not a little but altogether different: another "
        "expert, another token. Errors after that are no measure of the precision."
    ),
    fix=(
        "Compute what is compared in FP32, from its inputs on: a router is small, and models with experts keep it "
        "there. `ampwise.diff` shows what is left."
    ),
    bad="chosen = self.router(x).topk(2).indices  # under autocast",
    good="""policy = ampwise.Policy("bf16").keep("fp32", "*.router")""",
)

MOST = 5


def check(differing: Differing) -> Iterator[Finding]:
    for spot in islice(differing.caused_by("choice"), MOST):
        yield RULE.at(
            spot.place,
            f"{spot.where} {spot_text(spot)}, as {title(differing.b)} chooses otherwise than {title(differing.a)}",
            evidence={"phase": spot.phase},
            fix=_fix(differing, spot),
        )
    once = [row for row in differing.rows if row.only]
    if once and not any(differing.caused_by("choice")):
        yield RULE.at(
            Place(module=once[0].label),
            f"`{once[0].label}` runs in {once[0].only} alone (and {len(once) - 1} more such calls)"
            if len(once) > 1
            else f"`{once[0].label}` runs in {once[0].only} alone",
            evidence={"calls": len(once)},
        )


def _fix(differing: Differing, spot: Spot) -> str:
    return f"{keep_fix(differing, spot, 'what makes the values that are compared')}. {proof(differing, spot)}"
