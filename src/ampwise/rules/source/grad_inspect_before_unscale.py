"""Gradients read, to be logged or compared, while they are still multiplied by the loss scale."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.events import Event
from ampwise.source.outline import Function
from ampwise.source.pattern import Pattern
from ampwise.source.project import Code
from ampwise.source.steps import Moment

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP102",
    name="grad-inspect-before-unscale",
    severity=Severity.WARNING,
    summary="Gradients are measured before `scaler.unscale_`.",
    why=(
        "After `scaler.scale(loss).backward()` every gradient is multiplied by the loss scale, 65536 at the start. A "
        "norm read there is that much too large, jumps when the scale changes, and cannot be compared with a "
        "threshold or with a float32 run."
    ),
    fix="Call `scaler.unscale_(optimizer)` first; `scaler.step` then does not unscale again.",
    bad=(
        "scaler.scale(loss).backward()\nnorm = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5\n"
        "scaler.step(optimizer)\nscaler.update()"
    ),
    good=(
        "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\n"
        "norm = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5\nscaler.step(optimizer)\nscaler.update()"
    ),
)
NEEDS = (("caler",), (".backward(",), (".grad",))

# What makes a number of a gradient; a view or a copy may go anywhere.
MEASURES = frozenset(["norm", "mean", "std", "var", "max", "min", "sum", "item", "histogram", "histc", "pow", "square"])
TORCH_MEASURES = frozenset(["norm", "vector_norm", "get_total_norm"])
# The answer is the same for gradients multiplied by any scale.
ASKS_FOR_DEFECTS = Pattern(r"isfinite|isnan|isinf|is_nan|nonzero|count_nonzero|sign|cosine|allclose")
SCALE = Pattern(r"scale(?!r)|scaling", re.IGNORECASE)


def check(code: Code) -> Iterator[Finding]:
    for region in code.regions:
        told: set[Function] = set()
        for read, moments in region.visits("grad read"):
            scaled = [moment for moment in moments if moment.scaled and not moment.stepped]
            if read.frame.function in told or not scaled or not all(moment.surely_scaled for moment in scaled):
                continue
            if _measures(read) and not _knows_about_the_scale(read) and not _is_part_of_a_clip(read, scaled):
                told.add(read.frame.function)
                backward = next(iter(scaled[0].scaled.values()))
                yield RULE.at(
                    read.place, f"these gradients are still multiplied by the loss scale of {backward.spot(read)}"
                )


def _measures(read: Event) -> bool:
    """A number made of a parameter's gradient; ``torch.autograd.grad(...)`` returns another kind."""
    call = read.node
    if not isinstance(call, ast.Call):
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in MEASURES | TORCH_MEASURES:
        return False
    return not any(
        isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "grad"
        for part in ast.walk(call)
    )


def _knows_about_the_scale(read: Event) -> bool:
    """The function divides by the scale itself, or asks something that no scale changes.

    ``p.grad / p.grad.norm()`` is a direction, ``isfinite(p.grad.sum())`` a question about infs, and
    ``p.grad.abs().sum() == 0`` one about parameters that got no gradient.
    """
    function = read.frame.function
    if function.owner is not None and any("ptim" in ast.unparse(base) for base in function.owner.node.bases):
        return True  # an optimizer's own step: the scaler calls it after unscaling
    scales, gradients, parents = _arithmetic(function.node)
    if scales:
        return True
    measured = set(ast.walk(read.node)) if gradients else set()
    if any(gradient not in measured for gradient in gradients):
        return True
    around = parents.get(read.node)
    while around is not None:
        if isinstance(around, ast.Call) and ASKS_FOR_DEFECTS.search(ast.unparse(around.func)):
            return True
        if isinstance(around, ast.Compare) and _with_zero(around):
            return True
        around = parents.get(around)
    return False


@functools.lru_cache(maxsize=8)  # every look at a gradient in a function asks
def _arithmetic(function: ast.AST) -> tuple[bool, list[ast.expr], dict[ast.AST, ast.AST]]:
    """Whether a function multiplies or divides by a scale, the gradients it so changes, and what stands in what."""
    scales = False
    gradients: list[ast.expr] = []
    parents: dict[ast.AST, ast.AST] = {}
    for node in ast.walk(function):
        parents.update((child, node) for child in ast.iter_child_nodes(node))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult):
            outer = parents.get(node)
            if isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.Div | ast.Mult):  # looked through with it
                gradients += () if outer.left is node else _gradients(node.left)
            else:
                scales = scales or SCALE.search(ast.unparse(node)) is not None
                gradients += _gradients(node.left)
    return scales, gradients, parents


def _gradients(node: ast.expr) -> Iterator[ast.expr]:
    """The gradients themselves, and not the numbers measured, that stand in an expression."""
    pending = [node]
    while pending:
        part = pending.pop()
        if isinstance(part, ast.Attribute) and part.attr == "grad":
            yield part
        elif not (isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in MEASURES):
            pending += [child for child in ast.iter_child_nodes(part) if isinstance(child, ast.expr)]


def _with_zero(test: ast.Compare) -> bool:
    sides = [test.left, *test.comparators]
    return any(isinstance(side, ast.Constant) and side.value == 0 for side in sides)


def _is_part_of_a_clip(read: Event, moments: list[Moment]) -> bool:
    """A norm measured for a clip written by hand: the clip is the mistake, and it is told of there."""
    return any(
        clip.frame.function is read.frame.function and not _is_library_clip(clip)
        for moment in moments
        for clip in moment.later("clip")
    )


def _is_library_clip(clip: Event) -> bool:
    return isinstance(clip.node, ast.Call) and "clip_grad" in ast.unparse(clip.node.func)
