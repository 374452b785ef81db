"""A scheduler stepped each iteration, also when the scaler skipped the optimizer's step."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.events import Event, Guard, Loop
from ampwise.source.frame import Value
from ampwise.source.names import dotted_text
from ampwise.source.paths import MOST_PATHS, Path
from ampwise.source.pattern import Pattern
from ampwise.source.project import Code
from ampwise.source.questions import question
from ampwise.source.steps import Moment, Region

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP114",
    name="sched-step-unconditional",
    severity=Severity.INFO,
    summary="A per-iteration scheduler is stepped even when the scaler skipped the optimizer step.",
    why=(
        "`scaler.step(optimizer)` does nothing when it finds infs, which is normal in the first iterations while "
        "the scale is found. A scheduler stepped all the same runs ahead of the optimizer: warm-up shortens by the "
        "number of skipped steps, and torch warns that `lr_scheduler.step()` came before `optimizer.step()`."
    ),
    fix=(
        "Step the scheduler only if the scale did not shrink:\n"
        "scale = scaler.get_scale()\nscaler.update()\nif scaler.get_scale() >= scale:\n    scheduler.step()"
    ),
    bad="scaler.step(optimizer)\nscaler.update()\nscheduler.step()",
    good=(
        "scaler.step(optimizer)\nscale = scaler.get_scale()\nscaler.update()\n"
        "if scaler.get_scale() >= scale:\n    scheduler.step()"
    ),
)
NEEDS = (("caler",), (".backward(",), (".step(",))

# Asking any of these is asking whether the step was applied.
ASKS_ABOUT_THE_STEP = Pattern(
    r"scale|skip|overflow|found_inf|isfinite|isnan|isinf|applied|did_step|stepped|finite|step_count|was_run|fired|success"
)
LOOKS_AT_THE_STEP = Pattern(r"get_scale|skip|overflow|found_inf|finite|isnan|isinf|applied|stepped|step_count")
ONCE_AN_EPOCH = Pattern(r"==.*\blen\(|\blen\(.*==")  # if i == len(loader) - 1
LR_FINDER = Pattern(r"lr_?find|find_?lr|record_lr|range_test|lr_range", re.IGNORECASE)


def check(code: Code) -> Iterator[Finding]:
    for region in code.regions:
        if region.hidden:
            continue
        for step, moments in region.visits("scheduler step"):
            if any(_follows_a_scaled_step(moment) for moment in moments) and not _knows(step, region):
                yield RULE.at(step.place, "the scheduler moves on even when the scaler skips the optimizer's step")


def _follows_a_scaled_step(moment: Moment) -> bool:
    """The scaler's step is taken on the same path, so it is once an iteration, like this."""
    return moment.event.context.loops in _loops_of_scaled_steps(moment.path)


@functools.lru_cache(maxsize=MOST_PATHS)  # every step on a path asks
def _loops_of_scaled_steps(path: Path) -> set[tuple[Loop, ...]]:
    return {event.context.loops for event in path.events if event.kind == "scaler step"}


def _knows(step: Event, region: Region) -> bool:
    """Whether this step is told when to stay away, or is not one of those that count iterations."""
    if _given_a_position(step) or any(LR_FINDER.search(frame.function.name) for frame in step.frame.callers()):
        return True
    applied = _guards_of_scaled_steps(region)
    asked = [guard for guard in region.own_guards(step) if guard not in applied]
    return any(guard.boundary is not None or _tells(question(guard)) or _was_told(guard, step) for guard in asked)


@functools.lru_cache(maxsize=2)
def _guards_of_scaled_steps(region: Region) -> set[Guard]:
    return {guard for event in region.events if event.kind == "scaler step" for guard in event.context.guards}


def _was_told(guard: Guard, step: Event) -> bool:
    """``ok = torch.isfinite(norm)`` and then ``if ok:``; ``if apply(optimizer, scaler):`` where that returns it."""
    test = guard.test
    for frame in step.frame.callers():
        for value in [Value(test, frame), *frame.values(test)] if test is not None else ():
            if isinstance(value.node, ast.Call) and (_tells(ast.unparse(value.node)) or _answers(value)):
                return True
    return False


def _answers(value: Value) -> bool:
    """Whether a call takes the step itself, and says something about it: ``applied = apply(optimizer, scaler)``."""
    assert isinstance(value.node, ast.Call)
    called = (dotted_text(value.node.func) or "").rpartition(".")[2]
    target = value.frame.callee(value.node)
    return called == "step" or (target is not None and LOOKS_AT_THE_STEP.search(target[0].text) is not None)


def _tells(asked: str) -> bool:
    return bool(ONCE_AN_EPOCH.search(asked) or ASKS_ABOUT_THE_STEP.search(_without_scaler(asked)))


def _without_scaler(text: str) -> str:
    """``if scaler is not None`` asks for a scaler, not about a step; ``scaler.get_scale()`` does."""
    return re.sub(r"\w*scaler\b(?!\.)", "", text)


def _given_a_position(step: Event) -> bool:
    """``scheduler.step(epoch + i / n)`` sets a position, and ``step(loss)`` a plateau: nothing runs ahead."""
    return isinstance(step.node, ast.Call) and bool(step.node.args or step.node.keywords)
