from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.accelerators import cleared_while_accumulating
from ampwise.check.source.accumulation import (
    ACCUMULATES,
    accumulation_windows,
    cleared_before_the_last,
    events_of_each_micro_batch,
    optimizer_of,
)
from ampwise.check.source.names import code_of, dotted_text
from ampwise.check.source.steps import BACKWARDS, STEPS
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import AccumulationWindow, Region, SourceEvent, SourceFile
    from ampwise.watch.run_events import RunEvents

RULE = Rule(
    code="AMP206",
    name="accum-zero-grad-each-microbatch",
    severity=Severity.WARNING,
    summary="`zero_grad` runs on every micro-batch, so nothing accumulates.",
    why=(
        "The step is taken after n micro-batches, but only the gradients of the last one remain: n - 1 of n backward "
        "passes are wasted, the effective batch is n times smaller than intended, and if the loss is divided by n, so "
        "is the update."
    ),
    fix="Call `optimizer.zero_grad()` right after the step, in the branch that takes it.",
    bad=(
        "optimizer.zero_grad()\nscaler.scale(loss / n).backward()\nif (i + 1) % n == 0:\n"
        "    scaler.step(optimizer)\n    scaler.update()"
    ),
    good=(
        "scaler.scale(loss / n).backward()\nif (i + 1) % n == 0:\n    scaler.step(optimizer)\n"
        "    scaler.update()\n    optimizer.zero_grad()"
    ),
)
NEEDS = (
    (".backward(", "update_grad=", "need_update="),
    ("zero_grad", "grad = None"),
    ("autocast", "caler", "float16", ".half(", "mixed_precision"),
)

WHOLE_MODEL = frozenset(("model", "net", "network"))
LAST = "in the last micro-batch, this discards the gradients of the earlier ones"
FEWEST = 3  # steps; dropping the gradients of a bad batch is rarer


def check_source(code: SourceFile) -> Findings:
    for event in events_of_each_micro_batch(code, "zero grad", _clears_what_accumulates):
        yield RULE.at(event.place, "this discards the gradients of the earlier micro-batches")
    last = {event.node: event for region in code.regions for event in _cleared_in(region)}
    for event in last.values():
        yield RULE.at(event.place, LAST, fix="Call `optimizer.zero_grad()` after `optimizer.step()`, not before.")
    for event, size in _applied_each_time(code):
        yield RULE.at(
            event.place,
            f"the gradients are applied and cleared in every micro-batch, although `{size}` of them share a clip",
            fix="Step, update and clear only after the last micro-batch, under the condition that the clip has.",
        )
    for call in cleared_while_accumulating(code):
        yield RULE.at(
            code.script.place(call),
            LAST,
            fix="Call `optimizer.zero_grad()` after `optimizer.step()`; in other micro-batches it then does nothing.",
        )


def _cleared_in(region: Region) -> Iterator[SourceEvent]:
    for window in accumulation_windows(region) if region.has("zero grad") else ():
        yield from cleared_before_the_last(window)


def _applied_each_time(code: SourceFile) -> Iterator[tuple[SourceEvent, str]]:
    """Yield each clear of micro-batches whose loss is divided by n, of which only the n-th clips: each has a step."""
    for region in code.regions:
        clips = [event for event in region.events_of("clip", "unscale") if not region.inner_loops(event)]
        sizes = dict.fromkeys(guard.boundary for event in clips for guard in region.own_guards(event) if guard.boundary)
        applied = region.events_of(*STEPS, "update")
        for size in sizes if region.loop is not None and applied and region.has("scaled backward") else ():
            if size is None or not ACCUMULATES.search(size) or not _divides_by(size, region):
                continue
            cleared = [event for event in region.events_of("zero grad") if not region.inner_loops(event)]
            all_of_them = [*region.events_of(*BACKWARDS), *applied, *cleared]
            if cleared and not any(guard.boundary for event in all_of_them for guard in region.own_guards(event)):
                yield cleared[-1], size


def _divides_by(size: str, region: Region) -> bool:
    """Return whether the loop has a division by the number of micro-batches."""
    parts = walk(region.loop.node) if region.loop is not None else ()
    divisions = [part for part in parts if isinstance(part, ast.BinOp | ast.AugAssign) and isinstance(part.op, ast.Div)]
    divisors = [part.right if isinstance(part, ast.BinOp) else part.value for part in divisions]
    return any(code_of(each) == size for each in divisors)


def _clears_what_accumulates(event: SourceEvent, window: AccumulationWindow) -> bool:
    """Return whether this clears an optimizer that is stepped, or the whole model."""
    optimizers = window.optimizers
    if not isinstance(event.node, ast.Call) or window.further_guards(event):
        return False
    clears_stepped = event.key is not None and event.key in optimizers
    if len(optimizers) != 1:
        return clears_stepped and _all_before_its_step_accumulate(event, window)
    model, models = dotted_text(event.receiver) or "", event.frame.outline.models
    is_only_model = model in models and len(models) == 1
    return clears_stepped or is_only_model or model.rpartition(".")[2] in WHOLE_MODEL


def _all_before_its_step_accumulate(event: SourceEvent, window: AccumulationWindow) -> bool:
    """Return whether no backward between this and the step belongs to some micro-batches alone, as a critic's may."""
    last_ones: list[SourceEvent] = []
    for path in window.region.paths if event in window.steady([event]) else ():
        start = path.events.index(event) if event in path.events else len(path.events)
        waiting: list[SourceEvent] = []
        for later in path.events[start:]:
            if later.kind in BACKWARDS:
                waiting.append(later)
            elif later in window.steps and optimizer_of(later) == event.key:
                last_ones += waiting
    return bool(last_ones) and set(last_ones) <= set(window.steady(window.backwards))


def check_run(run: RunEvents) -> Findings:
    for site, steps in run.dropped.items():
        if steps >= FEWEST and 2 * steps >= run.steps:
            yield RULE.at(
                site.place,
                f"`zero_grad` discarded gradients that no step had used, before {steps} of {run.steps} steps",
                evidence={"times": steps, "steps": run.steps},
            )
