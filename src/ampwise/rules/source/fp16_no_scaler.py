"""FP16 autocast and a plain backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.finding import Finding, Rule, Severity

if TYPE_CHECKING:
    from ampwise.source.events import Event
    from ampwise.source.project import Code
    from ampwise.source.steps import Moment

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP301",
    name="fp16-no-scaler",
    severity=Severity.ERROR,
    summary="FP16 autocast with a plain `backward()`, and no GradScaler in sight.",
    why=(
        "FP16 holds nothing below 6e-8. Activation gradients are often smaller, so without loss scaling they become "
        "zero, and the layers below them stop learning while the loss still looks reasonable."
    ),
    fix="Scale the loss with `torch.amp.GradScaler`, or use `dtype=torch.bfloat16` where the GPU has it.",
    bad='with torch.autocast("cuda", dtype=torch.float16):\n    loss = loss_fn(model(x), y)\nloss.backward()\noptimizer.step()',
    good=(
        'with torch.autocast("cuda", dtype=torch.float16):\n    loss = loss_fn(model(x), y)\n'
        "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()"
    ),
)


def check(code: Code) -> Iterator[Finding]:
    if code.uses_framework or "scaler" in code.script.text.lower():
        return
    for region in code.regions:
        if region.hidden or not region.has("optimizer step"):
            continue
        for backward, moments in region.visits("backward"):
            forward = _forward_in_fp16(moments[0])
            if forward is not None and all(_forward_in_fp16(moment) for moment in moments):
                yield RULE.at(
                    backward.place,
                    f"the forward of line {forward.line} runs in FP16, and no scaler keeps its gradients from underflow",
                )


def _forward_in_fp16(moment: Moment) -> Event | None:
    for event in moment.earlier("forward"):
        autocast = event.context.autocast
        if autocast is not None and autocast.surely_fp16 and not event.context.no_grad:
            return event
    return None
