"""A block format that torch trains in through prototypes only."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP722",
    name="format-not-ready",
    severity=Severity.INFO,
    summary="A format of 4 or 8 bits is wanted, for which torch has prototypes of training only, on this device.",
    why=(
        "MXFP8, MXFP4 and NVFP4 share a scale among 16 or 32 values. Devices multiply them; training in them is a "
        "matter of libraries, which change from month to month, and of recipes that are still being found. BF16 is "
        "what they are measured against."
    ),
    fix="Train in BF16; emulate the format, on any device, to see whether the model would learn in it.",
    bad='engine = ampwise.Engine(model, optimizer, "nvfp4")',
    good='engine = ampwise.Engine(model, optimizer, "emulate:nvfp4")',
)
BLOCKS = ("mxfp8", "mxfp4", "nvfp4")


def check(choice: Choice) -> Iterator[Finding]:
    want, target = choice.want, choice.target
    prototype = want in BLOCKS or (want == "fp8" and target.kind not in ("cuda", None))
    if want is not None and prototype and target.has(want) is not False:
        yield no(
            RULE,
            choice,
            f"training in {want.upper()} on {target.name} is a prototype in torch's libraries, or its maker's matter",
            costs={want.upper(): "an experiment of weeks", "BF16": "none"},
            know=ToKnow("ampwise formats " + want, "what the format holds, beside the others"),
            refuses=want,
        )
