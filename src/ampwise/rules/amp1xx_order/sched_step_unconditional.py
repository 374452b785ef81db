from __future__ import annotations

import ast
import functools
import re
from typing import TYPE_CHECKING

from ampwise.check.source.execution_paths import MOST_PATHS
from ampwise.check.source.frame import PossibleValue
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import dotted_text
from ampwise.check.source.questions import guard_source
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import BranchGuard, ExecutionPath, Loop, SourceEvent, SourceFile
    from ampwise.watch.run_events import SchedulerStep

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
    fix="Step the scheduler only if `scaler.get_scale()` is not smaller after `scaler.update()` than before.",
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


def check_source(code: SourceFile) -> Findings:
    for region in code.visible_regions:
        applied = {guard for event in region.events_of("scaler step") for guard in event.context.guards}
        for step, moments in region.visits("scheduler step"):
            # Both run once per iteration: on the same path and in the same loops.
            follows = any(step.context.loops in _loops_of_scaled_steps(moment.path) for moment in moments)
            # `step(epoch + i / n)` sets a position and `step(loss)` a plateau.
            has_arguments = isinstance(step.node, ast.Call) and bool(step.node.args or step.node.keywords)
            finds_lr = any(LR_FINDER.search(frame.function.name) for frame in step.frame.callers())
            if not follows or has_arguments or finds_lr:
                continue
            asked = (guard for guard in region.own_guards(step) if guard not in applied)
            if not any(
                guard.boundary is not None or _checks_step(guard_source(guard)) or _checks_result(guard, step)
                for guard in asked
            ):
                yield RULE.at(step.place, "the scheduler advances even when the scaler skips the optimizer's step")


@functools.lru_cache(maxsize=MOST_PATHS)  # called for every step on a path
def _loops_of_scaled_steps(path: ExecutionPath) -> set[tuple[Loop, ...]]:
    return {event.context.loops for event in path.events if event.kind == "scaler step"}


def _checks_step(asked: str) -> bool:
    # `if scaler is not None` is not about the step, `scaler.get_scale()` is.
    without_scaler = re.sub(r"\w*scaler\b(?!\.)", "", asked)
    return bool(ONCE_PER_EPOCH.search(asked) or CHECKS_STEP.search(without_scaler))


def _checks_result(guard: BranchGuard, step: SourceEvent) -> bool:
    """Return whether it tests a result, ``ok = torch.isfinite(norm)``, or what a call that takes the step returns."""
    for frame in step.frame.callers():
        for value in [PossibleValue(guard.test, frame), *frame.values(guard.test)] if guard.test is not None else ():
            if isinstance(value.node, ast.Call):
                called = (dotted_text(value.node.func) or "").rpartition(".")[2]
                target = value.frame.callee(value.node)
                reports = target is not None and REPORTS_STEP.search(target[0].text)
                if called == "step" or reports or _checks_step(ast.unparse(value.node)):
                    return True
    return False


def check_event(move: SchedulerStep) -> Findings:
    if move.after_skip and move.per_step:
        warned = "; hence torch's warning" if move.before_any_update else ""
        yield RULE.at(move.site.place, f"`{move.scheduler}` advances after steps that the scaler skipped{warned}")
