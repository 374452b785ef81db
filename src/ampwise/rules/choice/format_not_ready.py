"""Proposal: train in a block format that torch supports only in prototypes."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP722",
    name="format-not-ready",
    severity=Severity.INFO,
    summary="A 4-bit or 8-bit format is requested for which torch has only training prototypes on this device.",
    why=(
        "MXFP8, MXFP4 and NVFP4 share a scale among 16 or 32 values. Hardware supports them, but training in them "
        "depends on libraries that change every month and on recipes that are still being worked out. BF16 is the "
        "baseline they are measured against."
    ),
    fix="Train in BF16; emulate the format, on any device, to see whether the model can learn in it.",
    bad='engine = ampwise.Engine(model, optimizer, "nvfp4")',
    good='engine = ampwise.Engine(model, optimizer, "emulate:nvfp4")',
)
BLOCKS = ("mxfp8", "mxfp4", "nvfp4")


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    want, target = choice.want, choice.target
    prototype = want in BLOCKS or (want == "fp8" and target.kind not in ("cuda", None))
    if want is not None and prototype and target.has(want) is not False:
        yield advise_against(
            RULE,
            choice,
            f"training in {want.upper()} on {target.name} is only a prototype in torch's libraries, or needs the "
            "vendor's own",
            costs={want.upper(): "weeks of experiments", "BF16": "none"},
            know=SuggestedCommand(
                "ampwise formats " + want, "the range and precision of the format, next to the others"
            ),
            refuses=want,
        )
