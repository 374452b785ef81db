from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.constructors import find_constructors
from ampwise.check.source.half_models import half_models_in
from ampwise.check.source.line_references import spot
from ampwise.check.source.optimized_modules import optimized
from ampwise.check.source.precision import argument_of, literal_bool
from ampwise.check.source.torch_names import BF16, FP16
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import AutocastContext, Loop, Region, SourceEvent, SourceFile
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP116",
    name="steps-in-one-autocast",
    severity=Severity.ERROR,
    summary="Several steps are made within one autocast region, which keeps the casts of the old weights.",
    why=(
        "Within a region autocast casts each FP32 weight once, and keeps the 16-bit copy until the outermost region "
        "ends. A step changes the weight and not the copy: all later passes of the region run with the weights that "
        "the region began with, and the model hardly learns."
    ),
    fix="Enter autocast anew for the forward pass of each step, and leave it before `backward` and `step`.",
    bad='with torch.autocast("cuda"):\n    for x, y in loader:\n        train_step(x, y)',
    good=(
        'for x, y in loader:\n    with torch.autocast("cuda"):\n        loss = criterion(model(x), y)\n    '
        "loss.backward()\n    optimizer.step()"
    ),
)

NEEDS = (("autocast",), (".backward(",), (".step(",))

STEPS = ("scaler step", "optimizer step")
TIMES = 3


def check_source(code: SourceFile) -> Findings:
    if "clear_autocast_cache" in code.script.text:
        return
    reported: set[ast.AST] = set()
    for region in code.visible_regions:
        for step, later in _passes_after_steps(region):
            autocast = _outermost(step)
            if autocast is None or autocast.manager is None or autocast.manager in reported:
                continue
            home = autocast.entered_in
            if home is None or home.outline is not code.outline or _trains_in_half(region, code):
                continue
            reported.add(autocast.manager)
            place = code.script.place(autocast.manager)
            after = spot(step.node, step.frame, place)
            passes = f"the pass in {spot(later.node, later.frame, place)} uses" if later else "later iterations use"
            message = (
                f"this region goes on after the step in {after}: {passes} 16-bit copies of the weights from before it"
            )
            yield RULE.at(place, message)


def _outermost(event: SourceEvent) -> AutocastContext | None:
    """Return the region whose end drops the casts that exist at an event; None if it keeps none."""
    if not event.context.autocasts:
        return None
    autocast = event.context.autocasts[0]
    cached = argument_of(autocast.node, "cache_enabled") if isinstance(autocast.node, ast.Call) else None
    return autocast if autocast.known and autocast.may_be_on and literal_bool(cached) is not False else None


def _passes_after_steps(region: Region) -> Iterator[tuple[SourceEvent, SourceEvent | None]]:
    """Yield each step within an autocast region that a pass in the same region follows; None: of another iteration."""
    passes = [event for event in region.events_of("forward") if not event.context.no_grad]
    for step, moments in region.visits(*STEPS):
        autocast = _outermost(step)
        if autocast is None:
            continue
        inside = [event for event in passes if autocast in event.context.autocasts]
        if region.loop is not None and _encloses(autocast, region.loop):
            yield from ((step, None) for _ in inside[:1])
            continue
        modules = _modules_stepped(step) if inside else set()
        for moment in moments:
            before = {event.key for event in moment.earlier("forward") if event in inside}
            later = [event for event in moment.later("forward") if event in inside and event.key in before & modules]
            yield from ((step, event) for event in later[:1])


def _encloses(autocast: AutocastContext, loop: Loop) -> bool:
    """Whether a region that an event in a loop is in was entered before the loop, not in each iteration."""
    home, manager = autocast.entered_in, autocast.manager
    if home is None or manager is None:
        return False
    if home.function is loop.frame.function:
        return manager.lineno < loop.node.lineno
    return any(caller.function is home.function for caller in loop.frame.callers())


def _modules_stepped(step: SourceEvent) -> set[str | None]:
    """Return the keys of what the optimizer of a step was made for: ``netD``, for ``Adam(netD.parameters())``."""
    optimizer = step.receiver
    if step.kind == "scaler step":
        given = step.node.args if isinstance(step.node, ast.Call) else []
        optimizer = given[0] if given else optimizer
    makers = [(made, home) for made, home in find_constructors(optimizer, step.frame) if isinstance(made, ast.Call)]
    return {home.key(part) for call, frame in makers for part, home, _ in optimized(call, frame)} - {None}


def _trains_in_half(region: Region, code: SourceFile) -> bool:
    """Whether a model of the step may have 16-bit weights, which need no casts."""
    return any(half_models_in(region, code, dtype) for dtype in (FP16, BF16))


def check_learning(facts: Learning) -> Findings:
    for site, calls in facts.stale_casts.items():
        if calls.times >= TIMES:
            yield RULE.at(
                site.place.but(step=calls.step),
                "this region goes on after optimizer steps: the passes after a step use 16-bit copies of the weights "
                "from before it",
                evidence={"times": calls.times},
            )
