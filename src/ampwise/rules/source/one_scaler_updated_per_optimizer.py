"""One scaler, several optimizers, and an ``update()`` after each of their steps."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.events import Event, Loop
from ampwise.source.names import dotted_text
from ampwise.source.project import Code
from ampwise.source.steps import Moment, Region

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP107",
    name="one-scaler-updated-per-optimizer",
    severity=Severity.WARNING,
    summary="`scaler.update()` is called after each of several optimizers' steps, not once for all.",
    why=(
        "`update()` is meant once an iteration, after all optimizers have stepped. Called in between, it changes the "
        "scale under gradients that are already there, so the next optimizer divides them by a scale they were not "
        "multiplied by. Where each optimizer's backward comes after the other's update, what is lost is less: each "
        "network's overflows shrink the scale of the other, and clean steps are counted once for each optimizer."
    ),
    fix="Call `scaler.update()` once, after the last `scaler.step`; or give each optimizer a GradScaler of its own.",
    bad=(
        "scaler.scale(loss_d).backward()\nscaler.step(optimizer_d)\nscaler.update()\n"
        "scaler.scale(loss_g).backward()\nscaler.step(optimizer_g)\nscaler.update()"
    ),
    good=(
        "scaler.scale(loss_d).backward()\nscaler.step(optimizer_d)\n"
        "scaler.scale(loss_g).backward()\nscaler.step(optimizer_g)\nscaler.update()"
    ),
)
NEEDS = (("caler",), (".backward(",), (".update(",))


def check(code: Code) -> Iterator[Finding]:
    for region in code.regions:
        if region.hidden:
            continue
        told: set[str | None] = set()
        for update, moments in region.visits("update"):
            if update.key in told or not _once_an_iteration(update, region):
                continue
            message = _in_a_loop_over_optimizers(update, region) or _before_another_step(moments, region)
            if message:
                told.add(update.key)
                yield RULE.at(update.place, message)


def _before_another_step(moments: list[Moment], region: Region) -> str | None:
    """On some path this update has one optimizer's step before it, and another's step and update after it."""
    stepped = {event.other for event in region.events if event.kind == "scaler step"}
    for moment in moments if len(stepped) > 1 else ():
        update = moment.event
        mine = {step.other for step in moment.earlier("scaler step") if step.key == update.key}
        following = list(moment.later("scaler step", "update", "scaled backward", "opaque"))
        own = [index for index, later in enumerate(following) if later.kind == "update" and later.key == update.key]
        for index, step in enumerate(following[: own[-1]] if own and mine else ()):
            if (
                step.kind == "scaler step"
                and step.key == update.key
                and None not in (step.key, step.other, *mine)
                and step.other not in mine
                and _once_an_iteration(step, region)
            ):
                between = {event.kind for event in following[:index]}
                if "opaque" in between:
                    continue
                line = step.spot(update)
                if "scaled backward" in between and step.context.loops != update.context.loops:
                    return f"the optimizer of {line} shares this scaler, and each changes the other's scale"
                if "scaled backward" in between:
                    return f"the scaler is updated again after the step of {line}; once for both is enough"
                return f"the gradients that {line} applies were made with the scale before this update"
    return None


def _in_a_loop_over_optimizers(update: Event, region: Region) -> str | None:
    """``for opt in optimizers: scaler.step(opt); scaler.update()``, the backward before the loop."""
    loop = update.context.loops[-1] if update.context.loops else None
    if loop is None or loop is region.loop or not isinstance(loop.node, ast.For):
        return None
    inside = [event for event in region.events if loop in event.context.loops]
    if any(event.kind in ("backward", "scaled backward") for event in inside) or update.frame is not loop.frame:
        return None
    names = {part.id for part in ast.walk(loop.node.target) if isinstance(part, ast.Name)}
    if any(isinstance(part, ast.If) and _mentions(part.test, names) for part in ast.walk(loop.node)):
        return None  # perhaps one of them is picked
    for step in inside:
        if step.kind == "scaler step" and step.key == update.key and _is_for_one_of(step, names):
            return "the scale may change before the other optimizers of this loop have stepped"
    return None


def _is_for_one_of(step: Event, names: set[str]) -> bool:
    """The optimizer is the loop's variable, and the scaler is not."""
    call = step.node
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not call.args:
        return False
    scaler = dotted_text(call.func.value)
    of_loop = isinstance(call.args[0], ast.Name) and call.args[0].id in names
    return of_loop and scaler is not None and scaler.partition(".")[0] not in names


def _mentions(test: ast.expr, names: set[str]) -> bool:
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(test))


def _once_an_iteration(event: Event, region: Region) -> bool:
    """Not in a loop over data of its own inside the region: that is another phase of training."""
    loops = event.context.loops
    inner = loops[loops.index(region.loop) + 1 :] if region.loop in loops else loops
    return all(_counts_or_iterates_optimizers(loop) for loop in inner)


def _counts_or_iterates_optimizers(loop: Loop) -> bool:
    if not isinstance(loop.node, ast.For):
        return False
    text = ast.unparse(loop.node.iter)
    if text.startswith("range("):
        return "epoch" not in text and "epoch" not in ast.unparse(loop.node.target)
    return "opt" in text.lower()
