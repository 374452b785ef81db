"""Validation in another precision than training."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.walk import events_in

if TYPE_CHECKING:
    from ampwise.source.events import Event
    from ampwise.source.frame import Frame
    from ampwise.source.project import Code

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP501",
    name="eval-no-autocast",
    severity=Severity.INFO,
    summary="Training runs under autocast, the evaluation loop does not.",
    why=(
        "Not wrong, but slower and larger than need be, and it measures another model than the one that is trained: "
        "what overflows in FP16 in use looks fine in FP32 at validation."
    ),
    fix="Run the evaluation's forward under the same autocast as the training's.",
    bad="with torch.no_grad():\n    for x, y in val_loader:\n        predictions = model(x)",
    good='with torch.no_grad(), torch.autocast("cuda"):\n    for x, y in val_loader:\n        predictions = model(x)',
    on_by_default=False,
)

BACKWARDS = ("backward", "scaled backward")


def check(code: Code) -> Iterator[Finding]:
    if not _trains_under_autocast(code):
        return
    forwards = [event for event in code.events if event.kind == "forward" and event.context.loops]
    evaluations = [event for event in forwards if _evaluates(event)]
    wrapped = {event.node for event in evaluations if event.context.autocasts}
    reported: set[object] = set()
    for event in evaluations:
        loop = event.context.loops[-1]
        own = loop.node if _trains(loop.frame) else loop.frame.function
        if event.node in wrapped or own in reported or loop.frame.outline is not code.outline:
            continue
        reported.add(own)
        yield RULE.at(
            code.script.place(_as_seen_from(loop.frame, event)), "training runs under autocast, this evaluation does not"
        )


def _as_seen_from(frame: Frame, event: Event) -> ast.expr:
    """The forward itself, or the call in the evaluation loop that leads to it."""
    node = event.node
    for inner in event.frame.callers():
        if inner is frame:
            break
        node = inner.call or node
    return node


def _trains_under_autocast(code: Code) -> bool:
    for region in code.regions:
        if region.has(*BACKWARDS) and any(_computes_under_autocast(event) for event in region.events):
            return True
    return False


def _computes_under_autocast(event: Event) -> bool:
    autocast = event.context.autocast
    return autocast is not None and autocast.known and autocast.may_be_on and not event.context.no_grad


def _evaluates(event: Event) -> bool:
    """A forward in a loop without a backward, with gradients off or the model in eval mode."""
    loop = event.context.loops[-1]
    around = list(events_in(loop.block))
    if any(inner.kind in BACKWARDS for inner in around):
        return False
    if not event.context.autocasts and any(inner.context.autocasts for inner in around):
        return False  # the FP32 branch beside the one with autocast
    if _trains(loop.frame):  # targets are computed without gradients too: only after model.eval() is it validation
        return event.context.no_grad and _sets_eval_mode(loop.frame)
    return event.context.no_grad or _sets_eval_mode(loop.frame)


def _trains(frame: Frame) -> bool:
    """Whether this function also holds the training."""
    return frame.function.parent is None or ".backward(" in frame.function.text


def _sets_eval_mode(frame: Frame) -> bool:
    return ".eval()" in frame.function.text
