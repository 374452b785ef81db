from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.names import method_called
from ampwise.check.source.precision import argument_of, autocast_of, literal_bool
from ampwise.check.source.torch_names import AUTOCASTS, GRAD_SCALERS
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.project import SourceFile

RULE = Rule(
    code="AMP312",
    name="ineffective-autocast",
    severity=Severity.WARNING,
    summary="Autocast has no effect: it is never entered, has no forward inside, or is always disabled.",
    why=(
        "Autocast chooses the dtype of operations that run inside it, and the backward follows the forward. If it is "
        "created but not entered, or only wraps `backward()` and `step()`, it changes nothing: the model runs in "
        "FP32, with the speed and memory of FP32."
    ),
    fix="Put the forward and the loss, and nothing else, in a `with torch.autocast(...)` block.",
    bad='loss = loss_fn(model(x), y)\nwith torch.autocast("cuda"):\n    scaler.step(optimizer)',
    good='with torch.autocast("cuda"):\n    loss = loss_fn(model(x), y)\nscaler.step(optimizer)',
)
NEEDS = (("autocast",), (".backward(", ".step(", "GradScaler"))

# Calls that autocast does not affect.
UNTOUCHED = frozenset(
    (
        *("backward", "step", "update", "unscale_", "zero_grad", "scale", "clip_grad_norm_", "clip_grad_value_"),
        *("parameters", "to", "cuda", "cpu", "detach", "item", "print", "len", "append", "float", "int", "format"),
        *("set_postfix", "set_description", "get_scale", "get_last_lr", "synchronize"),
    )
)
OF_THE_STEP = frozenset(("backward", "step", "update", "unscale_", "zero_grad", "to", "cuda"))
HARMLESS = ast.Expr | ast.Assign | ast.AugAssign | ast.If | ast.Pass
# Operators that may divide a loss or test a counter; others compute on tensors.
SMALL = ast.Div | ast.Mod | ast.Add | ast.Mult


def check_source(code: SourceFile) -> Findings:
    found: list[tuple[ast.expr, str]] = []
    for statement in code.nodes(ast.Expr):
        call = statement.value
        if isinstance(call, ast.Call) and code.outline.imports.qualified(call.func) in AUTOCASTS:
            found.append((call, "this autocast is created but never entered: it needs a `with`"))
    for block in code.nodes(ast.With):
        if len(block.items) == 1 and _nothing_to_cast(block.body):  # only backward, step and copies
            manager = block.items[0].context_expr
            autocast = autocast_of(manager, code.frame(code.function_at(block)))
            if autocast is not None and autocast.known and autocast.may_be_on:
                found.append((manager, "no forward or loss is computed in this autocast region"))
    reported: set[ast.AST] = set()
    for node, message in [*found, *_always_disabled(code)]:
        if node not in reported:
            reported.add(node)
            yield RULE.at(code.script.place(node), message)


def _nothing_to_cast(body: list[ast.stmt]) -> bool:
    names = set()
    for part in (part for statement in body for part in ast.walk(statement)):
        if isinstance(part, ast.stmt) and not isinstance(part, HARMLESS):
            return False
        if isinstance(part, ast.ListComp | ast.GeneratorExp | ast.Await | ast.Lambda):
            return False
        if isinstance(part, ast.BinOp) and not isinstance(part.op, SMALL):
            return False
        if isinstance(part, ast.Call):
            name = method_called(part) or getattr(part.func, "id", "")
            closes = name == "step" and any(isinstance(arg, ast.Name) and "clos" in arg.id for arg in part.args)
            makes_a_graph = any(word.arg in ("create_graph", "closure") for word in part.keywords)
            if name not in UNTOUCHED or closes or makes_a_graph:
                return False
            names.add(name)
    return not names.isdisjoint(OF_THE_STEP)


def _always_disabled(code: SourceFile) -> Iterator[tuple[ast.expr, str]]:
    """Yield training whose forward runs in ``autocast(enabled=False)``, in a file where autocast is never on."""
    qualified, calls = code.outline.imports.qualified, code.nodes(ast.Call)
    scalers = [call for call in calls if qualified(call.func) in GRAD_SCALERS]
    uses = {node for node in (*code.nodes(ast.Name), *code.nodes(ast.Attribute)) if qualified(node) in AUTOCASTS}
    entered = [call for call in calls if call.func in uses]
    disabled = [call for call in entered if literal_bool(argument_of(call, "enabled")) is False]
    # A file that disables its GradScaler as well means it.
    meant = any(literal_bool(argument_of(call, "enabled")) is False for call in scalers)
    if meant or not uses or not len(disabled) == len(entered) == len(uses):
        return
    for region in code.regions:
        if not region.has("backward", "scaled backward"):
            continue
        autocasts = [e.context.autocast for e in region.events_of("forward") if not e.context.no_grad]
        off = [autocast for autocast in autocasts if autocast is not None and autocast.enabled is False]
        if off and len(off) == len(autocasts):
            yield off[0].node, "autocast is always disabled here: this trains in FP32"
