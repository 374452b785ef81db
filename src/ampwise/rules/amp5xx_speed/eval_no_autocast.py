from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.walk import events_in
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.events import Loop, SourceEvent
    from ampwise.check.source.frame import Frame
    from ampwise.check.source.project import SourceFile
    from ampwise.watch.run_events import RunEvents

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
# Generates samples, evaluates nothing.
GENERATES = LazyPattern(r"sampl|generat|interpolat|progress|visuali|plot|draw|demo")
EVALUATES_ITSELF = LazyPattern(r"^(eval|valid|test|fit|score)")  # model.evaluate(data): its loop is not visible here
EVALUATES = LazyPattern(r"^_?(eval|valid|test)|(^|_)(eval|validation|validate|val|test)(_|$)")
BACKWARDS = ("backward", "scaled backward")


def check_source(code: SourceFile) -> Findings:
    if SWITCHED_MANUALLY in code.script.text:
        return
    regions = [region for region in code.regions if region.has(*BACKWARDS)]
    training = []  # the regions that compute something under autocast
    for region in regions:
        autocasts = (event.context.autocast for event in region.events if not event.context.no_grad)
        if any(autocast is not None and autocast.known and autocast.may_be_on for autocast in autocasts):
            training.append(region)
    traces = list({id(region.trace): region.trace for region in training}.values())
    if any(event.frame.outline is code.outline for region in training for event in region.events):
        traces = code.traces  # the training is in this file, which is not only a helper of it
    events = (event for trace in traces for event in trace.events())
    forwards = (event for event in events if event.kind == "forward" and event.context.loops)
    evaluations = [event for event in forwards if _evaluates(event)]
    wrapped = {event.node for event in evaluations if event.context.autocasts}
    reported: set[object] = set()
    for event in evaluations:
        loop = event.context.loops[-1]
        own = loop.node if _trains(loop.frame) else loop.frame.function
        if event.node in wrapped or own in reported or loop.frame.outline is not code.outline:
            continue
        reported.add(own)
        node = event.node
        for inner in event.frame.callers():  # up to the call in the evaluation loop that leads to the forward
            if inner is loop.frame:
                break
            node = inner.call or node
        yield RULE.at(code.script.place(node), "training runs under autocast, but this evaluation does not")


def _evaluates(event: SourceEvent) -> bool:
    """Return whether this is a forward in a loop without a backward, with gradients off or the model in eval mode."""
    loop = event.context.loops[-1]
    function = loop.frame.function
    trains, under_autocast = _contents(loop)
    if trains or (under_autocast and not event.context.autocasts and not _also_under_autocast(event, under_autocast)):
        return False  # the FP32 branch next to one with autocast
    if GENERATES.search(function.name) or (function.parent is not None and HALF_MODEL.search(function.text)):
        return False
    func = event.node.func if isinstance(event.node, ast.Call) else None
    if isinstance(func, ast.Attribute) and EVALUATES_ITSELF.search(func.attr):
        return False
    eval_mode = ".eval()" in function.text
    if _trains(loop.frame):  # targets are computed without gradients too: it is validation only after model.eval()
        return event.context.no_grad and eval_mode
    return event.context.no_grad or eval_mode or EVALUATES.search(function.name) is not None


def _also_under_autocast(event: SourceEvent, others: list[SourceEvent]) -> bool:
    """Return whether the same model also runs under autocast in the same iteration, not in another branch."""
    sides = {guard.text: guard.holds for guard in event.context.guards}
    same = [other for other in others if other.kind == "forward" and other.key == event.key]
    return any(all(sides.get(guard.text, guard.holds) == guard.holds for guard in one.context.guards) for one in same)


@functools.lru_cache(maxsize=64)  # called for every forward in a loop
def _contents(loop: Loop) -> tuple[bool, list[SourceEvent]]:
    """Return whether a loop contains a backward, and what in it is under autocast."""
    events = events_in(loop.block)
    return any(event.kind in BACKWARDS for event in events), [event for event in events if event.context.autocasts]


def _trains(frame: Frame) -> bool:
    """Return whether this function also contains the training."""
    return frame.function.parent is None or ".backward(" in frame.function.text


def check_run(run: RunEvents) -> Findings:
    for forward, times in run.forwards.items():
        # The same model, or a copy such as an average of weights, which is matched by class.
        same = [each for each in run.forwards if each.model == forward.model and forward.number in (each.number, None)]
        trained = {each.precision for each in same if each.training}
        halves = trained - {"fp32", "fp64"}
        if not forward.training and halves and forward.precision not in trained:
            precisions = f"{min(halves).upper()}, but is evaluated in {forward.precision.upper()} here"
            called = {"called_from": forward.site.called_from} if forward.site.called_from else {}
            message = f"{forward.model} was trained in {precisions}"
            yield RULE.at(forward.site.place, message, evidence={"times": times} | called)
