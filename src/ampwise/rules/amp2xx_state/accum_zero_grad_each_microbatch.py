from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.accelerators import cleared_while_accumulating
from ampwise.check.source.accumulation import events_of_each_micro_batch, optimizer_of
from ampwise.check.source.guards import guards_of
from ampwise.check.source.names import code_of, dotted_text, method_called
from ampwise.check.source.precision import argument_of
from ampwise.check.source.steps import BACKWARDS
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import AccumulationWindow, SourceEvent, SourceFile
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
    (".backward(", "update_grad="),
    ("zero_grad", "grad = None"),
    ("autocast", "caler", "float16", ".half(", "mixed_precision"),
)

WHOLE_MODEL = frozenset(("model", "net", "network"))
FEWEST = 3  # steps; dropping the gradients of a bad batch is rarer


def check_source(code: SourceFile) -> Findings:
    for event in events_of_each_micro_batch(code, "zero grad", _clears_what_accumulates):
        yield RULE.at(event.place, "this discards the gradients of the earlier micro-batches")
    for call in _cleared_before_wrapper(code):
        yield RULE.at(code.script.place(call), "this discards the gradients of the earlier micro-batches")
    for call in cleared_while_accumulating(code):
        yield RULE.at(
            code.script.place(call),
            "in the last micro-batch, this discards the gradients of the earlier ones",
            fix="Call `optimizer.zero_grad()` after `optimizer.step()`; in other micro-batches it then does nothing.",
        )


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


def _cleared_before_wrapper(code: SourceFile) -> Iterator[ast.Call]:
    """Yield each ``zero_grad()`` in the block before ``loss_scaler(loss, optimizer, update_grad=i % n == 0)``."""
    for call in code.nodes(ast.Call) if "update_grad=" in code.script.text else ():
        last, frame = argument_of(call, "update_grad"), code.frame(code.function_at(call))
        if last is None or len(call.args) < 2 or not any(g.boundary for g in guards_of(last, frame)[0]):
            continue
        optimizer = code_of(call.args[1])
        statement: ast.AST = code.script.statement(call)
        while not isinstance(statement, ast.For | ast.While | ast.FunctionDef | ast.Module):
            above = code.script.parents[statement]
            for each in getattr(above, "body", []):
                cleared = getattr(each, "value", None)
                before = each.lineno < call.lineno and method_called(cleared) == "zero_grad"
                if before and isinstance(cleared, ast.Call) and code_of(cleared.func) == f"{optimizer}.zero_grad":
                    yield cleared
            statement = above


def check_run(run: RunEvents) -> Findings:
    for site, steps in run.dropped.items():
        if steps >= FEWEST and 2 * steps >= run.steps:
            yield RULE.at(
                site.place,
                f"`zero_grad` discarded gradients that no step had used, before {steps} of {run.steps} steps",
                evidence={"times": steps, "steps": run.steps},
            )
