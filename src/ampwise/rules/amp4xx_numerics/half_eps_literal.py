from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import method_called
from ampwise.check.source.precision import argument_of, literal_number
from ampwise.check.source.reaching_definitions import reaching_values
from ampwise.check.source.tensor_dtypes import HALF, LIKELY_HALF, half_format, tensor_dtypes, torch_operation
from ampwise.check.source.torch_names import SAYS_FP16
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import EventContext, Frame, SourceFile

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
NEEDS = (("autocast",), SAYS_FP16, ("1e-8", "1e-9", "1e-1", "1e-2", "e-08", "e-09", "e-1"))

LOST = 2.0**-25  # rounds to even, which is zero
TINY = LazyPattern(r"e-(0?[89]|\d\d)\b", re.IGNORECASE)
SENSITIVE = frozenset(("log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "div"))


def check_source(code: SourceFile) -> Findings:
    if not TINY.search(code.script.text):
        return
    seen: set[ast.AST] = set()
    for site in code.statements:
        if site.context.autocast is not None and half_format(site.context) != HALF:
            continue
        for sensitive in _guarded(site.node, site.context.frame):
            guarded, context = _as_written(sensitive, site.context, code)
            found = None if guarded in seen else _constant_added(guarded, context.frame)
            if found is None:
                continue
            tensor, eps = found
            dtype = tensor_dtypes(code).dtype(tensor, context)
            if dtype == HALF or (dtype == LIKELY_HALF and _is_sigmoid(tensor, context.frame)):
                seen.add(guarded)
                yield RULE.at(
                    code.script.place(guarded), f"{code.script.segment(eps)} is zero in FP16, so it guards nothing here"
                )


def _as_written(node: ast.expr, context: EventContext, code: SourceFile) -> tuple[ast.expr, EventContext]:
    """Return ``p.clamp(1e-8)`` for p, or for ``1 - p``, after ``p = p.clamp(1e-8)``, with the context of that line."""
    complement = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and isinstance(node.left, ast.Constant)
    name = node.right if complement and isinstance(node, ast.BinOp) else node
    values = reaching_values(name, context.frame) if isinstance(name, ast.Name) else []
    if len(values) == 1 and isinstance(values[0].node, ast.Call | ast.BinOp):
        value, frame = values[0]
        there = tensor_dtypes(code).contexts.get((id(value), id(frame)))
        if value is not None and there is not None:
            return value, there
    return node, context


def _is_sigmoid(tensor: ast.expr, frame: Frame) -> bool:
    """Return whether it is p or ``1 - p`` of a sigmoid, which is half; a model's output itself may be a softmax."""
    if isinstance(tensor, ast.BinOp) and isinstance(tensor.op, ast.Sub) and isinstance(tensor.left, ast.Constant):
        tensor = tensor.right
    made = [value.node for value in reaching_values(tensor, frame)] if isinstance(tensor, ast.Name) else [tensor]
    return all(method_called(node) == "sigmoid" for node in made)


def _guarded(statement: ast.AST, frame: Frame) -> Iterator[ast.expr]:
    """Yield arguments of logarithms and roots, and divisors."""
    for node in walk(statement):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield node.right
        elif isinstance(node, ast.Call):
            name, tensor = torch_operation(node, frame) or ("", None)
            if name in SENSITIVE and tensor is not None:
                yield node.args[-1] if name == "div" and node.args else tensor


def _constant_added(node: ast.expr, frame: Frame) -> tuple[ast.expr, ast.expr] | None:
    """Return the tensor and the constant of ``x + 1e-8``, ``x.clamp(min=1e-8)`` or ``torch.clamp(x, 1e-8)``."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        pairs = [(node.left, node.right), (node.right, node.left)]
    elif isinstance(node, ast.Call):
        name, clamped = torch_operation(node, frame) or ("", None)
        least = argument_of(node, "min", 0 if frame.qualified(node.func) is None else 1)
        if name in ("clamp", "clamp_min", "clip") and clamped is not None and least is not None:
            pairs = [(clamped, least)]
    for tensor, constant in pairs:
        is_default = isinstance(constant, ast.Name) and constant.id in frame.function.defaults
        values = [value.node for value in frame.values(constant) if value.node is not None or not is_default]
        numbers = [literal_number(value) for value in values]
        if numbers and all(number is not None and 0 < number <= LOST for number in numbers):
            return tensor, constant
    return None
