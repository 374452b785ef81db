from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import method_called
from ampwise.check.source.torch_names import AUTOCASTS
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.project import SourceFile

RULE = Rule(
    code="AMP405",
    name="custom-function-no-custom-fwd",
    severity=Severity.WARNING,
    summary="An autograd.Function with matmuls lacks `custom_fwd` and `custom_bwd`.",
    why=(
        "The forward of a `torch.autograd.Function` runs under the caller's autocast, its backward does not. Without "
        "`custom_fwd` and `custom_bwd` the forward multiplies in FP16, while the backward combines FP32 weights with "
        "FP16 gradients, which is an error in a matmul; custom kernels may get either dtype."
    ),
    fix=(
        "Decorate forward with `torch.amp.custom_fwd(device_type='cuda')` and backward with `custom_bwd`. Add "
        "`cast_inputs=torch.float32` to custom_fwd if it needs FP32."
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

UNDER_AUTOCAST = {*AUTOCASTS, "ampwise.Engine"}  # both run steps under autocast
FUNCTIONS = ("torch.autograd.Function", "torch.autograd.function.Function", "torch.autograd.function.InplaceFunction")
MATMULS = LazyPattern(r"^(matmul|mm|bmm|mv|addmm|baddbmm|einsum|linear|conv\d?d?|conv_transpose\dd|conv\dd_\w+)$")
CASTS = LazyPattern(r"\.(float|half|double|type|type_as)\(|\.to\(|autocast|dtype|custom_(fwd|bwd)")


def check_source(code: SourceFile) -> Findings:
    qualified = code.outline.imports.qualified
    if not any(qualified(node) in UNDER_AUTOCAST for node in (*code.nodes(ast.Name), *code.nodes(ast.Attribute))):
        return
    for owner in code.outline.classes.values():
        forward, backward = owner.methods.get("forward"), owner.methods.get("backward")
        if forward is None or backward is None or not any(qualified(base) in FUNCTIONS for base in owner.node.bases):
            continue
        # Another decorator than these may do the casting.
        decorators = {ast.unparse(node) for method in owner.methods.values() for node in method.decorators}
        if CASTS.search(code.script.segment(owner.node)) or decorators - {"staticmethod", "torch.no_grad()"}:
            continue
        nodes = list(walk(backward.node))
        operators = (node.op for node in nodes if isinstance(node, ast.BinOp))
        if any(isinstance(op, ast.MatMult) for op in operators) or any(MATMULS.match(method_called(n)) for n in nodes):
            yield RULE.at(
                code.script.place(owner.node.bases[0]),  # on the line of the class
                f"the backward of `{owner.name}` runs a matmul without autocast on tensors that its forward saved "
                "under autocast",
            )
