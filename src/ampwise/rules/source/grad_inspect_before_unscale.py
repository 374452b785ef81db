"""Gradients read, to be logged or compared, while they are still multiplied by the loss scale."""

from __future__ import annotations

import ast
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
    for node in ast.walk(function.node):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult):
            if SCALE.search(ast.unparse(node)) or _has_gradient(node.left, read.node):
                return True
        elif isinstance(node, ast.Call) and _contains(node, read.node) and node is not read.node:
            if ASKS_FOR_DEFECTS.search(ast.unparse(node.func)):
                return True
        elif isinstance(node, ast.Compare) and _contains(node, read.node) and _with_zero(node):
            return True
    return False


def _has_gradient(node: ast.expr, measured: ast.AST) -> bool:
    """Whether a gradient itself, and not the number measured, stands in an expression."""
    if node is measured:
        return False
    if isinstance(node, ast.Attribute) and node.attr == "grad":
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MEASURES:
        return False
    return any(_has_gradient(child, measured) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))


def _with_zero(test: ast.Compare) -> bool:
    sides = [test.left, *test.comparators]
    return any(isinstance(side, ast.Constant) and side.value == 0 for side in sides)


def _contains(outer: ast.AST, inner: ast.AST) -> bool:
    return any(part is inner for part in ast.walk(outer))


def _is_part_of_a_clip(read: Event, moments: list[Moment]) -> bool:
    """A norm measured for a clip written by hand: the clip is the mistake, and it is told of there."""
    return any(
        clip.frame.function is read.frame.function and not _is_library_clip(clip)
        for moment in moments
        for clip in moment.later("clip")
    )


def _is_library_clip(clip: Event) -> bool:
    return isinstance(clip.node, ast.Call) and "clip_grad" in ast.unparse(clip.node.func)
