"""Compositions of operations that fail in FP16 where torch has one that does not."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.events import Context
from ampwise.source.halves import HALF, LIKELY_HALF, halves_of, layer_called, method_or_function
from ampwise.source.outline import Function
from ampwise.source.pattern import Pattern
from ampwise.source.project import Code
from ampwise.source.reaching import reaching
from ampwise.source.vocabulary import SAYS_FP16

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP401",
    name="unstable-op-autocast",
    severity=Severity.WARNING,
    summary="A loss under FP16 autocast is put together from operations that overflow or cancel.",
    why=(
        "CUDA autocast runs exp, log, pow, sum and softmax in FP32, but sigmoid, products, mean and sqrt in FP16. So "
        "`log(sigmoid(x))` is -inf below -17.4, `log(1 - sigmoid(x))` above 8.4, `x * x` is inf above 256, and "
        "E[x^2] - E[x]^2 takes the difference of means rounded to 11 bits. A softmax by hand overflows in FP32 too, "
        "at 89, and `log(softmax(x))` is -inf where a probability underflows."
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

WORDS = Pattern(r"exp|log|sigmoid|softmax|sqrt|mean|\*\* ?0\.5")
# In a function with one of these the exponent may well be bounded: normalised vectors, a maximum taken off.
BOUNDED = Pattern(r"normali[sz]e|norm\(|(?<!soft)max|clamp|cos|temp|tau|tanh")


def check(code: Code) -> Iterator[Finding]:
    if not WORDS.search(code.script.text):
        return
    seen: set[ast.AST] = set()
    for site in code.statements:
        autocast = site.context.autocast
        if autocast is None or not autocast.surely_fp16 or site.context.no_grad:
            continue
        look = _Look(code, site.context)
        for node in ast.walk(site.node):
            message = None if node in seen or not isinstance(node, ast.Call | ast.BinOp) else look.at(node)
            if message is not None:
                seen.update(ast.walk(node))  # a softmax by hand is one mistake, not one for each exp
                yield RULE.at(code.script.place(node), message)


class _Look:
    """What is wrong with an expression, in one context."""

    def __init__(self, code: Code, context: Context) -> None:
        self.code = code
        self.context = context
        self.text: str | None = None

    def at(self, node: ast.Call | ast.BinOp) -> str | None:
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
            return f"the sigmoid is in FP16, and this logarithm is -inf for scores {limit}"
        summed = self.operand(inner, "sum")
        if summed is not None and self.overflowing(self.operand(summed, "exp")):
            return "logsumexp by hand overflows above 89; `torch.logsumexp` subtracts the maximum"
        return None

    def softmax(self, node: ast.expr) -> str | None:
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            return None
        above = self.operand(self.resolved(node.left), "exp")
        total = self.operand(self.resolved(node.right), "sum")
        below = self.operand(total, "exp") if total is not None else None
        if above is None or below is None or ast.dump(above) != ast.dump(below) or not self.overflowing(above):
            return None
        return "a softmax by hand overflows above 89; `torch.softmax` subtracts the maximum"

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
        return "the products are in FP16, and infinite above 256; `torch.linalg.vector_norm` runs in FP32"

    # -- what expressions are -----------------------------------------------------------------------------

    def operand(self, node: ast.expr | None, operation: str) -> ast.expr | None:
        """The tensor of ``x.log()`` or ``torch.log(x)``, names followed; None when it is another operation."""
        if not isinstance(node, ast.Call):
            return None
        frame = self.context.frame
        if (layer_called(node, frame) or "").lower() == operation:
            return self.resolved(node.args[0]) if node.args else None
        found = method_or_function(node, frame)
        if found is None or found[0] != operation or found[1] is None or _given_dtype(node):
            return None
        return self.resolved(found[1])

    def resolved(self, node: ast.expr) -> ast.expr:
        """What a name of this function stands for, when that is one expression under the same autocast."""
        values = reaching(node, self.context.frame) if isinstance(node, ast.Name) else []
        if (
            len(values) != 1
            or values[0].frame is not self.context.frame
            or not isinstance(values[0].node, ast.Call | ast.BinOp)
        ):
            return node
        there = halves_of(self.code).contexts.get((id(values[0].node), id(self.context.frame)))
        same = there is not None and there.autocast is self.context.autocast
        return values[0].node if same else node

    def squared(self, node: ast.expr) -> ast.expr | None:
        """The x of ``x ** 2``, ``x.pow(2)``, ``torch.square(x)`` or ``x * x``."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            return node.left if isinstance(node.right, ast.Constant) and node.right.value == 2 else None
        if isinstance(node, ast.Call):
            power = self.operand(node, "pow")
            squares = power is not None and isinstance(node.args[-1], ast.Constant) and node.args[-1].value == 2
            return power if squares else self.operand(node, "square")
        return _product(node)

    def is_half(self, node: ast.expr) -> bool:
        return halves_of(self.code).dtype(node, self.context) in (HALF, LIKELY_HALF)

    def overflowing(self, exponent: ast.expr | None) -> bool:
        """Whether an exponent is a bare score of a model or layer, with nothing about that may bound it."""
        shifted = isinstance(exponent, ast.UnaryOp) or (
            isinstance(exponent, ast.BinOp) and not isinstance(exponent.op, ast.MatMult)
        )
        if exponent is None or shifted or not self.is_half(exponent):
            return False
        if self.text is None:
            self.text = _text_of(self.context.frame.function)
        return not BOUNDED.search(self.text)


@functools.lru_cache(maxsize=8)  # every statement of a function asks
def _text_of(function: Function) -> str:
    return ast.unparse(function.node) if function.name else function.outline.script.text


def _complement(node: ast.expr) -> ast.expr | None:
    """The p of ``1 - p``."""
    is_one = isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant) and node.left.value == 1
    return node.right if is_one and isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) else None


def _product(node: ast.expr) -> ast.expr | None:
    """The x of ``x * x``."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return None
    return node.left if ast.dump(node.left) == ast.dump(node.right) else None


def _given_dtype(call: ast.Call) -> bool:
    return any(word.arg == "dtype" for word in call.keywords)
