"""A mask value outside the range of FP16."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise.check.source.events import EventContext
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import dotted_text
from ampwise.check.source.precision import argument_of
from ampwise.check.source.project import SourceFile
from ampwise.check.source.tensor_dtypes import HALF, tensor_dtypes
from ampwise.check.source.torch_names import SAYS_FP16
from ampwise.finding import Edit, Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP403",
    name="half-mask-literal",
    severity=Severity.ERROR,
    summary="A mask value outside the range of FP16 is written into a half-precision tensor.",
    why=(
        "The largest FP16 number is 65504. `masked_fill` with -1e9 on a half-precision tensor raises an error; "
        "`torch.where`, indexing and multiplication turn it into -inf, and a fully masked row then gives NaN in the "
        "softmax."
    ),
    fix="Use the minimum of the tensor's own dtype: `torch.finfo(x.dtype).min`.",
    bad='with torch.autocast("cuda"):\n    scores = (q @ k.mT).masked_fill(mask, -1e9)',
    good=(
        'with torch.autocast("cuda"):\n    scores = q @ k.mT\n'
        "    scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)"
    ),
    fixable="sometimes",
)
NEEDS = (
    SAYS_FP16,
    ("masked_fill", "where(", "mask"),
    ("-1e", "1e9", "1e10", "1e5", "1e6", "1e7", "1e8", "-1000", "-9", "e+"),
)

LARGEST = 65504.0
BEYOND = LazyPattern(r"\de\+?\d|\d{5}", re.IGNORECASE)


def check(code: SourceFile) -> Iterator[Finding]:
    if not BEYOND.search(code.script.text):
        return
    seen: set[ast.AST] = set()
    for site in code.statements:
        for node in ast.walk(site.node):
            found = None if node in seen else _masking(node, site.context)
            if found is None:
                continue
            tensor, literal = found
            if tensor_dtypes(code).dtype(tensor, site.context) == HALF:
                seen.add(node)
                yield RULE.at(
                    code.script.place(node),
                    f"{code.script.segment(literal)} exceeds the range of FP16, which ends at 65504",
                    edits=_finfo(tensor, literal, code, site.context),
                    # A product is added to something, and twice the largest FP16 number is inf.
                    safe=not isinstance(node, ast.BinOp) and "jit.script" not in code.script.text,
                )


def _masking(node: ast.AST, context: EventContext) -> tuple[ast.expr, ast.expr] | None:
    """Return the masked tensor and its fill value, if the value is too large for FP16."""
    pair: tuple[ast.expr, ast.expr] | None = None
    if isinstance(node, ast.Call):
        pair = _filled(node, context)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        sides = (node.left, node.right)
        pair = sides if _too_large(node.right, context) else (node.right, node.left)
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        pair = (node.targets[0].value, node.value)
    return pair if pair and _too_large(pair[1], context) else None


def _filled(call: ast.Call, context: EventContext) -> tuple[ast.expr, ast.expr] | None:
    func = call.func
    if isinstance(func, ast.Attribute) and func.attr in ("masked_fill", "masked_fill_"):
        is_function = context.frame.qualified(func) == "torch.masked_fill"
        value = argument_of(call, "value", 2 if is_function else 1)
        tensor = call.args[0] if is_function and call.args else func.value
        return (tensor, value) if value is not None else None
    if context.frame.qualified(func) == "torch.where" and len(call.args) == 3:
        _, chosen, other = call.args
        return (other, chosen) if _too_large(chosen, context) else (chosen, other)
    if (
        context.frame.qualified(func) == "torch.full_like"
        and len(call.args) == 2
        and argument_of(call, "dtype") is None
    ):
        return call.args[0], call.args[1]
    return None


def _too_large(node: ast.expr, context: EventContext) -> bool:
    values = [_number(value.node) for value in context.frame.values(node)]
    return bool(values) and all(value is not None and LARGEST < abs(value) < float("inf") for value in values)


def _number(node: ast.expr | None) -> float | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "float" and len(node.args) == 1:
        node = node.args[0]
        try:
            return float(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
        except ValueError:
            return None
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    return None


def _finfo(tensor: ast.expr, literal: ast.expr, code: SourceFile, context: EventContext) -> tuple[Edit, ...]:
    """Return the edit to ``torch.finfo(scores.dtype).min``, if the tensor has a name and ``torch`` is imported."""
    value = _number(literal)
    named = dotted_text(tensor)
    if value is None or named is None or not _imports_torch(code, context):
        return ()
    return (code.script.replace(literal, f"torch.finfo({named}.dtype).{'min' if value < 0 else 'max'}"),)


def _imports_torch(code: SourceFile, context: EventContext) -> bool:
    """Return whether the name ``torch`` is the module here: imported by the script and not rebound."""
    imported = any(
        alias.asname is None and alias.name.partition(".")[0] == "torch"
        for statement in code.script.tree.body
        if isinstance(statement, ast.Import)
        for alias in statement.names
    )
    return imported and not any(function.holds("torch") for function in context.frame.function.chain())
