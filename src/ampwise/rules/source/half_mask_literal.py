"""A mask value that FP16 cannot hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise.finding import Edit, Finding, Rule, Severity
from ampwise.source.events import Context
from ampwise.source.halves import HALF, halves_of
from ampwise.source.names import dotted_text
from ampwise.source.pattern import Pattern
from ampwise.source.precision import keyword
from ampwise.source.project import Code
from ampwise.source.vocabulary import SAYS_FP16

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP403",
    name="half-mask-literal",
    severity=Severity.ERROR,
    summary="A mask value beyond the range of FP16 is written into a half tensor.",
    why=(
        "The largest FP16 number is 65504. `masked_fill` with -1e9 on a half tensor raises an error; `torch.where`, "
        "indexing and a product turn it into -inf, and a row that is masked all over then gives NaN in the softmax."
    ),
    fix="Use the smallest number of the tensor's own dtype: `torch.finfo(x.dtype).min`.",
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
BEYOND = Pattern(r"\de\+?\d|\d{5}", re.IGNORECASE)


def check(code: Code) -> Iterator[Finding]:
    if not BEYOND.search(code.script.text):
        return
    seen: set[ast.AST] = set()
    for site in code.statements:
        for node in ast.walk(site.node):
            found = None if node in seen else _masking(node, site.context)
            if found is None:
                continue
            tensor, literal = found
            if halves_of(code).dtype(tensor, site.context) == HALF:
                seen.add(node)
                yield RULE.at(
                    code.script.place(node),
                    f"{code.script.segment(literal)} is beyond FP16, whose largest number is 65504",
                    edits=_finfo(tensor, literal, code, site.context),
                    # A product is added to something, and twice the largest number is infinite.
                    safe=not isinstance(node, ast.BinOp) and "jit.script" not in code.script.text,
                )


def _masking(node: ast.AST, context: Context) -> tuple[ast.expr, ast.expr] | None:
    """The tensor that is masked and the value it is given, when that is too large for FP16."""
    pair: tuple[ast.expr, ast.expr] | None = None
    if isinstance(node, ast.Call):
        pair = _filled(node, context)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        sides = (node.left, node.right)
        pair = sides if _too_large(node.right, context) else (node.right, node.left)
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        pair = (node.targets[0].value, node.value)
    return pair if pair and _too_large(pair[1], context) else None


def _filled(call: ast.Call, context: Context) -> tuple[ast.expr, ast.expr] | None:
    func = call.func
    if isinstance(func, ast.Attribute) and func.attr in ("masked_fill", "masked_fill_"):
        is_function = context.frame.qualified(func) == "torch.masked_fill"
        value = keyword(call, "value", 2 if is_function else 1)
        tensor = call.args[0] if is_function and call.args else func.value
        return (tensor, value) if value is not None else None
    if context.frame.qualified(func) == "torch.where" and len(call.args) == 3:
        _, chosen, other = call.args
        return (other, chosen) if _too_large(chosen, context) else (chosen, other)
    if context.frame.qualified(func) == "torch.full_like" and len(call.args) == 2 and keyword(call, "dtype") is None:
        return call.args[0], call.args[1]
    return None


def _too_large(node: ast.expr, context: Context) -> bool:
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


def _finfo(tensor: ast.expr, literal: ast.expr, code: Code, context: Context) -> tuple[Edit, ...]:
    """``torch.finfo(scores.dtype).min`` for the literal, where the tensor has a name to ask, and torch its own."""
    value = _number(literal)
    named = dotted_text(tensor)
    if value is None or named is None or not _knows_torch(code, context):
        return ()
    return (code.script.replace(literal, f"torch.finfo({named}.dtype).{'min' if value < 0 else 'max'}"),)


def _knows_torch(code: Code, context: Context) -> bool:
    """Whether the name ``torch`` is torch's here: imported by the module itself, and taken by nothing else."""
    imported = any(
        alias.asname is None and alias.name.partition(".")[0] == "torch"
        for statement in code.script.tree.body
        if isinstance(statement, ast.Import)
        for alias in statement.names
    )
    return imported and not any(function.holds("torch") for function in context.frame.function.chain())
