"""A scheduler that is stepped even when the scaler skips the optimizer step."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from ampwise.check.source.events import BranchGuard, Loop, SourceEvent
from ampwise.check.source.execution_paths import MOST_PATHS, ExecutionPath
from ampwise.check.source.frame import PossibleValue
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import dotted_text
from ampwise.check.source.project import SourceFile
from ampwise.check.source.questions import guard_source
from ampwise.check.source.steps import Moment, Region
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP114",
    name="sched-step-unconditional",
    severity=Severity.INFO,
    summary="A per-iteration scheduler is stepped even when the scaler skipped the optimizer step.",
    why=(
        "`scaler.step(optimizer)` does nothing when it finds inf, which is normal in the first iterations while the "
        "scale is found. A scheduler that is stepped anyway runs ahead of the optimizer: warm-up is shortened by the "
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

# A condition with any of these checks whether the step was applied.
CHECKS_STEP = LazyPattern(
    r"scale|skip|overflow|found_inf|isfinite|isnan|isinf|applied|did_step|stepped|finite|step_count|was_run|fired|success"
)
REPORTS_STEP = LazyPattern(r"get_scale|skip|overflow|found_inf|finite|isnan|isinf|applied|stepped|step_count")
ONCE_PER_EPOCH = LazyPattern(r"==.*\blen\(|\blen\(.*==")  # if i == len(loader) - 1
LR_FINDER = LazyPattern(r"lr_?find|find_?lr|record_lr|range_test|lr_range", re.IGNORECASE)


def check(code: SourceFile) -> Iterator[Finding]:
    for region in code.regions:
        if region.hidden:
            continue
        for step, moments in region.visits("scheduler step"):
            if any(_follows_a_scaled_step(moment) for moment in moments) and not _is_conditional(step, region):
                yield RULE.at(step.place, "the scheduler advances even when the scaler skips the optimizer's step")


def _follows_a_scaled_step(moment: Moment) -> bool:
    """Return whether the scaler's step is on the same path and in the same loops, so both run once per iteration."""
    return moment.event.context.loops in _loops_of_scaled_steps(moment.path)


@functools.lru_cache(maxsize=MOST_PATHS)  # called for every step on a path
def _loops_of_scaled_steps(path: ExecutionPath) -> set[tuple[Loop, ...]]:
    return {event.context.loops for event in path.events if event.kind == "scaler step"}


def _is_conditional(step: SourceEvent, region: Region) -> bool:
    """Return whether this step is conditional on the optimizer step, or does not count iterations."""
    if _given_a_position(step) or any(LR_FINDER.search(frame.function.name) for frame in step.frame.callers()):
        return True
    applied = _guards_of_scaled_steps(region)
    asked = [guard for guard in region.own_guards(step) if guard not in applied]
    return any(
        guard.boundary is not None or _checks_step(guard_source(guard)) or _checks_result(guard, step)
        for guard in asked
    )


@functools.lru_cache(maxsize=2)
def _guards_of_scaled_steps(region: Region) -> set[BranchGuard]:
    return {guard for event in region.events if event.kind == "scaler step" for guard in event.context.guards}


def _checks_result(guard: BranchGuard, step: SourceEvent) -> bool:
    """Return whether the guard tests a result: ``ok = torch.isfinite(norm)``, or a call that takes the step and returns
    it.
    """
    test = guard.test
    for frame in step.frame.callers():
        for value in [PossibleValue(test, frame), *frame.values(test)] if test is not None else ():
            if isinstance(value.node, ast.Call) and (_checks_step(ast.unparse(value.node)) or _returns_result(value)):
                return True
    return False


def _returns_result(value: PossibleValue) -> bool:
    """Return whether a call takes the step and reports its outcome: ``applied = apply(optimizer, scaler)``."""
    assert isinstance(value.node, ast.Call)
    called = (dotted_text(value.node.func) or "").rpartition(".")[2]
    target = value.frame.callee(value.node)
    return called == "step" or (target is not None and REPORTS_STEP.search(target[0].text) is not None)


def _checks_step(asked: str) -> bool:
    return bool(ONCE_PER_EPOCH.search(asked) or CHECKS_STEP.search(_without_scaler(asked)))


def _without_scaler(text: str) -> str:
    """Remove bare scaler names: ``if scaler is not None`` is not about the step, ``scaler.get_scale()`` is."""
    return re.sub(r"\w*scaler\b(?!\.)", "", text)


def _given_a_position(step: SourceEvent) -> bool:
    """Return whether the call has arguments: ``step(epoch + i / n)`` sets a position and ``step(loss)`` a plateau."""
    return isinstance(step.node, ast.Call) and bool(step.node.args or step.node.keywords)
