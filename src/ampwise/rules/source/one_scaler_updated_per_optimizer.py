"""One scaler that is updated after each of several optimizers' steps."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.check.source.events import Loop, SourceEvent
from ampwise.check.source.names import dotted_text
from ampwise.check.source.project import SourceFile
from ampwise.check.source.steps import Moment, Region
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP107",
    name="one-scaler-updated-per-optimizer",
    severity=Severity.WARNING,
    summary="`scaler.update()` is called after each of several optimizers' steps instead of once.",
    why=(
        "`update()` should be called once per iteration, after all optimizers have stepped. Called in between, it "
        "changes the scale while scaled gradients exist, so the next optimizer divides them by a scale they were not "
        "multiplied by. If each optimizer's backward comes after the other's update, the damage is smaller: each "
        "network's overflows reduce the other's scale, and clean steps are counted once per optimizer."
    ),
    fix="Call `scaler.update()` once, after the last `scaler.step`, or use one GradScaler per optimizer.",
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


def check(code: SourceFile) -> Iterator[Finding]:
    for region in code.regions:
        if region.hidden:
            continue
        reported: set[str | None] = set()
        for update, moments in region.visits("update"):
            if update.key in reported or not _once_per_iteration(update, region):
                continue
            message = _in_a_loop_over_optimizers(update, region) or _before_another_step(moments, region)
            if message:
                reported.add(update.key)
                yield RULE.at(update.place, message)


def _before_another_step(moments: list[Moment], region: Region) -> str | None:
    """Return a message if this update comes between the steps of two optimizers on some path."""
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
                and _once_per_iteration(step, region)
            ):
                between = {event.kind for event in following[:index]}
                if "opaque" in between:
                    continue
                line = step.spot(update)
                if "scaled backward" in between and step.context.loops != update.context.loops:
                    return f"the optimizer in {line} shares this scaler, so each changes the other's scale"
                if "scaled backward" in between:
                    return f"the scaler is updated again after the step in {line}; one update for both is enough"
                return f"the gradients applied in {line} were computed with the scale before this update"
    return None


def _in_a_loop_over_optimizers(update: SourceEvent, region: Region) -> str | None:
    """Return a message for ``for opt in optimizers: scaler.step(opt); scaler.update()`` with the backward before it."""
    loop = update.context.loops[-1] if update.context.loops else None
    if loop is None or loop is region.loop or not isinstance(loop.node, ast.For):
        return None
    inside = [event for event in region.events if loop in event.context.loops]
    if any(event.kind in ("backward", "scaled backward") for event in inside) or update.frame is not loop.frame:
        return None
    names = {part.id for part in ast.walk(loop.node.target) if isinstance(part, ast.Name)}
    if any(isinstance(part, ast.If) and _mentions(part.test, names) for part in ast.walk(loop.node)):
        return None  # it may select one of them
    for step in inside:
        if step.kind == "scaler step" and step.key == update.key and _is_for_one_of(step, names):
            return "the scale may change before the other optimizers in this loop have stepped"
    return None


def _is_for_one_of(step: SourceEvent, names: set[str]) -> bool:
    """Return whether the optimizer is the loop variable and the scaler is not."""
    call = step.node
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not call.args:
        return False
    scaler = dotted_text(call.func.value)
    of_loop = isinstance(call.args[0], ast.Name) and call.args[0].id in names
    return of_loop and scaler is not None and scaler.partition(".")[0] not in names


def _mentions(test: ast.expr, names: set[str]) -> bool:
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(test))


def _once_per_iteration(event: SourceEvent, region: Region) -> bool:
    """Return whether it is not in a separate data loop inside the region, which is another phase of training."""
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
