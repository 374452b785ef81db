from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.call_events import ANYTHING
from ampwise.check.source.cases import conditions_at
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.precision import argument_of
from ampwise.check.source.questions import guard_meaning, guard_source
from ampwise.check.source.statement_order import may_be_retried
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import BranchGuard, CodeSite, Frame, Moment, Region, SourceEvent, SourceFile
    from ampwise.watch.run_events import Unscale

RULE = Rule(
    code="AMP115",
    name="nan-guard-skips-update",
    severity=Severity.ERROR,
    summary="A check for NaN leaves the iteration between the scaled backward and `scaler.update`.",
    why=(
        "The scaler lowers the loss scale only in `update()`, from the infs that `unscale_` or `step` found. A check "
        "of the gradients that skips both hides the overflow: the scale stays too high, and every later step is "
        "skipped as well. After `unscale_`, skipping `update()` makes the next `unscale_` raise RuntimeError. A check "
        "that raises ends the run at the first overflow. The scaler already skips a step with inf or NaN by itself."
    ),
    fix="Remove the check, or call `scaler.update()` and `optimizer.zero_grad()` before leaving the iteration.",
    bad=(
        "scaler.unscale_(optimizer)\nnorm = clip_grad_norm_(model.parameters(), 1.0)\n"
        "if not torch.isfinite(norm):\n    continue\nscaler.step(optimizer)\nscaler.update()"
    ),
    good=(
        "scaler.unscale_(optimizer)\nnorm = clip_grad_norm_(model.parameters(), 1.0)\n"
        "scaler.step(optimizer)  # skips the step if a gradient is not finite\nscaler.update()"
    ),
)
NEEDS = (("caler",), (".backward(",), (".update(",), ("nan", "inf", "finite", "NaN", "overflow"))

ASKS_FOR_NAN = LazyPattern(r"nan\b|isnan|isinf|_inf\b|\binf\b|finite|overflow|has_nan", re.IGNORECASE)
OF_GRADIENTS = LazyPattern(r"grad(?!_acc|ient_acc)|norm", re.IGNORECASE)
NAMES_GRADIENTS = LazyPattern(r"\bgrads?\b|grad(ient)?_?norm|(^|\W)(total_|g)?norm\b", re.IGNORECASE)
# It raises only after many overflows, or when the scale is at its end, or if asked to.
TOLERATES = LazyPattern(
    r"scale\b|count|consecutive|patience|tolera|max_|min_|retries|strict|debug|check|detect|raise|"
    r"scaler|dtype|fp16|bf16|float16|(^|[^a-z])amp([^a-z]|$)"  # or not in the mode with a scaler
)
ENDS = "this ends the run at the first overflow: the scaler would skip the step and lower the scale"
# A check of the norm: `if norm > limit: continue`.
LIMITS_NORM = LazyPattern(r"norm[^<>]*[<>]|[<>][^<>]*norm", re.IGNORECASE)


def check_source(code: SourceFile) -> Findings:
    for region in code.visible_regions:
        asked: dict[BranchGuard, SourceEvent] = {}  # checks of gradients or the loss that an update is under
        for update in region.events_of("update"):
            for guard in region.own_guards(update):
                checks = ASKS_FOR_NAN.search(guard_meaning(guard)) or LIMITS_NORM.search(guard_source(guard))
                if guard.boundary is None and checks and not _updates_otherwise(guard, region):
                    asked.setdefault(guard, update)
        for guard, update in asked.items():
            for backward, moments in region.visits("scaled backward"):
                # Where the check fails, after this backward.
                left = [moment for moment in moments if moment.path.decided.get(guard.text) is (not guard.holds)]
                is_possible = conditions_at(backward.frame, backward.node)  # not of a dtype that is never chosen
                if guard in backward.context.guards or not left or not is_possible or _is_result(guard, backward):
                    continue
                harm = next((harm for moment in left if (harm := _harm(moment, guard, region))), None)
                if harm is not None and guard.test is not None:
                    yield RULE.at(update.frame.outline.script.place(guard.test), harm)
                    break

    for region in code.visible_regions:
        yield from _ends_the_run(region)


def check_event(unscale: Unscale) -> Findings:
    if unscale.left_overflow:
        yield RULE.at(
            unscale.site.place,
            "the gradients of an earlier iteration overflowed, and it ended after `unscale_`, without `update`: this "
            "`unscale_` raises an error",
        )


def _ends_the_run(region: Region) -> Findings:
    """Yield the checks that raise at an overflow of the gradients, for which the scaler would skip the step."""
    updates = region.events_of("update")
    for backward in region.events_of("scaled backward") if updates else ():
        seen: set[ast.expr] = set()
        for site in region.trace.statements_in(region.loop):
            frame, context = site.context.frame, site.context
            if not isinstance(site.node, ast.Raise) or context.loops != backward.context.loops:
                continue
            if _is_between(site, None, backward) or not any(_is_between(site, backward, each) for each in updates):
                continue
            further = [guard for guard in context.guards if guard not in backward.context.guards]
            asked = next((guard for guard in further if _asks_for_overflow(guard)), None)
            # What the update is under, too, is about the whole step: `if micro_step_count == accumulation_steps:`.
            own = [guard for guard in further if not any(guard in each.context.guards for each in updates)]
            if asked is None or asked.test is None or any(TOLERATES.search(guard_source(guard)) for guard in own):
                continue
            if asked.test not in seen:
                seen.add(asked.test)
                yield RULE.at(frame.outline.script.place(asked.test), ENDS)
    for clip, moments in region.visits("clip"):
        strict = argument_of(clip.node, "error_if_nonfinite", 3) if isinstance(clip.node, ast.Call) else None
        is_strict = isinstance(strict, ast.Constant) and strict.value is True and not may_be_retried(clip)
        if is_strict and all(m.scaled and not m.opaque and any(m.later("scaler step")) for m in moments):
            yield RULE.at(clip.place, ENDS, fix="Leave out `error_if_nonfinite`: the scaler skips such a step.")


def _is_between(site: CodeSite, first: SourceEvent | None, last: SourceEvent) -> bool:
    """Whether a statement comes after one event and before another, by the lines of the function that leads to both."""
    first_line, last_line = (0, 0) if first is None else _lines(site, first), _lines(site, last)
    return first_line[1] <= first_line[0] and last_line[0] < last_line[1]


def _lines(site: CodeSite, event: SourceEvent) -> tuple[int, int]:
    """Return the lines of a statement and of an event, or of the calls that lead to them, in the function of both."""
    theirs = dict(_calls_to(event.node, event.frame))
    for frame, node in _calls_to(site.node, site.context.frame):
        if frame in theirs:
            return getattr(node, "lineno", 0), getattr(theirs[frame], "lineno", 0)
    return 0, 0


def _calls_to(node: ast.AST, frame: Frame) -> Iterator[tuple[Frame, ast.AST]]:
    """Yield a node in its function, then in each calling function the call that leads to it."""
    for each in frame.callers():
        yield each, node
        node = each.call or node


def _asks_for_overflow(guard: BranchGuard) -> bool:
    source, asked = guard_source(guard), guard_meaning(guard)
    if "loss" in source.lower() and not NAMES_GRADIENTS.search(source):
        return False  # a loss that is not finite is no overflow of the gradients, whatever its function does to these
    return ASKS_FOR_NAN.search(asked) is not None and NAMES_GRADIENTS.search(asked) is not None


def _updates_otherwise(guard: BranchGuard, region: Region) -> bool:
    """Whether the other side of a check updates, too: for each optimizer, say, that is to be stepped."""
    others = [other for update in region.events_of("update") for other in update.context.guards]
    return any(other.text == guard.text and other.holds is not guard.holds for other in others)


def _is_result(guard: BranchGuard, backward: SourceEvent) -> bool:
    """Whether it tests what the function with the backward returned: which of its ``return``s it was is not known."""
    calls = {frame.call for frame in backward.frame.callers() if frame.call is not None}
    names = [part for part in walk(guard.test) if isinstance(part, ast.Name)] if guard.test is not None else []
    return guard.frame is not None and any(value in calls for name in names for value, _ in guard.frame.values(name))


def _harm(moment: Moment, guard: BranchGuard, region: Region) -> str | None:
    """Return what the rest of the iteration leaves behind, if it has no update."""
    if moment.opaque or any(moment.later("update", "opaque", "optimizer step")):
        return None
    if moment.path.ended == "break" or (moment.path.ended == "return" and region.loop is not None):
        return None  # training ends here
    asked = guard_meaning(guard)
    unscales = [event for event in moment.later("unscale") if event.key != ANYTHING]
    if any(guard not in event.context.guards for event in unscales):
        return "this skips `update` after `unscale_`: the next `unscale_` raises an error"
    if not ASKS_FOR_NAN.search(asked) or any(moment.later("scaler step")):
        return None
    if OF_GRADIENTS.search(asked):
        return "this hides the overflow from the scaler: the loss scale never falls, and every step is skipped"
    if not any([*moment.earlier("zero grad"), *moment.later("zero grad")]) and region.loop is not None:
        return "this leaves gradients that are not finite, and the next backward adds to them"
    return None
