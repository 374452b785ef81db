from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampwise.check.source.accumulation import events_of_each_micro_batch
from ampwise.check.source.names import dotted_text
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
NEEDS = ((".backward(",), ("zero_grad", "grad = None"), ("autocast", "caler", "float16", ".half("))

WHOLE_MODEL = frozenset(("model", "net", "network"))
FEWEST = 3  # steps; dropping the gradients of a bad batch is rarer


def check_source(code: SourceFile) -> Findings:
    for event in events_of_each_micro_batch(code, "zero grad", _clears_what_accumulates):
        yield RULE.at(event.place, "this discards the gradients of the earlier micro-batches")


def _clears_what_accumulates(event: SourceEvent, window: AccumulationWindow) -> bool:
    """Return whether this clears the only optimizer that is stepped, or the whole model."""
    optimizers = window.optimizers
    if len(optimizers) != 1 or not isinstance(event.node, ast.Call) or window.further_guards(event):
        return False
    clears_stepped = event.key is not None and event.key in optimizers
    model, models = dotted_text(event.receiver) or "", event.frame.outline.models
    is_only_model = model in models and len(models) == 1
    return clears_stepped or is_only_model or model.rpartition(".")[2] in WHOLE_MODEL


def check_run(run: RunEvents) -> Findings:
    for site, steps in run.dropped.items():
        if steps >= FEWEST and 2 * steps >= run.steps:
            yield RULE.at(
                site.place,
                f"`zero_grad` discarded gradients that no step had used, before {steps} of {run.steps} steps",
                evidence={"times": steps, "steps": run.steps},
            )
