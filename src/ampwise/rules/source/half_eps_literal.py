"""An epsilon that rounds to zero in FP16."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise.check.source.events import EventContext
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.precision import argument_of
from ampwise.check.source.project import SourceFile
from ampwise.check.source.reaching_definitions import reaching_values
from ampwise.check.source.tensor_dtypes import HALF, LIKELY_HALF, tensor_dtypes, torch_operation
from ampwise.check.source.torch_names import SAYS_FP16
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP404",
    name="half-eps-literal",
    severity=Severity.WARNING,
    summary="A half-precision tensor is guarded by a small constant that FP16 rounds to zero.",
    why=(
        "A number at or below 2**-25, about 2.98e-8, rounds to zero in FP16, so `x + 1e-8` is zero for a "
        "half-precision `x` that is zero: the logarithm, root or division is not guarded. Under CUDA autocast "
        "sigmoid, abs, mean, std, sqrt, matmuls and all outputs of linear layers stay in FP16; sums, norms and "
        "softmax do not."
    ),
    fix="Compute in FP32, as in `torch.log(p.float() + 1e-8)`, or use a constant that FP16 can represent, such as "
    "1e-6.",
    bad='with torch.autocast("cuda"):\n    loss = -torch.log(torch.sigmoid(model(x)) + 1e-8).mean()',
    good='with torch.autocast("cuda"):\n    loss = -torch.log(torch.sigmoid(model(x).float()) + 1e-8).mean()',
)
NEEDS = (
    ("autocast",),
    SAYS_FP16,
    ("1e-8", "1e-9", "1e-1", "1e-2", "e-08", "e-09", "e-1"),
)

LOST = 2.0**-25  # rounds to even, which is zero
TINY = LazyPattern(r"e-(0?[89]|\d\d)\b", re.IGNORECASE)
SENSITIVE = frozenset(("log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "div"))


def check(code: SourceFile) -> Iterator[Finding]:
    if not TINY.search(code.script.text):
        return
    seen: set[ast.AST] = set()
    for site in code.statements:
        autocast = site.context.autocast
        if autocast is not None and not autocast.surely_fp16:
            continue
        for guarded in _guarded(site.node, site.context):
            found = None if guarded in seen else _constant_added(guarded, site.context)
            if found is None:
                continue
            tensor, eps = found
            if tensor_dtypes(code).dtype(tensor, site.context) in (HALF, *_likely(tensor, site.context)):
                seen.add(guarded)
                yield RULE.at(
                    code.script.place(guarded), f"{code.script.segment(eps)} is zero in FP16, so it guards nothing here"
                )


def _likely(tensor: ast.expr, context: EventContext) -> tuple[str, ...]:
    """Return the dtypes that count as half: a sigmoid of a model's output is surely half, the output itself may be a
    softmax.
    """
    if isinstance(tensor, ast.BinOp) and isinstance(tensor.op, ast.Sub) and isinstance(tensor.left, ast.Constant):
        tensor = tensor.right
    made = (
        [value.node for value in reaching_values(tensor, context.frame)] if isinstance(tensor, ast.Name) else [tensor]
    )
    return (LIKELY_HALF,) if all(_is_sigmoid(node) for node in made) else ()


def _is_sigmoid(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sigmoid"


def _guarded(statement: ast.AST, context: EventContext) -> Iterator[ast.expr]:
    """Yield arguments of logarithms and roots, and divisors."""
    for node in ast.walk(statement):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield node.right
        elif isinstance(node, ast.Call):
            operation = torch_operation(node, context.frame)
            if operation and operation[0] in SENSITIVE and operation[1] is not None:
                of_right = operation[0] == "div" and node.args
                yield node.args[-1] if of_right else operation[1]


def _constant_added(node: ast.expr, context: EventContext) -> tuple[ast.expr, ast.expr] | None:
    """Return the tensor and the constant of ``x + 1e-8``, ``x.clamp(min=1e-8)`` or ``torch.clamp(x, 1e-8)``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for tensor, eps in ((node.left, node.right), (node.right, node.left)):
            if _is_lost(eps, context):
                return tensor, eps
    if isinstance(node, ast.Call):
        operation = torch_operation(node, context.frame)
        if operation and operation[0] in ("clamp", "clamp_min", "clip") and operation[1] is not None:
            is_function = context.frame.qualified(node.func) is not None
            least = argument_of(node, "min", 1 if is_function else 0)
            if least is not None and _is_lost(least, context):
                return operation[1], least
    return None


def _is_lost(node: ast.expr, context: EventContext) -> bool:
    values = [value.node for value in context.frame.values(node)]
    return bool(values) and all(
        isinstance(value, ast.Constant) and isinstance(value.value, float) and 0 < value.value <= LOST
        for value in values
    )
