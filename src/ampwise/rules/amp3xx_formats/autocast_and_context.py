from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampwise.check.source.precision import autocast_of, entered
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import Frame, SourceFile

RULE = Rule(
    code="AMP314",
    name="autocast-and-context",
    severity=Severity.WARNING,
    summary="Two context managers are joined by `and` or `or`, which enters only one of them.",
    why=(
        "`and` and `or` return one of their operands, and a context manager is true: `with a and b:` enters only b, "
        "`with a or b:` only a. An autocast that is left out means FP32, with its speed and memory; a `no_grad` that "
        "is left out keeps the graph of the evaluation."
    ),
    fix="Separate the context managers by a comma: `with torch.autocast(...), torch.no_grad():`.",
    bad='with torch.autocast("cuda") and torch.enable_grad():\n    loss = model(x).mean()',
    good='with torch.autocast("cuda"), torch.enable_grad():\n    loss = model(x).mean()',
)
NEEDS = (("autocast",), (" and", " or"))

OTHERS = frozenset(
    (
        *("torch.no_grad", "torch.inference_mode", "torch.enable_grad", "torch.set_grad_enabled"),
        *("torch.autograd.no_grad", "torch.autograd.enable_grad", "torch.autograd.set_grad_enabled"),
        *("torch.nn.attention.sdpa_kernel", "torch.backends.cuda.sdp_kernel", "contextlib.nullcontext"),
    )
)


def check_source(code: SourceFile) -> Findings:
    for joined in code.nodes(ast.BoolOp):
        frame = code.frame(code.function_at(joined))
        autocasts = [part for part in joined.values if _is_autocast(part, frame)]
        managers = [part for part in joined.values if part in autocasts or _is_other(part, frame)]
        if not autocasts or len(managers) < 2:
            continue
        # `flag and autocast() or nullcontext()` is right: a flag decides.
        operator, taken = ("and", joined.values[-1]) if isinstance(joined.op, ast.And) else ("or", joined.values[0])
        parts = [code.script.segment(part) for part in managers if part is not taken]
        left_out = next((part for part in parts if "nullcontext" not in part), None)
        if left_out is not None and (operator == "and" or taken in managers):
            message = f"`{operator}` enters only `{_short(code.script.segment(taken))}`, never `{_short(left_out)}`"
            yield RULE.at(code.script.place(joined), message)


def _is_autocast(node: ast.expr, frame: Frame) -> bool:
    """Return whether it is surely an autocast: a name may hold None, which makes `ctx or nullcontext()` right."""
    values = [value.node for value in frame.values(node)] if isinstance(node, ast.Name | ast.Attribute) else [node]
    if not all(isinstance(value, ast.Call) for value in values) or entered(node) is not node:
        return False
    autocast = autocast_of(node, frame)
    return autocast is not None and autocast.known


def _is_other(node: ast.expr, frame: Frame) -> bool:
    if isinstance(node, ast.IfExp):
        return _is_other(node.body, frame) and _is_other(node.orelse, frame)
    return isinstance(node, ast.Call) and frame.qualified(node.func) in OTHERS


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 40 else f"{line[:37]}..."
