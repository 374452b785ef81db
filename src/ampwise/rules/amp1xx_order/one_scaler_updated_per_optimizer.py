from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampwise.check.source.accelerators import ITS_SCALER
from ampwise.check.source.accumulation import mentions_accumulation
from ampwise.check.source.names import dotted_text
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import Frame, Moment, Region, SourceEvent, SourceFile
    from ampwise.watch.run_events import ScalerUpdate

RULE = Rule(
    code="AMP107",
    name="one-scaler-updated-per-optimizer",
    severity=Severity.WARNING,
    summary="`scaler.update()` is called after each of several optimizers' steps instead of once.",
    why=(
        "`update()` should be called once per iteration, after all optimizers have stepped. Called in between, it "
        "changes the scale while scaled gradients exist, so the next optimizer divides them by a scale they were not "
        "multiplied by: its step is 2 times too large after an overflow, and half as large after 2000 clean steps. If "
        "each optimizer has a backward of its own, every iteration counts twice towards the growth of the scale, and "
        "an overflow in one lowers the scale of both."
    ),
    fix="Call `scaler.update()` once, after the last `scaler.step`, or use one GradScaler per optimizer.",
    bad=(
        "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()\n"
        "scaler.step(optimizer_center)\nscaler.update()"
    ),
    good=("scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.step(optimizer_center)\nscaler.update()"),
)
NEEDS = (("caler",), (".backward(",), (".update(",))


def check_source(code: SourceFile) -> Findings:
    for region in code.visible_regions:
        reported: set[str | None] = set()
        for update, moments in region.visits("update"):
            if update.key in (*reported, ITS_SCALER) or not _once_per_iteration(update, region):
                continue
            message = _in_a_loop_over_optimizers(update, region) or _before_another_step(moments, region)
            if message:
                reported.add(update.key)
                yield RULE.at(update.place, message)


def _before_another_step(moments: list[Moment], region: Region) -> str | None:
    """Return a message if this update comes between the steps of two optimizers on some path."""
    several = len({step.other for step in region.events_of("scaler step")}) > 1
    for moment in moments if several else ():
        update = moment.event
        mine = {step.other for step in moment.earlier("scaler step") if step.key == update.key}
        following = list(moment.later("scaler step", "update", "scaled backward", "opaque"))
        own = [index for index, later in enumerate(following) if later.kind == "update" and later.key == update.key]
        for index, step in enumerate(following[: own[-1]] if own and mine else ()):
            if step.kind != "scaler step" or step.key != update.key or step.other in mine:
                continue
            if None in (step.key, step.other, *mine) or not _once_per_iteration(step, region):
                continue
            between = {event.kind for event in following[:index]}
            line = step.spot(update)
            if not between & {"opaque", "scaled backward"}:
                return f"the gradients applied in {line} were computed with the scale before this update"
            if "opaque" not in between and _accumulates(update, step, following[:index], region):
                return (
                    f"the gradients applied in {line} are summed over micro-batches, of which the last is scaled "
                    "after this update, the others before it"
                )
            # With a backward of its own after the update, the other optimizer has a whole cycle for itself.
            loops = {*region.inner_loops(update), *region.inner_loops(step)}
            if "opaque" not in between and region.loop is not None and not loops:
                return f"`update` runs here and again after the step in {line}: the scale is judged twice per iteration"
    return None


def _accumulates(update: SourceEvent, step: SourceEvent, between: list[SourceEvent], region: Region) -> bool:
    """Whether each micro-batch has the backward between an update and a step, which only the last of them has."""
    shared = [guard for guard in region.own_guards(update) if guard in region.own_guards(step)]
    ends = [guard for guard in shared if guard.boundary is not None or mentions_accumulation(guard.test)]
    backwards = [event for event in between if event.kind == "scaled backward" and event.key == update.key]
    return bool(ends and backwards) and all(ends[0] not in event.context.guards for event in backwards)


def _in_a_loop_over_optimizers(update: SourceEvent, region: Region) -> str | None:
    """Return a message for ``for opt in optimizers: scaler.step(opt); scaler.update()`` with the backward before it."""
    loop = update.context.loops[-1] if update.context.loops else None
    if loop is None or loop is region.loop or not isinstance(loop.node, ast.For):
        return None
    inside = [event for event in region.events if loop in event.context.loops]
    if any(event.kind in ("backward", "scaled backward") for event in inside) or update.frame is not loop.frame:
        return None
    names = _names_in(loop.node.target)
    tests = [part.test for part in walk(loop.node) if isinstance(part, ast.If) and names & _names_in(part.test)]
    if not all(_may_pick_none(test, loop.frame) for test in tests):
        return None  # it may select one of them
    for step in inside:
        if step.kind == "scaler step" and step.key == update.key and isinstance(step.node, ast.Call):
            optimizer = step.node.args[0] if step.node.args else None
            scaler = dotted_text(step.receiver)
            if isinstance(optimizer, ast.Subscript):
                optimizer = optimizer.slice  # for name in optimizers: scaler.step(optimizers[name])
            of_loop = isinstance(optimizer, ast.Name) and optimizer.id in names
            if of_loop and scaler is not None and scaler.partition(".")[0] not in names:
                return "the scale may change before the other optimizers in this loop have stepped"
    return None


def _may_pick_none(test: ast.expr, frame: Frame) -> bool:
    """Return whether ``picked is not None and index != picked`` skips none in some mode: the code sets it to None."""
    for part in test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else ():
        if isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.IsNot) and _is_none(part.comparators[0]):
            return any(_is_none(value.node) for value in frame.values(part.left))
    return False


def _is_none(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _names_in(node: ast.expr) -> set[str]:
    return {part.id for part in walk(node) if isinstance(part, ast.Name)}


def _once_per_iteration(event: SourceEvent, region: Region) -> bool:
    """Return whether it is not in a separate data loop inside the region, which is another phase of training."""
    for loop in region.inner_loops(event):
        if not isinstance(loop.node, ast.For):
            return False
        text = ast.unparse(loop.node.iter)
        counts = text.startswith("range(")
        if counts and ("epoch" in text or "epoch" in ast.unparse(loop.node.target)):
            return False
        if not counts and "opt" not in text.lower():
            return False  # it does not iterate over optimizers either
    return True


def check_event(update: ScalerUpdate) -> Findings:
    if update.earlier and update.earlier_site is not None:
        yield RULE.at(
            update.site.place,
            "the scaler is updated once per optimizer, here and at "
            f"{update.earlier_site.short}: each iteration counts twice towards growth",
        )
