from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.precision import argument_of, literal_number
from ampwise.check.source.reaching_definitions import reaching_values
from ampwise.check.source.tensor_dtypes import (
    HALF,
    LIKELY_HALF,
    half_format,
    layer_called,
    tensor_dtypes,
    torch_operation,
)
from ampwise.check.source.torch_names import SAYS_FP16
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import EventContext, FunctionOutline, SourceFile

RULE = Rule(
    code="AMP401",
    name="unstable-op-autocast",
    severity=Severity.WARNING,
    summary="A loss under FP16 autocast is composed of operations that overflow or cancel.",
    why=(
        "CUDA autocast runs exp, log, pow, sum and softmax in FP32, but sigmoid, products, mean and sqrt in FP16. So "
        "`log(sigmoid(x))` is -inf below -17.4, `log(1 - sigmoid(x))` above 8.4, `x * x` is inf above 256, and E[x^2] "
        "- E[x]^2 is a difference of means rounded to 11 bits. A hand-written softmax overflows in FP32 too, at 89, "
        "and `log(softmax(x))` is -inf where a probability underflows."
    ),
    fix=(
        "Use the function made for it: log_softmax, logsumexp, var, vector_norm, binary_cross_entropy_with_logits. "
        "logsigmoid also needs `.float()` inputs."
    ),
    bad='with torch.autocast("cuda"):\n    loss = -torch.log(1 - torch.sigmoid(logits)).mean()',
    good='with torch.autocast("cuda"):\n    loss = F.softplus(logits).mean()',
)
NEEDS = (("autocast",), SAYS_FP16, ("log(", "exp(", "sqrt(", "log2(", "var("))

WORDS = LazyPattern(r"exp|log|sigmoid|softmax|sqrt|mean|\*\* ?0\.5")
# In a function with one of these the exponent may be bounded: normalised vectors, a subtracted maximum.
BOUNDED = LazyPattern(r"normali[sz]e|norm\(|(?<!soft)max|clamp|cos|temp|tau|tanh")


def check_source(code: SourceFile) -> Findings:
    if not WORDS.search(code.script.text):
        return
    seen: set[ast.AST] = set()
    for site in code.statements:
        if half_format(site.context) != HALF or site.context.no_grad:
            continue
        checker = _ExpressionChecker(code, site.context)
        for node in walk(site.node):
            message = None if node in seen or not isinstance(node, ast.Call | ast.BinOp) else checker.message(node)
            if message is not None:
                seen.update(walk(node))  # a hand-written softmax is one mistake, not one per exp
                yield RULE.at(code.script.place(node), message)


class _ExpressionChecker:
    """Finds what is wrong with an expression in one context."""

    def __init__(self, code: SourceFile, context: EventContext) -> None:
        self.dtypes = tensor_dtypes(code)
        self.context = context

    def message(self, node: ast.Call | ast.BinOp) -> str | None:
        if isinstance(node, ast.Call):
            return self.logarithm(self.operand(node, "log")) or self.norm(self.operand(node, "sqrt"))
        if isinstance(node.op, ast.Div):
            return self.softmax(node)
        if isinstance(node.op, ast.Sub):
            return self.variance(node)
        is_root = isinstance(node.op, ast.Pow) and literal_number(node.right) == 0.5
        return self.norm(node.left) if is_root else None

    def logarithm(self, inner: ast.expr | None) -> str | None:
        if self.operand(inner, "softmax") is not None:
            return "the log of a softmax is -inf where a probability underflows; `log_softmax` is not"
        complement = isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub) and literal_number(inner.left) == 1
        probability = inner.right if complement and isinstance(inner, ast.BinOp) else inner  # the p of 1 - p
        if self.operand(self.resolved(probability), "sigmoid") is not None and self.is_half(probability):
            limit = "above 8.4" if complement else "below -17.4"
            return f"the sigmoid is in FP16, so this logarithm is -inf for scores {limit}"
        if self.overflowing(self.operand(self.operand(inner, "sum"), "exp")):
            return "a hand-written logsumexp overflows above 89; `torch.logsumexp` subtracts the maximum"
        return None

    def softmax(self, node: ast.BinOp) -> str | None:
        above = self.operand(self.resolved(node.left), "exp")
        below = self.operand(self.operand(self.resolved(node.right), "sum"), "exp")
        if _are_same(above, below) and self.overflowing(above):
            return "a hand-written softmax overflows above 89; `torch.softmax` subtracts the maximum"
        return None

    def variance(self, node: ast.BinOp) -> str | None:
        tensor = self.resolved(self.squared(self.operand(self.resolved(node.left), "mean")))
        centre = self.operand(self.resolved(self.squared(self.resolved(node.right))), "mean")
        if _are_same(tensor, centre) and self.is_half(tensor):
            return "E[x^2] - E[x]^2 cancels: the mean is rounded to FP16 before it is squared; use `var`"
        return None

    def norm(self, rooted: ast.expr | None) -> str | None:
        tensor = _factor(self.resolved(self.operand(self.resolved(rooted), "sum")))
        if tensor is not None and self.is_half(tensor):
            return "the squares are in FP16 and become inf above 256; `torch.linalg.vector_norm` runs in FP32"
        return None

    # Parts of expressions; of None, the part is None.

    def operand(self, node: ast.expr | None, operation: str) -> ast.expr | None:
        """Return the tensor of ``x.log()`` or ``torch.log(x)``, following names; None for another operation."""
        if not isinstance(node, ast.Call):
            return None
        frame = self.context.frame
        if (layer_called(node, frame) or "").lower() == operation:
            return self.resolved(node.args[0]) if node.args else None
        name, tensor = torch_operation(node, frame) or ("", None)
        return self.resolved(tensor) if name == operation and argument_of(node, "dtype") is None else None

    def resolved(self, node: ast.expr | None) -> ast.expr | None:
        """Return the expression a name stands for, if there is exactly one, under the same autocast."""
        frame = self.context.frame
        values = reaching_values(node, frame) if isinstance(node, ast.Name) else []
        value = values[0].node if len(values) == 1 and values[0].frame is frame else None
        there = self.dtypes.contexts.get((id(value), id(frame))) if isinstance(value, ast.Call | ast.BinOp) else None
        return value if there is not None and there.autocast is self.context.autocast else node

    def squared(self, node: ast.expr | None) -> ast.expr | None:
        """Return the x of ``x ** 2``, ``x.pow(2)``, ``torch.square(x)`` or ``x * x``."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            return node.left if literal_number(node.right) == 2 else None
        if isinstance(node, ast.Call):
            power = self.operand(node, "pow")
            squares = power is not None and node.args and literal_number(node.args[-1]) == 2
            return power if squares else self.operand(node, "square")
        return _factor(node)

    def is_half(self, node: ast.expr | None) -> bool:
        return self.dtypes.dtype(node, self.context) in (HALF, LIKELY_HALF)

    def overflowing(self, exponent: ast.expr | None) -> bool:
        """Return whether an exponent is a raw score of a model or layer, with nothing that may bound it."""
        shifted = isinstance(exponent, ast.BinOp) and not isinstance(exponent.op, ast.MatMult)
        if shifted or isinstance(exponent, ast.UnaryOp) or not self.is_half(exponent):
            return False
        return not BOUNDED.search(_text_of(self.context.frame.function))


@functools.lru_cache(maxsize=8)  # called for every statement of a function
def _text_of(function: FunctionOutline) -> str:
    return ast.unparse(function.node) if function.name else function.outline.script.text


def _are_same(one: ast.expr | None, other: ast.expr | None) -> bool:
    return one is not None and other is not None and ast.dump(one) == ast.dump(other)


def _factor(node: ast.expr | None) -> ast.expr | None:
    """Return the x of ``x * x``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and _are_same(node.left, node.right):
        return node.left
    return None
