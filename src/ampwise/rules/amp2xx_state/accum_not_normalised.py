from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.accumulation import accumulation_windows, cleared_before_the_last
from ampwise.check.source.events import EventKind
from ampwise.check.source.line_references import spot
from ampwise.check.source.loss_normalisation import LossNormalisation
from ampwise.check.source.names import dotted_text
from ampwise.check.source.steps import BACKWARDS
from ampwise.finding import Edit, Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import AccumulationWindow, SourceEvent, SourceFile
    from ampwise.watch.run_events import OptimizerStep, ScalerStep

RULE = Rule(
    code="AMP205",
    name="accum-not-normalised",
    severity=Severity.WARNING,
    summary="Gradients accumulate over n micro-batches, but the loss is not divided by n.",
    why=(
        "`backward()` adds to the gradients. After n micro-batches of a mean loss they are n times those of one large "
        "batch. With SGD the effective learning rate is n times larger. Adam and AdamW divide by the size of the "
        "gradients and notice the factor only through `eps` and Adam's own weight decay. With any optimizer, clipping "
        "to a fixed norm removes n times as much, and float16 gradients reach their limit of 65504 at an n times "
        "smaller loss scale."
    ),
    fix="Divide the loss by the number of micro-batches: `scaler.scale(loss / n).backward()`.",
    bad=(
        "scaler.scale(loss).backward()\nif (i + 1) % n == 0:\n    scaler.step(optimizer)\n"
        "    scaler.update()\n    optimizer.zero_grad()"
    ),
    good=(
        "scaler.scale(loss / n).backward()\nif (i + 1) % n == 0:\n    scaler.step(optimizer)\n"
        "    scaler.update()\n    optimizer.zero_grad()"
    ),
    fixable="sometimes",
)
NEEDS = (
    (".backward(", "update_grad=", "need_update="),
    ("autocast", "caler", "loat16", ".half(", "fp16", "FP16", "bf16", "loss_scal", "MixedPrecision"),
)

LONGEST_CALL = 60  # characters of a backward to show in the advice


def check_source(code: SourceFile) -> Findings:
    reported: set[ast.expr] = set()
    for region in code.regions:
        for window in accumulation_windows(region):
            backwards = [event for event in _never_divided(window) if event.node not in reported]
            if backwards:
                reported.update([event.node for event in backwards])
                edits = tuple(edit for event in backwards for edit in _divide(event, window))
                edits = edits if len(edits) == len(backwards) else ()
                size = "their number" if window.size is None else f"`{ast.unparse(window.size)}`"
                loop, evidence = window.loop or window.region.loop, {}
                if loop is not None:
                    head = loop.node.test if isinstance(loop.node, ast.While) else loop.node.iter
                    evidence["loop"] = loop.frame.outline.script.place(head).as_dict()
                # One finding for each function: those of two branches are mistakes of their own.
                for first in {event.frame.function: event for event in reversed(backwards)}.values():
                    where = ""
                    if loop is not None and loop.frame is not first.frame:  # a helper that many may call
                        where = f", in the loop of {spot(loop.node, loop.frame, first.place)}"
                    yield RULE.at(
                        first.place,
                        f"gradients accumulate over several micro-batches{where}, but the loss is not divided by "
                        f"{size}",
                        evidence=evidence if where else {},
                        fix=_advice(first, window)
                        if edits
                        else RULE.without_edit(_obstacle(first, window), _advice(first, window)),
                        edits=edits,
                        safe=False,  # the size of the gradients changes, as it should
                    )


def _never_divided(window: AccumulationWindow) -> list[SourceEvent]:
    """Return the backward calls of micro-batches that accumulate without a division of the loss.

    If one optimizer applies them all, a single division may be meant for their sum.
    """
    if cleared_before_the_last(window):
        return []  # nothing accumulates
    found: dict[SourceEvent, None] = {}
    normalised = LossNormalisation(window)
    own = set(window.backwards)
    for path in window.paths:
        if not any(map(window.concerns, window.events_on(path, "zero grad"))):
            backwards = [event for event in window.events_on(path, *BACKWARDS) if event in own]
            plain = [event for event in backwards if not normalised.may_be(event)]
            if len(plain) == len(backwards) or len(window.optimizers) > 1:
                found.update(dict.fromkeys(plain))
    return sorted(found, key=lambda event: event.line)


def _advice(event: SourceEvent, window: AccumulationWindow) -> str | None:
    """Return the advice with this script's own backward, if it is short; None for the rule's, with a scaler."""
    script, loss = event.frame.outline.script, event.value
    call = script.segment(event.node)
    if loss is None or loss not in ast.walk(event.node) or not isinstance(loss, ast.Name) or len(call) > LONGEST_CALL:
        is_plain = event.kind == EventKind.BACKWARD
        return "Divide the loss by the number of micro-batches: `(loss / n).backward()`." if is_plain else None
    (line, column), loop = script.span(loss)[0], window.loop or window.region.loop
    start = script.offset(line, column) - script.offset(*script.span(event.node)[0])
    is_near = loop is not None and loop.frame is event.frame
    size = (dotted_text(window.size) if is_near and window.size is not None else None) or "n"
    divided = f"({loss.id} / {size})" if event.receiver is loss else f"{loss.id} / {size}"
    return f"Divide the loss by the number of micro-batches: `{call[:start]}{divided}{call[start + len(loss.id) :]}`."


def _obstacle(event: SourceEvent, window: AccumulationWindow) -> str:
    """Return why this backward has no edit, or another one of the same step."""
    loop = window.loop or window.region.loop
    if loop is None or event.frame is not loop.frame:
        return "the loop is in another function"
    if window.size is None or not (dotted_text(window.size) is not None or isinstance(window.size, ast.Constant)):
        return "the number of micro-batches has no name here"
    return "not every loss of this step is a plain name"


def _divide(event: SourceEvent, window: AccumulationWindow) -> Iterator[Edit]:
    """Yield the edit from ``loss`` to ``loss / n``, if n can be named in the same function."""
    size, loss, loop = window.size, event.value, window.loop or window.region.loop
    if loop is None or event.frame is not loop.frame or not isinstance(loss, ast.Name) or size is None:
        return
    if dotted_text(size) is not None or isinstance(size, ast.Constant):
        divided = f"{loss.id} / {ast.unparse(size)}"
        yield event.frame.outline.script.replace(loss, f"({divided})" if event.receiver is loss else divided)


def check_event(step: OptimizerStep | ScalerStep) -> Findings:
    for backward in step.undivided:
        yield RULE.at(
            backward.site.place,
            f"{step.backwards} backward passes accumulate before the step at {step.site.short}, each of an undivided "
            f"mean: gradients are {step.backwards} times too large",
            evidence={"backward_passes": step.backwards},
        )
