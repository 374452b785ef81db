"""Gradients that are read while still multiplied by the loss scale."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from ampwise.check.source.events import SourceEvent
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.outline import FunctionOutline
from ampwise.check.source.project import SourceFile
from ampwise.check.source.steps import Moment
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP102",
    name="grad-inspect-before-unscale",
    severity=Severity.WARNING,
    summary="Gradients are measured before `scaler.unscale_`.",
    why=(
        "After `scaler.scale(loss).backward()` every gradient is multiplied by the loss scale, initially 65536. A "
        "norm read there is too large by that factor, jumps when the scale changes, and cannot be compared with a "
        "threshold or a float32 run."
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

# Methods that turn a gradient into a number; a view or a copy may go anywhere.
MEASURES = frozenset(["norm", "mean", "std", "var", "max", "min", "sum", "item", "histogram", "histc", "pow", "square"])
TORCH_MEASURES = frozenset(["norm", "vector_norm", "get_total_norm"])
# The result does not depend on the scale.
SCALE_INVARIANT = LazyPattern(r"isfinite|isnan|isinf|is_nan|nonzero|count_nonzero|sign|cosine|allclose")
SCALE = LazyPattern(r"scale(?!r)|scaling", re.IGNORECASE)


def check(code: SourceFile) -> Iterator[Finding]:
    for region in code.regions:
        reported: set[FunctionOutline] = set()
        for read, moments in region.visits("grad read"):
            scaled = [moment for moment in moments if moment.scaled and not moment.stepped]
            if read.frame.function in reported or not scaled or not all(moment.surely_scaled for moment in scaled):
                continue
            if _measures(read) and not _accounts_for_scale(read) and not _is_part_of_a_clip(read, scaled):
                reported.add(read.frame.function)
                backward = next(iter(scaled[0].scaled.values()))
                yield RULE.at(
                    read.place, f"these gradients are still multiplied by the loss scale from {backward.spot(read)}"
                )


def _measures(read: SourceEvent) -> bool:
    """Return whether it computes a number from a parameter's gradient; ``torch.autograd.grad(...)`` is not one."""
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


def _accounts_for_scale(read: SourceEvent) -> bool:
    """Return whether the function divides by the scale itself, or its result does not depend on the scale.

    ``p.grad / p.grad.norm()`` is a direction, ``isfinite(p.grad.sum())`` looks for infs, and ``p.grad.abs().sum() ==
    0`` looks for parameters without a gradient.
    """
    function = read.frame.function
    if function.owner is not None and any("ptim" in ast.unparse(base) for base in function.owner.node.bases):
        return True  # an optimizer's step method: the scaler calls it after unscaling
    scales, gradients, parents = _arithmetic(function.node)
    if scales:
        return True
    measured = set(ast.walk(read.node)) if gradients else set()
    if any(gradient not in measured for gradient in gradients):
        return True
    around = parents.get(read.node)
    while around is not None:
        if isinstance(around, ast.Call) and SCALE_INVARIANT.search(ast.unparse(around.func)):
            return True
        if isinstance(around, ast.Compare) and _with_zero(around):
            return True
        around = parents.get(around)
    return False


@functools.lru_cache(maxsize=8)  # called for every gradient read in a function
def _arithmetic(function: ast.AST) -> tuple[bool, list[ast.expr], dict[ast.AST, ast.AST]]:
    """Return whether a function multiplies or divides by a scale, the gradients it changes that way, and each node's
    parent.
    """
    scales = False
    gradients: list[ast.expr] = []
    parents: dict[ast.AST, ast.AST] = {}
    for node in ast.walk(function):
        parents.update((child, node) for child in ast.iter_child_nodes(node))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult):
            outer = parents.get(node)
            if isinstance(outer, ast.BinOp) and isinstance(
                outer.op, ast.Div | ast.Mult
            ):  # handled with the outer operation
                gradients += () if outer.left is node else _gradients(node.left)
            else:
                scales = scales or SCALE.search(ast.unparse(node)) is not None
                gradients += _gradients(node.left)
    return scales, gradients, parents


def _gradients(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the gradients in an expression, leaving out numbers measured from them."""
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


def _is_part_of_a_clip(read: SourceEvent, moments: list[Moment]) -> bool:
    """Return whether the norm is part of a manual clip: the clip is the mistake, and AMP101 reports it."""
    return any(
        clip.frame.function is read.frame.function and not _is_library_clip(clip)
        for moment in moments
        for clip in moment.later("clip")
    )


def _is_library_clip(clip: SourceEvent) -> bool:
    return isinstance(clip.node, ast.Call) and "clip_grad" in ast.unparse(clip.node.func)
