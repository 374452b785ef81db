"""A GradScaler made anew in every epoch or iteration."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.events import Context, Guard, Loop
from ampwise.source.frame import Frame
from ampwise.source.outline import Function
from ampwise.source.pattern import Pattern
from ampwise.source.project import Code
from ampwise.source.questions import question
from ampwise.source.scalers import scalers_made
from ampwise.source.vocabulary import OPTIMIZER, SCALER
from ampwise.source.walk import Site, Trace, events_in

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
NEEDS = (("GradScaler",), (".backward(", ".step(", "train"))

# A function that is called like this runs once a batch; or once an epoch, as does one that is told the epoch.
EACH_BATCH = Pattern(r"(train|one|training)_(step|batch|iter)|(^|_)step$|optimize_parameters")
EACH_EPOCH = Pattern(r"epoch(?!s)")
LR_FINDER = Pattern(r"lr_?find|find_?lr|record_lr|range_test", re.IGNORECASE)
COUNTS = Pattern(r"epoch|step|iter")
HOLDS_ONCE = Pattern(r"scaler|epoch|step|iter")
TRAINS = ("backward", "scaled backward", "scaler step", "opaque")


def check(code: Code) -> Iterator[Finding]:
    for made in scalers_made(code):
        if any(_is_made_again(context, trace) for context, trace in made.contexts):
            yield RULE.at(code.script.place(made.node), "this scaler forgets its scale: it is made again and again")


def _is_made_again(context: Context, trace: Trace) -> bool:
    if any(_holds_once(guard) for guard in context.guards):
        return False
    if any(LR_FINDER.search(frame.function.name) for frame in context.frame.callers()):
        return False
    if context.frame in _frames_that_load(trace):
        return False  # it goes on where the last one was
    if any(_trains_on(loop, trace) for loop in context.loops):
        return True
    return not context.loops and _is_called_each_epoch(context.frame, trace)


def _holds_once(guard: Guard) -> bool:
    """``if scaler is None``, ``if epoch == 0`` or ``if epoch == first_amp_epoch``."""
    asked = question(guard)
    if guard.text.startswith("some("):
        return not guard.holds and HOLDS_ONCE.search(asked) is not None
    return guard.holds and "==" in asked and COUNTS.search(asked) is not None


@functools.lru_cache(maxsize=64)
def _trains_on(loop: Loop, trace: Trace) -> bool:
    """A loop that goes on with one optimizer; one that makes its own starts a new training each time."""
    if not any(event.kind in TRAINS for event in events_in(loop.block)):
        return False
    return not any(loop in site.context.loops and _makes_optimizer(site) for site in trace.calls)


def _is_called_each_epoch(frame: Frame, trace: Trace) -> bool:
    """Going by its name: nobody in sight calls this function, and it loops no more than such a function does."""
    if frame.caller is not None or frame.function.name == "__init__":
        return False
    most = _loops_expected(frame.function)
    return most is not None and _fewest_loops(trace) <= most and not _makes_some_optimizer(trace)


@functools.lru_cache(maxsize=4)
def _fewest_loops(trace: Trace) -> float:
    """The number of loops around the training that has the fewest; infinite without any training."""
    loops = (len(event.context.loops) for event in trace.events() if event.kind in TRAINS)
    return min(loops, default=float("inf"))


@functools.lru_cache(maxsize=4)
def _makes_some_optimizer(trace: Trace) -> bool:
    return any(_makes_optimizer(site) for site in trace.calls)


def _loops_expected(function: Function) -> int | None:
    """How many loops a function has that is called again and again; None when it is not."""
    if EACH_EPOCH.search(function.name) or "epoch" in function.params:
        return 1
    return 0 if EACH_BATCH.search(function.name) else None


def _makes_optimizer(site: Site) -> bool:
    return isinstance(site.node, ast.Call) and site.context.frame.role_of_call(site.node) == OPTIMIZER


@functools.lru_cache(maxsize=4)
def _frames_that_load(trace: Trace) -> set[Frame]:
    return {site.context.frame for site in trace.calls if _loads_scaler(site)}


def _loads_scaler(site: Site) -> bool:
    func = site.node.func if isinstance(site.node, ast.Call) else None
    if not isinstance(func, ast.Attribute) or func.attr != "load_state_dict":
        return False
    return site.context.frame.role(func.value) == SCALER
