from __future__ import annotations

import ast
import functools
import re
from typing import TYPE_CHECKING, NamedTuple

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.questions import guard_source
from ampwise.check.source.scalers import scalers_made
from ampwise.check.source.torch_names import OPTIMIZER, SCALER
from ampwise.check.source.walk import events_in
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import BranchGuard, CodeTrace, EventContext, Frame, Loop, SourceFile
    from ampwise.watch.run_events import ScalerCreated

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


def check_source(code: SourceFile) -> Findings:
    for made in scalers_made(code):
        if any(_is_made_again(context, trace) for context, trace in made.contexts):
            yield RULE.at(code.script.place(made.node), "this scaler is recreated repeatedly and loses its scale")


def _is_made_again(context: EventContext, trace: CodeTrace) -> bool:
    frame, function, training = context.frame, context.frame.function, _training(trace)
    if any(_holds_once(guard) for guard in context.guards) or frame in training.loading:
        return False  # it is the only one, or continues with the saved scale
    if any(LR_FINDER.search(caller.function.name) for caller in frame.callers()):
        return False
    if context.loops or frame.caller is not None or function.name == "__init__":
        return any(_trains_on(loop, trace) for loop in context.loops)
    # No visible caller: judging by its name and loops, it runs once per epoch, or once per batch.
    each_epoch = EACH_EPOCH.search(function.name) or "epoch" in function.params
    most = 1 if each_epoch else 0 if EACH_BATCH.search(function.name) else -1
    return training.fewest_loops <= most and not training.optimizer_loops


def _holds_once(guard: BranchGuard) -> bool:
    """Return whether the guard holds only once: ``if scaler is None``, ``if epoch == 0``."""
    asked = guard_source(guard)
    if guard.text.startswith("some("):
        return not guard.holds and HOLDS_ONCE.search(asked) is not None
    return guard.holds and "==" in asked and COUNTS.search(asked) is not None


class _Training(NamedTuple):
    """What a trace does around its scalers."""

    fewest_loops: float  # around any training; infinite without training
    optimizer_loops: list[tuple[Loop, ...]]  # around each call that makes an optimizer
    loading: set[Frame]  # frames that load the state of a scaler


@functools.lru_cache(maxsize=4)
def _training(trace: CodeTrace) -> _Training:
    optimizer_loops, loading = [], set()
    for site in trace.calls:
        call, frame = site.call, site.context.frame
        if frame.role_of_call(call) == OPTIMIZER:
            optimizer_loops.append(site.context.loops)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "load_state_dict":
            loading.update([frame] if frame.role(call.func.value) == SCALER else [])
    loops = (len(event.context.loops) for event in trace.events() if event.kind in TRAINS)
    return _Training(min(loops, default=float("inf")), optimizer_loops, loading)


@functools.lru_cache(maxsize=64)
def _trains_on(loop: Loop, trace: CodeTrace) -> bool:
    """Return whether a loop keeps training with one optimizer; one that creates its own starts a new training."""
    trains = any(event.kind in TRAINS for event in events_in(loop.block))
    return trains and not any(loop in loops for loops in _training(trace).optimizer_loops)


def check_event(made: ScalerCreated) -> Findings:
    if made.stepped_before and made.enabled:
        yield RULE.at(
            made.site.place,
            "a GradScaler is created here again, after the previous one took steps: its scale is reset",
        )
