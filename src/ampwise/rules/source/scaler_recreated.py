"""A GradScaler made anew in every epoch or iteration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.scalers import scalers_made
from ampwise.source.vocabulary import OPTIMIZER
from ampwise.source.walk import events_in

if TYPE_CHECKING:
    from ampwise.source.events import Context, Loop
    from ampwise.source.frame import Frame
    from ampwise.source.project import Code
    from ampwise.source.walk import Trace

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP201",
    name="scaler-recreated",
    severity=Severity.WARNING,
    summary="A GradScaler is made anew each epoch or iteration.",
    why=(
        "The scale and the count towards its growth live in the object. A new one starts at 65536 again: the "
        "first steps of every epoch overflow and are skipped, and a scale that needs 2000 good steps to grow never "
        "does in a short epoch. Made in each iteration it never adapts at all."
    ),
    fix="Make the scaler once, beside the optimizer, and pass it to the function that trains an epoch.",
    bad='for epoch in range(epochs):\n    scaler = torch.amp.GradScaler("cuda")\n    train(model, optimizer, scaler)',
    good='scaler = torch.amp.GradScaler("cuda")\nfor epoch in range(epochs):\n    train(model, optimizer, scaler)',
)

# A function that is called like this, or told the epoch, runs once an epoch or a batch.
RUNS_OFTEN = re.compile(r"epoch|train_step|training_step|train_batch|train_iter|one_step|(^|_)step$|optimize_parameters")
OFTEN_EPOCHS = re.compile(r"epochs|n_epoch|num_epoch|max_epoch")
LR_FINDER = re.compile(r"lr_?find|find_?lr|record_lr|range_test", re.IGNORECASE)
TRAINS = ("backward", "scaled backward", "scaler step", "opaque")


def check(code: Code) -> Iterator[Finding]:
    for made in scalers_made(code):
        if any(_is_made_again(context, trace) for context, trace in made.contexts):
            yield RULE.at(code.script.place(made.node), "this scaler forgets its scale: it is made again and again")


def _is_made_again(context: Context, trace: Trace) -> bool:
    if any(guard.text.startswith("some(") and "scaler" in guard.text and not guard.holds for guard in context.guards):
        return False  # if scaler is None: scaler = GradScaler()
    if any(LR_FINDER.search(frame.function.name) for frame in context.frame.callers()):
        return False
    if any(_trains_on(loop, trace) for loop in context.loops):
        return True
    return not context.loops and _is_called_each_epoch(context.frame, trace)


def _trains_on(loop: Loop, trace: Trace) -> bool:
    """A loop that goes on with one optimizer; one that makes its own starts a new training each time."""
    if not any(event.kind in TRAINS for event in events_in(loop.block)):
        return False
    return not any(loop in site.context.loops and _makes_optimizer(site) for site in trace.calls)


def _is_called_each_epoch(frame: Frame, trace: Trace) -> bool:
    if frame.caller is not None:
        return False  # its callers are known, and none of them is in a loop
    function = frame.function
    often = RUNS_OFTEN.search(function.name) and not OFTEN_EPOCHS.search(function.name)
    told = "epoch" in function.params
    if function.name == "__init__" or not (often or told):
        return False
    trains = any(event.kind in TRAINS for event in trace.events())
    return trains and not any(_makes_optimizer(site) for site in trace.calls)


def _makes_optimizer(site: object) -> bool:
    import ast

    node = site.node  # type: ignore[attr-defined]
    return isinstance(node, ast.Call) and site.context.frame.role_of_call(node) == OPTIMIZER  # type: ignore[attr-defined]
