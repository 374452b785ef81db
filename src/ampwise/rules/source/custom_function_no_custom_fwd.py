"""A custom autograd function that does not say how it wants to be cast."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.outline import Class, Function
from ampwise.source.pattern import Pattern
from ampwise.source.project import Code
from ampwise.source.vocabulary import AUTOCASTS

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP405",
    name="custom-function-no-custom-fwd",
    severity=Severity.WARNING,
    summary="An autograd function that multiplies matrices lacks `custom_fwd` and `custom_bwd`.",
    why=(
        "The forward of a `torch.autograd.Function` runs under the caller's autocast, its backward under none. "
        "Without `custom_fwd` and `custom_bwd` the forward multiplies in FP16 and the backward meets FP32 weights "
        "beside FP16 gradients, which is an error for a matrix product, and kernels of one's own get either dtype."
    ),
    fix=(
        "Decorate forward with `torch.amp.custom_fwd(device_type='cuda')` and backward with "
        "`torch.amp.custom_bwd(device_type='cuda')`; add `cast_inputs=torch.float32` where it needs FP32."
    ),
    bad=(
        "class MatMul(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, a, b):\n"
        "        ctx.save_for_backward(a, b)\n        return a.mm(b)"
    ),
    good=(
        'class MatMul(torch.autograd.Function):\n    @staticmethod\n    @torch.amp.custom_fwd(device_type="cuda")\n'
        "    def forward(ctx, a, b):\n        ctx.save_for_backward(a, b)\n        return a.mm(b)"
    ),
    on_by_default=False,
)
NEEDS = (("autocast", "ampwise"), ("autograd.Function", "import Function"))

UNDER_AUTOCAST = {*AUTOCASTS, "ampwise.Engine"}  # whose steps run under it
FUNCTIONS = ("torch.autograd.Function", "torch.autograd.function.Function", "torch.autograd.function.InplaceFunction")
PRODUCTS = Pattern(r"^(matmul|mm|bmm|mv|addmm|baddbmm|einsum|linear|conv\d?d?|conv_transpose\dd|conv\dd_\w+)$")
CASTS = Pattern(r"\.(float|half|double|type|type_as)\(|\.to\(|autocast|dtype|custom_(fwd|bwd)")


def check(code: Code) -> Iterator[Finding]:
    if not _uses_autocast(code):
        return
    for owner in code.outline.classes.values():
        forward, backward = owner.methods.get("forward"), owner.methods.get("backward")
        if forward is None or backward is None or not _is_function(owner, code):
            continue
        if CASTS.search(code.script.segment(owner.node)) or _decorated(owner, code):
            continue
        if _multiplies(backward):
            yield RULE.at(
                code.script.place(_header(owner.node)),
                f"`{owner.name}` multiplies in its backward, where autocast is off, what its forward saved under it",
            )


def _header(node: ast.ClassDef) -> ast.AST:
    """A node to point at: the base class, on the line of the class."""
    return node.bases[0]


def _uses_autocast(code: Code) -> bool:
    named = (*code.nodes(ast.Name), *code.nodes(ast.Attribute))
    return any(code.outline.imports.qualified(node) in UNDER_AUTOCAST for node in named)


def _is_function(owner: Class, code: Code) -> bool:
    return any(code.outline.imports.qualified(base) in FUNCTIONS for base in owner.node.bases)


def _decorated(owner: Class, code: Code) -> bool:
    """Whether forward or backward carries a decorator other than staticmethod: it may do the casting."""
    decorators = [node for method in owner.methods.values() for node in method.decorators]
    return any(ast.unparse(node) not in ("staticmethod", "torch.no_grad()") for node in decorators)


def _multiplies(function: Function) -> bool:
    for node in ast.walk(function.node):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and PRODUCTS.match(node.func.attr):
            return True
    return False
