from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import dotted_text
from ampwise.check.source.precision import argument_of, literal_number
from ampwise.check.source.tensor_dtypes import HALF, LIKELY_HALF, PART, tensor_dtypes
from ampwise.check.source.torch_names import SAYS_FP16
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Edit, Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import EventContext, Frame, SourceFile

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
    ("masked_fill", "where(", "mask", "index_fill", "] = -", "] = float("),
    ("-1e", "1e9", "1e10", "1e5", "1e6", "1e7", "1e8", "-1000", "-9", "e+", "finfo"),
)

LARGEST = 65504.0
FINFO = {"torch.float32": 3.4e38, "torch.float": 3.4e38, "torch.bfloat16": 3.39e38, "torch.float64": 1.8e308}
BEYOND = LazyPattern(r"\de\+?\d|\d{5}|finfo", re.IGNORECASE)
WRITES = (ast.BinOp, ast.Assign, ast.AugAssign, ast.Call)
# Methods that write a value, and which argument it is.
FILLS = {"masked_fill": 1, "masked_fill_": 1, "index_fill": 2, "index_fill_": 2}


def check_source(code: SourceFile) -> Findings:
    if not BEYOND.search(code.script.text):
        return
    seen: set[ast.AST] = set()
    parts: dict[ast.AST, list[ast.AST]] = {}  # of each statement, which may run in many contexts
    for site in code.statements:
        if site.node not in parts:
            parts[site.node] = [part for part in walk(site.node) if isinstance(part, WRITES)]
        for node in parts[site.node]:
            tensor, literal = (None, None) if node in seen else _masking(node, site.context.frame)
            if literal is None or not _too_large(literal, site.context.frame):
                continue
            if tensor is not None and _is_half(tensor, node, site.context, code):
                seen.add(node)
                edits = _finfo(tensor, literal, code, site.context.frame)
                yield RULE.at(
                    code.script.place(node),
                    f"{code.script.segment(literal)} exceeds the range of FP16, which ends at 65504",
                    fix=None if edits else RULE.without_edit("the tensor or the literal has no plain name here"),
                    edits=edits,
                    # A product is added to something, and twice the largest FP16 number is inf.
                    safe=not isinstance(node, ast.BinOp | ast.AugAssign) and "jit.script" not in code.script.text,
                )


def _is_half(tensor: ast.expr, masking: ast.AST, context: EventContext, code: SourceFile) -> bool:
    """Whether a tensor is in FP16, or an output of a model that autocast runs in FP16, or one of a list of them."""
    if tensor_dtypes(code).dtype(tensor, context) == HALF:
        return True
    if isinstance(masking, ast.BinOp):
        return False  # a factor of an output may be a unit, not a mask
    return tensor_dtypes(code, any_mode=True).dtype(tensor, context) in (LIKELY_HALF, PART[LIKELY_HALF])


def _masking(node: ast.AST, frame: Frame) -> tuple[ast.expr | None, ast.expr | None]:
    """Return the tensor that a value is written into, or multiplied by, and the value."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return (node.left, node.right) if _too_large(node.right, frame) else (node.right, node.left)
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        return node.targets[0].value, node.value
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
        return (node.target.value, node.value) if isinstance(node.op, ast.Add | ast.Sub) else (None, None)
    if not isinstance(node, ast.Call):
        return None, None
    name = frame.qualified(node.func)
    if isinstance(node.func, ast.Attribute) and node.func.attr in FILLS:
        is_function = (name or "").startswith("torch.")
        value = argument_of(node, "value", FILLS[node.func.attr] + is_function)
        return node.args[0] if is_function and node.args else node.func.value, value
    if name == "torch.where" and len(node.args) == 3:
        _, chosen, other = node.args
        return (other, chosen) if _too_large(chosen, frame) else (chosen, other)
    if name == "torch.full_like" and len(node.args) == 2 and argument_of(node, "dtype") is None:
        return node.args[0], node.args[1]
    return None, None


def _too_large(node: ast.expr, frame: Frame) -> bool:
    values = [_number(value.node) for value in frame.values(node)]
    return bool(values) and all(value is not None and LARGEST < abs(value) < float("inf") for value in values)


def _number(node: ast.expr | None) -> float | None:
    """Return the value of ``-1e9``, ``float("-1e9")``, ``torch.tensor(-1e9)`` or ``torch.finfo(torch.float32).min``."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("float", "torch.tensor") and len(node.args) == 1:
        node = node.args[0]
        try:
            written = isinstance(node, ast.Constant) and isinstance(node.value, str)
            return float(node.value) if written else _number(node)  # type: ignore[attr-defined]
        except ValueError:
            return None
    if isinstance(node, ast.Attribute) and node.attr in ("min", "max") and isinstance(node.value, ast.Call):
        asked = ast.unparse(node.value)
        return next(
            (
                (limit if node.attr == "max" else -limit)
                for name, limit in FINFO.items()
                if asked == f"torch.finfo({name})"
            ),
            None,
        )
    return literal_number(node)


def _finfo(tensor: ast.expr, literal: ast.expr, code: SourceFile, frame: Frame) -> tuple[Edit, ...]:
    """Return the edit to ``torch.finfo(scores.dtype).min``, if the tensor has a name and ``torch`` is the module."""
    value, named = _number(literal), dotted_text(tensor)
    imports = [alias for node in code.script.tree.body if isinstance(node, ast.Import) for alias in node.names]
    imported = any(alias.asname is None and alias.name.partition(".")[0] == "torch" for alias in imports)
    rebound = any(function.holds("torch") for function in frame.function.scopes)
    if value is None or named is None or not imported or rebound:
        return ()
    return (code.script.replace(literal, f"torch.finfo({named}.dtype).{'min' if value < 0 else 'max'}"),)
