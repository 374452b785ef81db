"""Compositions of operations that fail in FP16 where torch has a stable function."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from ampwise.check.source.events import EventContext
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.outline import FunctionOutline
from ampwise.check.source.project import SourceFile
from ampwise.check.source.reaching_definitions import reaching_values
from ampwise.check.source.tensor_dtypes import HALF, LIKELY_HALF, layer_called, tensor_dtypes, torch_operation
from ampwise.check.source.torch_names import SAYS_FP16
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

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
        "Use the function made for it: log_softmax, logsigmoid on `.float()`, logsumexp, var, vector_norm, "
        "binary_cross_entropy_with_logits. They subtract the maximum, or run in FP32."
    ),
    bad='with torch.autocast("cuda"):\n    loss = -torch.log(1 - torch.sigmoid(logits)).mean()',
    good='with torch.autocast("cuda"):\n    loss = F.softplus(logits).mean()',
)
NEEDS = (
    ("autocast",),
    SAYS_FP16,
    ("log(", "exp(", "sqrt(", "log2(", "var("),
)

WORDS = LazyPattern(r"exp|log|sigmoid|softmax|sqrt|mean|\*\* ?0\.5")
# In a function with one of these the exponent may be bounded: normalised vectors, a subtracted maximum.
BOUNDED = LazyPattern(r"normali[sz]e|norm\(|(?<!soft)max|clamp|cos|temp|tau|tanh")


def check(code: SourceFile) -> Iterator[Finding]:
    if not WORDS.search(code.script.text):
        return
    seen: set[ast.AST] = set()
    for site in code.statements:
        autocast = site.context.autocast
        if autocast is None or not autocast.surely_fp16 or site.context.no_grad:
            continue
        checker = _ExpressionChecker(code, site.context)
        for node in ast.walk(site.node):
            message = None if node in seen or not isinstance(node, ast.Call | ast.BinOp) else checker.message(node)
            if message is not None:
                seen.update(ast.walk(node))  # a hand-written softmax is one mistake, not one per exp
                yield RULE.at(code.script.place(node), message)


class _ExpressionChecker:
    """Finds what is wrong with an expression in one context."""

    def __init__(self, code: SourceFile, context: EventContext) -> None:
        self.code = code
        self.context = context
        self.text: str | None = None

    def message(self, node: ast.Call | ast.BinOp) -> str | None:
        return self.logarithm(node) or self.softmax(node) or self.variance(node) or self.norm(node)

    def logarithm(self, node: ast.expr) -> str | None:
        inner = self.operand(node, "log")
        if inner is None:
            return None
        if self.operand(inner, "softmax") is not None:
            return "the log of a softmax is -inf where a probability underflows; `log_softmax` is not"
        probability = _complement(inner)
        is_sigmoid = self.operand(self.resolved(probability or inner), "sigmoid") is not None
        if is_sigmoid and self.is_half(probability or inner):
            limit = "above 8.4" if probability is not None else "below -17.4"
            return f"the sigmoid is in FP16, so this logarithm is -inf for scores {limit}"
        summed = self.operand(inner, "sum")
        if summed is not None and self.overflowing(self.operand(summed, "exp")):
            return "a hand-written logsumexp overflows above 89; `torch.logsumexp` subtracts the maximum"
        return None

    def softmax(self, node: ast.expr) -> str | None:
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            return None
        above = self.operand(self.resolved(node.left), "exp")
        total = self.operand(self.resolved(node.right), "sum")
        below = self.operand(total, "exp") if total is not None else None
        if above is None or below is None or ast.dump(above) != ast.dump(below) or not self.overflowing(above):
            return None
        return "a hand-written softmax overflows above 89; `torch.softmax` subtracts the maximum"

    def variance(self, node: ast.expr) -> str | None:
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub):
            return None
        squares = self.operand(self.resolved(node.left), "mean")
        tensor = self.squared(squares) if squares is not None else None
        tensor = self.resolved(tensor) if tensor is not None else None
        mean = self.squared(self.resolved(node.right))
        centre = self.operand(self.resolved(mean), "mean") if mean is not None else None
        if tensor is None or centre is None or ast.dump(tensor) != ast.dump(centre) or not self.is_half(tensor):
            return None
        return "E[x^2] - E[x]^2 cancels: the mean is rounded to FP16 before it is squared; use `var`"

    def norm(self, node: ast.expr) -> str | None:
        rooted = self.operand(node, "sqrt")
        if rooted is None and isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            rooted = node.left if isinstance(node.right, ast.Constant) and node.right.value == 0.5 else None
        summed = self.operand(self.resolved(rooted), "sum") if rooted is not None else None
        tensor = _product(self.resolved(summed)) if summed is not None else None
        if tensor is None or not self.is_half(tensor):
            return None
        return "the squares are in FP16 and become inf above 256; `torch.linalg.vector_norm` runs in FP32"

    # -- parts of expressions ----------------------------------------------------------------------------

    def operand(self, node: ast.expr | None, operation: str) -> ast.expr | None:
        """Return the tensor of ``x.log()`` or ``torch.log(x)``, following names; None for another operation."""
        if not isinstance(node, ast.Call):
            return None
        frame = self.context.frame
        if (layer_called(node, frame) or "").lower() == operation:
            return self.resolved(node.args[0]) if node.args else None
        found = torch_operation(node, frame)
        if found is None or found[0] != operation or found[1] is None or _given_dtype(node):
            return None
        return self.resolved(found[1])

    def resolved(self, node: ast.expr) -> ast.expr:
        """Return the expression a name stands for, if there is exactly one, under the same autocast."""
        values = reaching_values(node, self.context.frame) if isinstance(node, ast.Name) else []
        if (
            len(values) != 1
            or values[0].frame is not self.context.frame
            or not isinstance(values[0].node, ast.Call | ast.BinOp)
        ):
            return node
        there = tensor_dtypes(self.code).contexts.get((id(values[0].node), id(self.context.frame)))
        same = there is not None and there.autocast is self.context.autocast
        return values[0].node if same else node

    def squared(self, node: ast.expr) -> ast.expr | None:
        """Return the x of ``x ** 2``, ``x.pow(2)``, ``torch.square(x)`` or ``x * x``."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            return node.left if isinstance(node.right, ast.Constant) and node.right.value == 2 else None
        if isinstance(node, ast.Call):
            power = self.operand(node, "pow")
            squares = power is not None and isinstance(node.args[-1], ast.Constant) and node.args[-1].value == 2
            return power if squares else self.operand(node, "square")
        return _product(node)

    def is_half(self, node: ast.expr) -> bool:
        return tensor_dtypes(self.code).dtype(node, self.context) in (HALF, LIKELY_HALF)

    def overflowing(self, exponent: ast.expr | None) -> bool:
        """Return whether an exponent is a raw score of a model or layer, with nothing that may bound it."""
        shifted = isinstance(exponent, ast.UnaryOp) or (
            isinstance(exponent, ast.BinOp) and not isinstance(exponent.op, ast.MatMult)
        )
        if exponent is None or shifted or not self.is_half(exponent):
            return False
        if self.text is None:
            self.text = _text_of(self.context.frame.function)
        return not BOUNDED.search(self.text)


@functools.lru_cache(maxsize=8)  # called for every statement of a function
def _text_of(function: FunctionOutline) -> str:
    return ast.unparse(function.node) if function.name else function.outline.script.text


def _complement(node: ast.expr) -> ast.expr | None:
    """Return the p of ``1 - p``."""
    is_one = isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant) and node.left.value == 1
    return node.right if is_one and isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) else None


def _product(node: ast.expr) -> ast.expr | None:
    """Return the x of ``x * x``."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return None
    return node.left if ast.dump(node.left) == ast.dump(node.right) else None


def _given_dtype(call: ast.Call) -> bool:
    return any(word.arg == "dtype" for word in call.keywords)
