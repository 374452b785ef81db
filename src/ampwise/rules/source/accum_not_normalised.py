"""Accumulation over n micro-batches without dividing the loss by n."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.check.source.accumulation import AccumulationWindow, accumulation_windows
from ampwise.check.source.events import SourceEvent
from ampwise.check.source.loss_normalisation import LossNormalisation
from ampwise.check.source.names import dotted_text
from ampwise.check.source.project import SourceFile
from ampwise.finding import Edit, Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP205",
    name="accum-not-normalised",
    severity=Severity.WARNING,
    summary="Gradients accumulate over n micro-batches, but the loss is not divided by n.",
    why=(
        "`backward()` adds to the gradients. After n micro-batches of a mean loss they are n times those of one large "
        "batch: the effective learning rate is n times larger, clipping to a fixed norm removes n times as much, and "
        "float16 gradients reach their limit of 65504 at an n times smaller loss scale."
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
NEEDS = ((".backward(",), ("autocast", "caler", "float16", ".half("))


def check(code: SourceFile) -> Iterator[Finding]:
    mixed = {one: _is_mixed_precision(one.events()) for one in code.traces}
    for region in code.regions:
        if not mixed[region.trace]:
            continue
        reported: set[SourceEvent] = set()
        for window in accumulation_windows(region):
            backwards = [event for event in _never_divided(window) if event not in reported]
            if backwards:
                reported.update(backwards)
                edits = tuple(edit for event in backwards for edit in _divide(event, window))
                yield RULE.at(
                    backwards[0].place,
                    _message(window),
                    edits=edits if len(edits) == len(backwards) else (),
                    safe=False,  # the effective learning rate changes, as it should
                )


def _message(window: AccumulationWindow) -> str:
    size = "their number" if window.size is None else f"`{ast.unparse(window.size)}`"
    return f"gradients accumulate over several micro-batches, but the loss is not divided by {size}"


def _is_mixed_precision(events: list[SourceEvent]) -> bool:
    return any(event.kind in ("scaled backward", "scaler step") or event.context.in_autocast for event in events)


def _never_divided(window: AccumulationWindow) -> list[SourceEvent]:
    """Return the backward calls of micro-batches that accumulate without a division of the loss.

    If one optimizer applies them all, a single division may be meant for their sum.
    """
    found: dict[SourceEvent, None] = {}
    normalised = LossNormalisation(window)
    several_optimizers = _has_several_optimizers(window)
    for path in window.paths:
        backwards = window.backwards(path)
        if any(event.kind == "zero grad" and _in_window(event, window) for event in path.events):
            continue
        plain = [event for event in backwards if not normalised.may_be(event)]
        if len(plain) == len(backwards) or several_optimizers:
            found.update(dict.fromkeys(plain))
    return sorted(found, key=lambda event: event.line)


def _has_several_optimizers(window: AccumulationWindow) -> bool:
    steps = [event for event in window.region.events if event.kind in ("scaler step", "optimizer step")]
    return len({step.other or step.key for step in steps}) > 1


def _in_window(event: SourceEvent, window: AccumulationWindow) -> bool:
    return window.loop is None or window.loop in event.context.loops


def _divide(event: SourceEvent, window: AccumulationWindow) -> Iterator[Edit]:
    """Yield the edit from ``loss`` to ``loss / n``, if n can be named in the same function."""
    size, loss, script = window.size, event.value, event.frame.outline.script
    loop = window.loop or window.region.loop
    if loop is None or event.frame is not loop.frame or not isinstance(loss, ast.Name) or size is None:
        return
    if dotted_text(size) is None and not isinstance(size, ast.Constant):
        return
    divided = f"{loss.id} / {ast.unparse(size)}"
    call = event.node
    receives = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.value is loss
    yield script.replace(loss, f"({divided})" if receives else divided)
