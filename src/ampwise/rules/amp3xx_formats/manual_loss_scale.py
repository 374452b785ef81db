from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import method_called
from ampwise.check.source.precision import literal_number
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import Frame, SourceEvent, SourceFile
    from ampwise.watch.run_events import OptimizerStep

RULE = Rule(
    code="AMP308",
    name="manual-loss-scale",
    severity=Severity.WARNING,
    summary="The loss is multiplied by a constant instead of using a GradScaler.",
    why=(
        "A constant scale is too small for some layers or too large for some steps, and nothing checks for inf: one "
        "overflow puts inf or NaN into the weights. A GradScaler skips such a step, lowers the scale, and raises it "
        "again after 2000 clean steps."
    ),
    fix=(
        "Use `torch.amp.GradScaler('cuda')`: `scaler.scale(loss).backward()`, `scaler.step(optimizer)`, "
        "`scaler.update()`."
    ),
    bad=("(loss * 1024).backward()\nfor p in model.parameters():\n    p.grad /= 1024\noptimizer.step()"),
    good="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
)
NEEDS = ((".backward(",), ("scale", "*"), ("autocast", "float16", ".half(", "torch.half"))

SMALLEST_SCALE = 128  # a smaller factor is more likely a loss weight
SCALE_NAME = LazyPattern(
    r"(^|_)(loss_?scal\w*|scale_?factor|static_scale|fp16_scale|grad_?scale|scale)$", re.IGNORECASE
)
AROUND_FP16 = LazyPattern(r"\.half\(|float16|autocast|torch\.half|fp16", re.IGNORECASE)
# Code that checks for inf, or has a scaler, does more than multiply by a constant.
CHECKS_OVERFLOW = LazyPattern(r"GradScaler|[sS]caler\b|overflow|isinf|isfinite|isnan|found_inf|inf_check")


def check_source(code: SourceFile) -> Findings:
    text = code.script.text
    if "backward(" not in text or CHECKS_OVERFLOW.search(text) or code.uses_framework:
        return
    if not AROUND_FP16.search(text.replace("bfloat16", "")):
        return
    divided = {ast.unparse(factor) for factor in _divisors_of_gradients(code)}
    reported = set()
    for event in code.events:
        if event.kind != "backward" or event.value is None or event.node in reported:
            continue
        factor = _scale_of(event)
        if factor is not None:
            scale = ast.unparse(factor)
            if _is_large_power_of_two(factor) or (_has_scale_name(factor) and scale in divided):
                reported.add(event.node)
                yield RULE.at(event.place, f"the loss is multiplied by a fixed scale of {scale}")


def _scale_of(event: SourceEvent) -> ast.expr | None:
    """Return the scale in ``(loss * scale).backward()``, or in a preceding ``loss *= scale``."""
    assert event.value is not None
    for value in event.frame.values(event.value):
        product = value.node
        if isinstance(product, ast.BinOp) and isinstance(product.op, ast.Mult):
            for side in (product.right, product.left):
                constant = _constant(side, value.frame)
                if (constant is not None and _is_large_power_of_two(constant)) or _has_scale_name(side):
                    return constant or side
    name = event.value.id if isinstance(event.value, ast.Name) else ""
    for node in _products(event.frame.function.node).get(name, ()):
        if node.lineno < event.line:
            return _constant(node.value, event.frame) or node.value
    return None


@functools.lru_cache(maxsize=8)  # called for every backward of a function
def _products(function: ast.AST) -> dict[str, list[ast.AugAssign]]:
    """Map each name to its ``name *= ...`` statements, outermost first, leaving out later ones."""
    found: dict[str, list[ast.AugAssign]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult) and isinstance(node.target, ast.Name):
            statements = found.setdefault(node.target.id, [])
            if not statements or node.lineno < statements[-1].lineno:
                statements.append(node)
    return found


def _constant(node: ast.expr, frame: Frame) -> ast.expr | None:
    values = frame.values(node)
    found = values[0].node if len(values) == 1 else None
    return found if _number(found) is not None else None


def _number(node: ast.expr | None) -> float | None:
    """Return the value of a literal such as ``1024`` or ``2 ** 16``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, exponent = _number(node.left), _number(node.right)
        if base == 2 and exponent is not None and abs(exponent) <= 64:
            return math.ldexp(1.0, int(exponent))
    return literal_number(node)


def _is_large_power_of_two(node: ast.expr) -> bool:
    value = _number(node)
    return value is not None and value >= SMALLEST_SCALE and math.frexp(value)[0] == 0.5


def _has_scale_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) and bool(SCALE_NAME.search(ast.unparse(node).rpartition(".")[2]))


def _divisors_of_gradients(code: SourceFile) -> Iterator[ast.expr]:
    """Yield what gradients are divided by: ``p.grad /= s``, ``p.grad.div_(s)``, ``p.grad = p.grad / s``."""
    for node in code.tree_nodes:
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div) and "grad" in ast.unparse(node.target):
            yield node.value
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and ".grad" in ast.unparse(node.left):
            yield node.right
        elif isinstance(node, ast.Call) and method_called(node) in ("div_", "mul_") and node.args:
            factor = node.args[0]
            if "grad" not in ast.unparse(node.func).rpartition(".")[0]:
                continue
            if method_called(node) == "div_":
                yield factor
            elif isinstance(factor, ast.BinOp) and isinstance(factor.op, ast.Div):
                yield factor.right


def check_event(step: OptimizerStep) -> Findings:
    if step.scaled_by_constant is not None and "fp16" in (*step.precisions, *step.parameters):
        yield RULE.at(
            (step.backward or step.site).place,
            f"the loss is multiplied by a fixed {step.scaled_by_constant:g}, regardless of its gradients",
            evidence={"factor": step.scaled_by_constant},
        )
