"""A run that switched to a wider format."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.guard_event_text import event_evidence, name_list, one_line
from ampwise.rules.evidence.guard_events import PrecisionChanged

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP805",
    name="precision-changed",
    severity=Severity.WARNING,
    summary="The precision was changed because the model does not train in the requested one.",
    why=(
        "FP16 ends at 65504, BF16 and FP32 at 3e38. If neither skipping, nor a lower loss scale, nor rolling back "
        "helps, the guard moves the overflowing modules to FP32, or else the whole model to BF16 or FP32. Step times "
        "before and after are not comparable, and accuracy hardly is."
    ),
    fix="Use this precision from the start, so that the next run loses no steps.",
    bad='engine = Engine(model, optimizer, precision="fp16")',
    good='engine = Engine(model, optimizer, precision="bf16")',
)


def check(changed: PrecisionChanged) -> Iterator[Finding]:
    only = f" for {name_list(changed.modules)} only" if changed.modules else ""
    cause = f", because {one_line(changed.cause)}" if changed.cause else ""
    yield RULE.at(
        Place(step=changed.step, module=changed.modules[0] if len(changed.modules) == 1 else None),
        f"the precision was changed from {one_line(changed.before)} to {one_line(changed.after)}{only}{cause}",
        evidence=event_evidence(changed),
    )
