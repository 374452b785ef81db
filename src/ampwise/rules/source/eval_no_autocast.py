"""Validation in a different precision than training."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from ampwise.check.source.events import Loop, SourceEvent
from ampwise.check.source.frame import Frame
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.project import SourceFile
from ampwise.check.source.walk import CodeTrace, events_in
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP501",
    name="eval-no-autocast",
    severity=Severity.INFO,
    summary="Training runs under autocast, but the evaluation loop does not.",
    why=(
        "Not wrong, but slower and with more memory than needed, and it measures a different model from the trained "
        "one: what overflows in FP16 in deployment looks fine in FP32 at validation."
    ),
    fix="Run the evaluation under the same autocast as the training.",
    bad="with torch.no_grad():\n    for x, y in val_loader:\n        predictions = model(x)",
    good='with torch.no_grad(), torch.autocast("cuda"):\n    for x, y in val_loader:\n        predictions = model(x)',
    on_by_default=False,
)
NEEDS = (("autocast",), (".backward(",))

SWITCHED_MANUALLY = "set_autocast_"  # torch.set_autocast_enabled(...): there is no `with` block to analyse
HALF_MODEL = LazyPattern(r"\.(half|bfloat16)\(\)")
GENERATES = LazyPattern(
    r"sampl|generat|interpolat|progress|visuali|plot|draw|demo"
)  # generates samples, evaluates nothing
EVALUATES_ITSELF = LazyPattern(r"^(eval|valid|test|fit|score)")  # model.evaluate(data): its loop is not visible here
BACKWARDS = ("backward", "scaled backward")


def check(code: SourceFile) -> Iterator[Finding]:
    traces = _traces_of_training(code) if SWITCHED_MANUALLY not in code.script.text else []
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
            "training runs under autocast, but this evaluation does not",
        )


def _as_seen_from(frame: Frame, event: SourceEvent) -> ast.expr:
    """Return the forward call itself, or the call in the evaluation loop that leads to it."""
    node = event.node
    for inner in event.frame.callers():
        if inner is frame:
            break
        node = inner.call or node
    return node


def _traces_of_training(code: SourceFile) -> list[CodeTrace]:
    """Return all traces of a file that trains under autocast, or those of the training that uses a helper file."""
    training = [
        region
        for region in code.regions
        if region.has(*BACKWARDS) and any(_computes_under_autocast(event) for event in region.events)
    ]
    here = any(event.frame.outline is code.outline for region in training for event in region.events)
    return code.traces if here else list({id(region.trace): region.trace for region in training}.values())


def _computes_under_autocast(event: SourceEvent) -> bool:
    autocast = event.context.autocast
    return autocast is not None and autocast.known and autocast.may_be_on and not event.context.no_grad


def _evaluates(event: SourceEvent) -> bool:
    """Return whether this is a forward in a loop without a backward, with gradients off or the model in eval mode."""
    loop = event.context.loops[-1]
    trains, under_autocast = _contents(loop)
    if trains or _is_something_else(event):
        return False
    if not event.context.autocasts and under_autocast:
        return False  # the FP32 branch next to one with autocast
    if _trains(loop.frame):  # targets are computed without gradients too: it is validation only after model.eval()
        return event.context.no_grad and _sets_eval_mode(loop.frame)
    return event.context.no_grad or _sets_eval_mode(loop.frame)


@functools.lru_cache(maxsize=64)  # called for every forward in a loop
def _contents(loop: Loop) -> tuple[bool, bool]:
    """Return whether a loop contains a backward, and whether anything in it is under autocast."""
    events = list(events_in(loop.block))
    return any(event.kind in BACKWARDS for event in events), any(event.context.autocasts for event in events)


def _is_something_else(event: SourceEvent) -> bool:
    """Return whether it is not an evaluation: a sampling loop, a half-precision model, or its own loop."""
    function = event.context.loops[-1].frame.function
    if GENERATES.search(function.name) or (function.parent is not None and HALF_MODEL.search(function.text)):
        return True
    func = event.node.func if isinstance(event.node, ast.Call) else None
    return isinstance(func, ast.Attribute) and EVALUATES_ITSELF.search(func.attr) is not None


def _trains(frame: Frame) -> bool:
    """Return whether this function also contains the training."""
    return frame.function.parent is None or ".backward(" in frame.function.text


def _sets_eval_mode(frame: Frame) -> bool:
    return ".eval()" in frame.function.text
