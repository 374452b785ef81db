"""A GradScaler that is recreated every epoch or iteration."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from ampwise.check.source.events import BranchGuard, EventContext, Loop
from ampwise.check.source.frame import Frame
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.outline import FunctionOutline
from ampwise.check.source.project import SourceFile
from ampwise.check.source.questions import guard_source
from ampwise.check.source.scalers import scalers_made
from ampwise.check.source.torch_names import OPTIMIZER, SCALER
from ampwise.check.source.walk import CodeSite, CodeTrace, events_in
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP201",
    name="scaler-recreated",
    severity=Severity.WARNING,
    summary="A GradScaler is recreated every epoch or iteration.",
    why=(
        "The scale and its growth counter live in the object. A new scaler starts at 65536 again: the first steps of "
        "every epoch overflow and are skipped, and a scale that needs 2000 good steps to grow never does in a short "
        "epoch. Created in each iteration, it never adapts at all."
    ),
    fix="Create the scaler once, next to the optimizer, and pass it to the function that trains an epoch.",
    bad='for epoch in range(epochs):\n    scaler = torch.amp.GradScaler("cuda")\n    train(model, optimizer, scaler)',
    good='scaler = torch.amp.GradScaler("cuda")\nfor epoch in range(epochs):\n    train(model, optimizer, scaler)',
)
NEEDS = (("GradScaler",), (".backward(", ".step(", "train"))

# A function with such a name runs once per batch or once per epoch, as does one with an epoch parameter.
EACH_BATCH = LazyPattern(r"(train|one|training)_(step|batch|iter)|(^|_)step$|optimize_parameters")
EACH_EPOCH = LazyPattern(r"epoch(?!s)")
LR_FINDER = LazyPattern(r"lr_?find|find_?lr|record_lr|range_test", re.IGNORECASE)
COUNTS = LazyPattern(r"epoch|step|iter")
HOLDS_ONCE = LazyPattern(r"scaler|epoch|step|iter")
TRAINS = ("backward", "scaled backward", "scaler step", "opaque")


def check(code: SourceFile) -> Iterator[Finding]:
    for made in scalers_made(code):
        if any(_is_made_again(context, trace) for context, trace in made.contexts):
            yield RULE.at(code.script.place(made.node), "this scaler is recreated repeatedly and loses its scale")


def _is_made_again(context: EventContext, trace: CodeTrace) -> bool:
    if any(_holds_once(guard) for guard in context.guards):
        return False
    if any(LR_FINDER.search(frame.function.name) for frame in context.frame.callers()):
        return False
    if context.frame in _frames_that_load(trace):
        return False  # it continues with the saved scale
    if any(_trains_on(loop, trace) for loop in context.loops):
        return True
    return not context.loops and _is_called_each_epoch(context.frame, trace)


def _holds_once(guard: BranchGuard) -> bool:
    """Return whether the guard holds only once: ``if scaler is None``, ``if epoch == 0``, ``if epoch ==
    first_amp_epoch``.
    """
    asked = guard_source(guard)
    if guard.text.startswith("some("):
        return not guard.holds and HOLDS_ONCE.search(asked) is not None
    return guard.holds and "==" in asked and COUNTS.search(asked) is not None


@functools.lru_cache(maxsize=64)
def _trains_on(loop: Loop, trace: CodeTrace) -> bool:
    """Return whether a loop keeps training with one optimizer; a loop that creates its own starts a new training each
    time.
    """
    if not any(event.kind in TRAINS for event in events_in(loop.block)):
        return False
    return not any(loop in site.context.loops and _makes_optimizer(site) for site in trace.calls)


def _is_called_each_epoch(frame: Frame, trace: CodeTrace) -> bool:
    """Return whether the function, judging by its name and loops, runs once per epoch; it has no visible caller."""
    if frame.caller is not None or frame.function.name == "__init__":
        return False
    most = _loops_expected(frame.function)
    return most is not None and _fewest_loops(trace) <= most and not _makes_some_optimizer(trace)


@functools.lru_cache(maxsize=4)
def _fewest_loops(trace: CodeTrace) -> float:
    """Return the smallest number of loops around any training; infinite without training."""
    loops = (len(event.context.loops) for event in trace.events() if event.kind in TRAINS)
    return min(loops, default=float("inf"))


@functools.lru_cache(maxsize=4)
def _makes_some_optimizer(trace: CodeTrace) -> bool:
    return any(_makes_optimizer(site) for site in trace.calls)


def _loops_expected(function: FunctionOutline) -> int | None:
    """Return how many loops a function called per epoch or batch has; None for other functions."""
    if EACH_EPOCH.search(function.name) or "epoch" in function.params:
        return 1
    return 0 if EACH_BATCH.search(function.name) else None


def _makes_optimizer(site: CodeSite) -> bool:
    return isinstance(site.node, ast.Call) and site.context.frame.role_of_call(site.node) == OPTIMIZER


@functools.lru_cache(maxsize=4)
def _frames_that_load(trace: CodeTrace) -> set[Frame]:
    return {site.context.frame for site in trace.calls if _loads_scaler(site)}


def _loads_scaler(site: CodeSite) -> bool:
    func = site.node.func if isinstance(site.node, ast.Call) else None
    if not isinstance(func, ast.Attribute) or func.attr != "load_state_dict":
        return False
    return site.context.frame.role(func.value) == SCALER
