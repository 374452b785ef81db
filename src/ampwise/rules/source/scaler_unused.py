"""A GradScaler that nobody uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.scalers import MadeScaler, scalers_made

if TYPE_CHECKING:
    from ampwise.source.outline import Binding, Function
    from ampwise.source.project import Code

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP202",
    name="scaler-unused",
    severity=Severity.WARNING,
    summary="A GradScaler is made and never used.",
    why=(
        "Making a scaler changes nothing: the loss must go through `scaler.scale`, the step through `scaler.step`. "
        "A script with an idle scaler trains FP16 without loss scaling, or in FP32 without anyone noticing."
    ),
    fix="Use it (`scaler.scale(loss).backward()`, `scaler.step(optimizer)`, `scaler.update()`) or remove it.",
    bad='scaler = torch.amp.GradScaler("cuda")\nloss.backward()\noptimizer.step()',
    good=(
        'scaler = torch.amp.GradScaler("cuda")\nscaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()'
    ),
)

# Saving and loading an idle scaler's state does not make it work.
IDLE = frozenset(("state_dict", "load_state_dict"))


def check(code: Code) -> Iterator[Finding]:
    for made in scalers_made(code):
        target = _target(made, code)
        if target is not None and not _is_used(target, code):
            yield RULE.at(code.script.place(made.node), f"`{ast.unparse(target)}` is made here and never used")


def _target(made: MadeScaler, code: Code) -> ast.expr | None:
    """The one name the scaler is assigned to; None when it goes anywhere else."""
    for node in code.tree_nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and _is_value(made.node, node.value):
            target = node.targets[0]
            return target if isinstance(target, ast.Name | ast.Attribute) else None
    return None


def _is_value(made: ast.Call, value: ast.expr) -> bool:
    return value is made or (isinstance(value, ast.IfExp) and made in (value.body, value.orelse))


def _is_used(target: ast.expr, code: Code) -> bool:
    if isinstance(target, ast.Attribute):
        return _attribute_is_used(target, code)
    assert isinstance(target, ast.Name)
    home = _home(target, code)
    if home is code.outline.module and code.project.importers(code.path):
        return True  # another file may import it
    scope = code.script.tree if home is None or home.parent is None or target.id in home.outside else home.node
    return any(_uses(node, target.id, parents) for node, parents in _loads(scope, target.id))


def _attribute_is_used(target: ast.Attribute, code: Code) -> bool:
    if not (isinstance(target.value, ast.Name) and target.value.id == "self"):
        return True
    owner = next((f.owner for f in code.outline.functions if f.owner and _holds(f, target)), None)
    if owner is None or any(ast.unparse(base) not in ("object", "nn.Module", "ABC") for base in owner.node.bases):
        return True  # a base class out of sight may use it
    if code.project.importers(code.path):
        return True
    loads = [
        node
        for node in code.tree_nodes
        if isinstance(node, ast.Attribute) and node.attr == target.attr and isinstance(node.ctx, ast.Load)
    ]
    return any(not _only_idle(node, code) for node in loads) or f'"{target.attr}"' in code.script.text


def _only_idle(node: ast.Attribute, code: Code) -> bool:
    return any(
        isinstance(parent, ast.Attribute) and parent.value is node and parent.attr in IDLE
        for parent in code.tree_nodes
    )


def _holds(function: Function, target: ast.Attribute) -> bool:
    return any(node is target for node in ast.walk(function.node))


def _home(target: ast.Name, code: Code) -> Function | None:
    def binds(binding: Binding) -> bool:
        return isinstance(binding.node, ast.Assign) and target in binding.node.targets

    for function in code.outline.functions:
        if any(binds(binding) for binding in function.bindings.get(target.id, ())):
            return next(b.function for b in function.bindings[target.id] if binds(b))
    return None


def _loads(scope: ast.AST, name: str) -> Iterator[tuple[ast.Name, ast.AST | None]]:
    """Every read of a name, with the node it is read for."""
    pending: list[tuple[ast.AST, ast.AST | None]] = [(scope, None)]
    while pending:
        node, parent = pending.pop()
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            yield node, parent
        pending += [(child, node) for child in ast.iter_child_nodes(node)]


def _uses(node: ast.Name, name: str, parent: ast.AST | None) -> bool:
    return not (isinstance(parent, ast.Attribute) and parent.attr in IDLE)
