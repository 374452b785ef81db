"""Autocast without effect: never entered, around the wrong lines, or always disabled."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.check.source.frame import Frame
from ampwise.check.source.precision import AutocastContext, argument_of, autocast_of, literal_bool
from ampwise.check.source.project import SourceFile
from ampwise.check.source.torch_names import AUTOCASTS, GRAD_SCALERS
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

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
HARMLESS = (ast.Expr, ast.Assign, ast.AugAssign, ast.If, ast.Pass)


def check(code: SourceFile) -> Iterator[Finding]:
    if "autocast" not in code.script.text:
        return
    reported: set[ast.AST] = set()
    for node, message in [*_never_entered(code), *_without_forward(code), *_always_disabled(code)]:
        if node not in reported:
            reported.add(node)
            yield RULE.at(code.script.place(node), message)


def _never_entered(code: SourceFile) -> Iterator[tuple[ast.expr, str]]:
    for node in code.nodes(ast.Expr):
        call = node.value
        if isinstance(call, ast.Call) and code.outline.imports.qualified(call.func) in AUTOCASTS:
            yield call, "this autocast is created but never entered: it needs a `with`"


def _without_forward(code: SourceFile) -> Iterator[tuple[ast.expr, str]]:
    """Yield ``with autocast():`` blocks that contain only backward, step and copies."""
    for node in code.nodes(ast.With):
        if len(node.items) == 1 and _nothing_to_cast(node.body):
            autocast = _plain_autocast(node.items[0].context_expr, code.frame(code.function_at(node)))
            if autocast is not None and autocast.may_be_on:
                yield node.items[0].context_expr, "no forward or loss is computed in this autocast region"


def _plain_autocast(node: ast.expr, frame: Frame) -> AutocastContext | None:
    autocast = autocast_of(node, frame)
    return autocast if autocast is not None and autocast.known else None


def _nothing_to_cast(body: list[ast.stmt]) -> bool:
    parts = [part for statement in body for part in ast.walk(statement)]
    statements = [part for part in parts if isinstance(part, ast.stmt)]
    calls = [part for part in parts if isinstance(part, ast.Call)]
    operators = [part for part in parts if isinstance(part, ast.BinOp | ast.UnaryOp | ast.Compare)]
    names = [_name(call) for call in calls]
    return (
        all(isinstance(statement, HARMLESS) for statement in statements)
        and bool(calls)
        and any(name in OF_THE_STEP for name in names)
        and all(name in UNTOUCHED and not _makes_a_graph(call) for name, call in zip(names, calls, strict=True))
        and not any(_computes(operator) for operator in operators)
        and not any(isinstance(part, ast.ListComp | ast.GeneratorExp | ast.Await | ast.Lambda) for part in parts)
    )


def _name(call: ast.Call) -> str:
    func = call.func
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def _makes_a_graph(call: ast.Call) -> bool:
    return any(word.arg in ("create_graph", "closure") for word in call.keywords) or (
        _name(call) == "step"
        and any(isinstance(argument, ast.Name) and "clos" in argument.id for argument in call.args)
    )


def _computes(node: ast.expr) -> bool:
    """Return whether an operator computes on tensors, unlike dividing a loss or testing a counter."""
    if isinstance(node, ast.BinOp):
        return not isinstance(node.op, ast.Div | ast.Mod | ast.Add | ast.Mult)
    return False


def _always_disabled(code: SourceFile) -> Iterator[tuple[ast.expr, str]]:
    """Yield training whose forward runs in ``autocast(enabled=False)``, in a file where autocast is never on."""
    if not _all_disabled(code) or _scaler_is_off_too(code):
        return
    for region in code.regions:
        if not region.has("backward", "scaled backward"):
            continue
        forwards = [event for event in region.events if event.kind == "forward" and not event.context.no_grad]
        autocasts = [event.context.autocast for event in forwards]
        off = [autocast for autocast in autocasts if autocast is not None and autocast.enabled is False]
        if off and len(off) == len(autocasts):
            yield off[0].node, "autocast is always disabled here: this trains in FP32"


def _scaler_is_off_too(code: SourceFile) -> bool:
    """Return whether the scaler is off too (``GradScaler(enabled=False)``): mixed precision was disabled on purpose."""
    made = [call for call in code.nodes(ast.Call) if code.outline.imports.qualified(call.func) in GRAD_SCALERS]
    return any(literal_bool(argument_of(call, "enabled")) is False for call in made)


def _all_disabled(code: SourceFile) -> bool:
    """Return whether the file enters autocast only to disable it."""
    imports = code.outline.imports
    uses = {
        node for node in (*code.nodes(ast.Name), *code.nodes(ast.Attribute)) if imports.qualified(node) in AUTOCASTS
    }
    calls = [node for node in code.nodes(ast.Call) if node.func in uses]
    switched = [word for call in calls for word in call.keywords if word.arg == "enabled"]
    off = [word for word in switched if isinstance(word.value, ast.Constant) and word.value.value is False]
    return bool(uses) and len(off) == len(calls) == len(uses)
