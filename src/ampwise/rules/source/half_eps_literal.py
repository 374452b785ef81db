"""An epsilon that rounds to zero in FP16."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.events import Context
from ampwise.source.halves import HALF, LIKELY_HALF, halves_of, method_or_function
from ampwise.source.pattern import Pattern
from ampwise.source.precision import keyword
from ampwise.source.project import Code
from ampwise.source.reaching import reaching
from ampwise.source.vocabulary import SAYS_FP16

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP404",
    name="half-eps-literal",
    severity=Severity.WARNING,
    summary="A small constant that FP16 rounds to zero guards a half tensor.",
    why=(
        "At or below 2**-25, about 2.98e-8, a number rounds to zero in FP16, so `x + 1e-8` of a half `x` that is "
        "zero is zero: the logarithm, root or division it should guard is not guarded. Under CUDA autocast sigmoid, "
        "abs, mean, std, sqrt, products and all outputs of linear layers stay in FP16; sums, norms and softmax do not."
    ),
    fix="Compute in FP32, as in `torch.log(p.float() + 1e-8)`, or use a constant that FP16 can hold, such as 1e-6.",
    bad='with torch.autocast("cuda"):\n    loss = -torch.log(torch.sigmoid(model(x)) + 1e-8).mean()',
    good='with torch.autocast("cuda"):\n    loss = -torch.log(torch.sigmoid(model(x).float()) + 1e-8).mean()',
)
NEEDS = (
    ("autocast",),
    SAYS_FP16,
    ("1e-8", "1e-9", "1e-1", "1e-2", "e-08", "e-09", "e-1"),
)

LOST = 2.0**-25  # rounds to even, which is zero
TINY = Pattern(r"e-(0?[89]|\d\d)\b", re.IGNORECASE)
SENSITIVE = frozenset(("log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "div"))


def check(code: Code) -> Iterator[Finding]:
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
            if halves_of(code).dtype(tensor, site.context) in (HALF, *_likely(tensor, site.context)):
                seen.add(guarded)
                yield RULE.at(
                    code.script.place(guarded), f"{code.script.segment(eps)} is zero in FP16, and guards nothing here"
                )


def _likely(tensor: ast.expr, context: Context) -> tuple[str, ...]:
    """A sigmoid of what a model gives is surely half; what it gives itself may have been through a softmax."""
    if isinstance(tensor, ast.BinOp) and isinstance(tensor.op, ast.Sub) and isinstance(tensor.left, ast.Constant):
        tensor = tensor.right
    made = [value.node for value in reaching(tensor, context.frame)] if isinstance(tensor, ast.Name) else [tensor]
    return (LIKELY_HALF,) if all(_is_sigmoid(node) for node in made) else ()


def _is_sigmoid(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sigmoid"


def _guarded(statement: ast.AST, context: Context) -> Iterator[ast.expr]:
    """What goes into a logarithm, a root or under a fraction bar."""
    for node in ast.walk(statement):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield node.right
        elif isinstance(node, ast.Call):
            operation = method_or_function(node, context.frame)
            if operation and operation[0] in SENSITIVE and operation[1] is not None:
                of_right = operation[0] == "div" and node.args
                yield node.args[-1] if of_right else operation[1]


def _constant_added(node: ast.expr, context: Context) -> tuple[ast.expr, ast.expr] | None:
    """The tensor and the constant of ``x + 1e-8``, ``x.clamp(min=1e-8)`` or ``torch.clamp(x, 1e-8)``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for tensor, eps in ((node.left, node.right), (node.right, node.left)):
            if _is_lost(eps, context):
                return tensor, eps
    if isinstance(node, ast.Call):
        operation = method_or_function(node, context.frame)
        if operation and operation[0] in ("clamp", "clamp_min", "clip") and operation[1] is not None:
            is_function = context.frame.qualified(node.func) is not None
            least = keyword(node, "min", 1 if is_function else 0)
            if least is not None and _is_lost(least, context):
                return operation[1], least
    return None


def _is_lost(node: ast.expr, context: Context) -> bool:
    values = [value.node for value in context.frame.values(node)]
    return bool(values) and all(
        isinstance(value, ast.Constant) and isinstance(value.value, float) and 0 < value.value <= LOST
        for value in values
    )
