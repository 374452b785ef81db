"""A run that goes on in a wider format."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.fault_words import evidence_of, named, one_line
from ampwise.evidence.faults import PrecisionChanged
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP805",
    name="precision-changed",
    severity=Severity.WARNING,
    summary="The precision was changed, because the model does not train in the one that was asked for.",
    why=(
        "FP16 ends at 65504, and BF16 and FP32 at 3e38. Where neither skipping, nor a lower loss scale, nor going "
        "back helps, the guard takes the modules in which values overflow to FP32, or else the whole model to BF16, "
        "or to FP32. Numbers of steps before and after do not compare in speed, and hardly in accuracy."
    ),
    fix="Ask for this precision from the start, so that the next run loses no steps on the way.",
    bad='engine = Engine(model, optimizer, precision="fp16")',
    good='engine = Engine(model, optimizer, precision="bf16")',
)


def check(changed: PrecisionChanged) -> Iterator[Finding]:
    only = f" for {named(changed.modules)} alone" if changed.modules else ""
    cause = f", because {one_line(changed.cause)}" if changed.cause else ""
    yield RULE.at(
        Place(step=changed.step, module=changed.modules[0] if len(changed.modules) == 1 else None),
        f"the precision was changed from {one_line(changed.before)} to {one_line(changed.after)}{only}{cause}",
        evidence=evidence_of(changed),
    )
