"""Validation in another precision than training."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.events import Event, Loop
from ampwise.source.frame import Frame
from ampwise.source.pattern import Pattern
from ampwise.source.project import Code
from ampwise.source.walk import Trace, events_in

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
NEEDS = (("autocast",), (".backward(",))

SWITCHED_BY_HAND = "set_autocast_"  # torch.set_autocast_enabled(...): no `with` tells where it is on
HALF_MODEL = Pattern(r"\.(half|bfloat16)\(\)")
GENERATES = Pattern(r"sampl|generat|interpolat|progress|visuali|plot|draw|demo")  # makes pictures, measures nothing
EVALUATES_ITSELF = Pattern(r"^(eval|valid|test|fit|score)")  # model.evaluate(data): a loop of its own, out of sight
BACKWARDS = ("backward", "scaled backward")


def check(code: Code) -> Iterator[Finding]:
    traces = _traces_of_training(code) if SWITCHED_BY_HAND not in code.script.text else []
    events = (event for one in traces for event in one.events())
    forwards = [event for event in events if event.kind == "forward" and event.context.loops]
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
            code.script.place(_as_seen_from(loop.frame, event)),
            "training runs under autocast, this evaluation does not",
        )


def _as_seen_from(frame: Frame, event: Event) -> ast.expr:
    """The forward itself, or the call in the evaluation loop that leads to it."""
    node = event.node
    for inner in event.frame.callers():
        if inner is frame:
            break
        node = inner.call or node
    return node


def _traces_of_training(code: Code) -> list[Trace]:
    """All that happens in a file that trains under autocast; in one that helps another to, what this one calls."""
    training = [
        region
        for region in code.regions
        if region.has(*BACKWARDS) and any(_computes_under_autocast(event) for event in region.events)
    ]
    here = any(event.frame.outline is code.outline for region in training for event in region.events)
    return code.traces if here else list({id(region.trace): region.trace for region in training}.values())


def _computes_under_autocast(event: Event) -> bool:
    autocast = event.context.autocast
    return autocast is not None and autocast.known and autocast.may_be_on and not event.context.no_grad


def _evaluates(event: Event) -> bool:
    """A forward in a loop without a backward, with gradients off or the model in eval mode."""
    loop = event.context.loops[-1]
    trains, under_autocast = _around(loop)
    if trains or _is_something_else(event):
        return False
    if not event.context.autocasts and under_autocast:
        return False  # the FP32 branch beside the one with autocast
    if _trains(loop.frame):  # targets are computed without gradients too: only after model.eval() is it validation
        return event.context.no_grad and _sets_eval_mode(loop.frame)
    return event.context.no_grad or _sets_eval_mode(loop.frame)


@functools.lru_cache(maxsize=64)  # every forward in a loop asks
def _around(loop: Loop) -> tuple[bool, bool]:
    """Whether a loop holds a backward, and whether anything in it is under autocast."""
    events = list(events_in(loop.block))
    return any(event.kind in BACKWARDS for event in events), any(event.context.autocasts for event in events)


def _is_something_else(event: Event) -> bool:
    """A loop that draws samples, a model that is half itself, a method that evaluates out of sight."""
    function = event.context.loops[-1].frame.function
    if GENERATES.search(function.name) or (function.parent is not None and HALF_MODEL.search(function.text)):
        return True
    func = event.node.func if isinstance(event.node, ast.Call) else None
    return isinstance(func, ast.Attribute) and EVALUATES_ITSELF.search(func.attr) is not None


def _trains(frame: Frame) -> bool:
    """Whether this function also holds the training."""
    return frame.function.parent is None or ".backward(" in frame.function.text


def _sets_eval_mode(frame: Frame) -> bool:
    return ".eval()" in frame.function.text
