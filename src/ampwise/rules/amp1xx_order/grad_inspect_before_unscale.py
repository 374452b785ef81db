from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.call_events import MEASURE_NAME, RECORDS
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import dotted_text, method_called
from ampwise.check.source.precision import argument_of
from ampwise.check.source.questions import guard_source
from ampwise.check.source.reaching_definitions import reaching_values
from ampwise.check.source.steps import surely_scaled
from ampwise.check.source.torch_names import SCALER
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import Frame, FunctionOutline, Moment, SourceEvent, SourceFile
    from ampwise.watch.run_events import GradNormRead

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
NEEDS = (("caler", "Accelerator("), (".backward(",), (".grad", "grad_", "_grad", " grad("))

# Methods that turn a gradient into a number; a view or a copy may go anywhere.
MEASURES = frozenset(["norm", "mean", "std", "var", "max", "min", "sum", "item", "histogram", "histc", "pow", "square"])
TORCH_MEASURES = frozenset(["norm", "vector_norm", "get_total_norm"])
# The result does not depend on the scale.
SCALE_INVARIANT = LazyPattern(r"isfinite|isnan|isinf|is_nan|nonzero|count_nonzero|sign|cosine|allclose")
ASKS_TO_CLIP = LazyPattern(r"clip|norm|max_grad", re.IGNORECASE)
ASKS_FOR_AMP = LazyPattern(r"amp|scaler|fp16|half|mixed|precision|dtype|enabled", re.IGNORECASE)
SCALE = LazyPattern(r"scale(?!r)|scaling", re.IGNORECASE)
PENALISES = LazyPattern(r"norm|\.pow\(|\*\* ?2|square|\.abs\(")
DIRECTION = LazyPattern(r"normalize|cosine|sign\(|isfinite|isnan|isinf")


def check_source(code: SourceFile) -> Findings:
    yield from _penalties(code)
    for region in code.regions:
        reported: set[tuple[FunctionOutline, ast.expr]] = set()  # a function once for each backward
        for read, moments in region.visits("grad read"):
            scaled = surely_scaled(moments) or _scaled_unless_clipped(moments)
            function = read.frame.function
            if not scaled or (function, scaled[0].backward.node) in reported:
                continue
            # Does it compute a number from a parameter's gradient? `torch.autograd.grad(...)` is not one.
            name = method_called(read.node) or getattr(getattr(read.node, "func", None), "id", "")
            differentiates = any(method_called(part) == "grad" for part in walk(read.node))
            measures = name in MEASURES or name in TORCH_MEASURES or name in RECORDS or MEASURE_NAME.search(name)
            if not measures or differentiates or _accounts_for_scale(read):
                continue
            # A norm that is part of a manual clip: the clip is the mistake, and AMP101 reports it.
            clips = [clip for moment in scaled for clip in moment.later("clip") if clip.frame.function is function]
            if all(isinstance(clip.node, ast.Call) and "clip_grad" in ast.unparse(clip.node.func) for clip in clips):
                backward = scaled[0].backward
                reported.add((function, backward.node))
                yield RULE.at(
                    read.place, f"these gradients are still multiplied by the loss scale from {backward.spot(read)}"
                )


def _penalties(code: SourceFile) -> Findings:
    """Yield the gradients of a scaled loss, by ``torch.autograd.grad``, that a penalty measures without unscaling."""
    for call in code.nodes(ast.Call) if "create_graph" in code.script.text else ():
        function = code.function_at(call)
        frame, outputs = code.frame(function), argument_of(call, "outputs", 0)
        if outputs is None or frame.qualified(call.func) != "torch.autograd.grad":
            continue
        asked = argument_of(call, "create_graph")
        if not isinstance(asked, ast.Constant) or not asked.value:
            continue
        given = reaching_values(outputs, frame) if isinstance(outputs, ast.Name) else frame.values(outputs)
        scaled = [value for value, home in given if value is not None and _is_scaled(value, home)]
        if not scaled or len(scaled) < len(given):
            continue
        measure = _measured_unscaled(call, function, code)
        if measure is not None:
            yield RULE.at(
                code.script.place(measure),
                f"these gradients are still multiplied by the loss scale from line {scaled[0].lineno}",
                fix="`unscale_` is for an optimizer's gradients: divide these by `scaler.get_scale()` first.",
            )


def _is_scaled(value: ast.expr | None, frame: Frame) -> bool:
    is_call = isinstance(value, ast.Call) and method_called(value) == "scale" and isinstance(value.func, ast.Attribute)
    return is_call and frame.role(value.func.value) == SCALER  # type: ignore[union-attr]


def _measured_unscaled(call: ast.Call, function: FunctionOutline, code: SourceFile) -> ast.stmt | None:
    """Return the statement that measures what a call returns; None if it, or one before it, may unscale.

    A gradient divided by its own norm is a direction, which has no scale.
    """
    first = code.script.statement(call)
    assigned = [node for node in walk(function.node) if isinstance(node, ast.Assign | ast.AugAssign | ast.Return)]
    held: set[str | None] = set()
    for statement in sorted(assigned, key=lambda node: node.lineno):
        if statement.lineno < first.lineno or code.function_at(statement) is not function:
            continue
        names = [part for part in walk(statement) if isinstance(part, ast.Name | ast.Attribute)]
        text = ast.unparse(statement)
        if statement is first:
            text = text.replace(ast.unparse(call), "")
        elif held.isdisjoint([dotted_text(name) for name in names if isinstance(name.ctx, ast.Load)]):
            continue
        divisors = [
            part.right for part in walk(statement) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div)
        ]
        own = any(dotted_text(part) in held for divisor in divisors for part in walk(divisor))
        if own or SCALE.search(text) or DIRECTION.search(text):
            return None
        if PENALISES.search(text):
            return statement
        held |= {dotted_text(name) for name in names if isinstance(name.ctx, ast.Store)} - {None}
    return None


def _scaled_unless_clipped(moments: list[Moment]) -> list[Moment]:
    """Return the moments with scaled gradients if they are unscaled only in order to clip: ``if clip: unscale_()``."""
    pending = [moment for moment in moments if moment.scaled and not moment.stepped]
    for moment in pending:
        for unscale in moment.unscaled.values():
            further = [guard for guard in unscale.context.guards if guard not in moment.event.context.guards]
            asked = " ".join(map(guard_source, further))
            if not ASKS_TO_CLIP.search(asked) or ASKS_FOR_AMP.search(asked):
                return []
    return [moment for moment in pending if not moment.unscaled and not moment.opaque]


def _accounts_for_scale(read: SourceEvent) -> bool:
    """Return whether the function divides by the scale itself, or its result does not depend on the scale.

    ``p.grad / p.grad.norm()`` is a direction, ``isfinite(p.grad.sum())`` looks for infs, and ``p.grad.abs().sum() ==
    0`` looks for parameters without a gradient.
    """
    function = read.frame.function
    if function.owner is not None and any("ptim" in ast.unparse(base) for base in function.owner.node.bases):
        return True  # an optimizer's step method: the scaler calls it after unscaling
    scales, gradients, parents = _arithmetic(function.node)
    if scales or (gradients and not set(walk(read.node)).issuperset(gradients)):
        return True
    around = parents.get(read.node)
    while around is not None:
        if isinstance(around, ast.Call) and SCALE_INVARIANT.search(ast.unparse(around.func)):
            return True
        if isinstance(around, ast.Compare):
            sides = [around.left, *around.comparators]
            if any(isinstance(side, ast.Constant) and side.value == 0 for side in sides):
                return True
        around = parents.get(around)
    return False


@functools.lru_cache(maxsize=8)  # called for every gradient read in a function
def _arithmetic(function: ast.AST) -> tuple[bool, list[ast.expr], dict[ast.AST, ast.AST]]:
    """Return whether a function multiplies or divides by a scale, the gradients so changed, and each node's parent."""
    scales = False
    gradients: list[ast.expr] = []
    parents: dict[ast.AST, ast.AST] = {}
    for node in walk(function):
        parents.update((child, node) for child in ast.iter_child_nodes(node))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult):
            outer = parents.get(node)
            is_part = isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.Div | ast.Mult)
            if not is_part:
                scales = scales or SCALE.search(ast.unparse(node)) is not None
            if not is_part or getattr(outer, "left", None) is not node:  # else handled with the outer operation
                gradients += _gradients(node.left)
    return scales, gradients, parents


def _gradients(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the gradients in an expression, leaving out numbers measured from them."""
    pending = [node]
    while pending:
        part = pending.pop()
        if isinstance(part, ast.Attribute) and part.attr == "grad":
            yield part
        elif method_called(part) not in MEASURES:
            pending += [child for child in ast.iter_child_nodes(part) if isinstance(child, ast.expr)]


def check_event(measured: GradNormRead) -> Findings:
    if measured.scaled:
        yield RULE.at(
            measured.site.place,
            f"`{measured.function}` measures gradients that are still multiplied by the loss scale",
        )
