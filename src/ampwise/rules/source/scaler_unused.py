"""A GradScaler that nobody uses."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.names import dotted_text
from ampwise.source.project import Code
from ampwise.source.scalers import MadeScaler, scalers_made

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
NEEDS = (("GradScaler",),)

# Saving and loading an idle scaler's state does not make it work.
IDLE = frozenset(("state_dict", "load_state_dict"))
# Who calls these may reach every name there is.
REACHES_ALL = frozenset(("locals", "globals", "vars", "exec", "eval"))
PLAIN_BASES = frozenset(("object", "nn.Module", "torch.nn.Module", "ABC", "abc.ABC"))


def check(code: Code) -> Iterator[Finding]:
    for made in scalers_made(code):
        target = _target(made, code)
        if target is not None and not _may_be_used(target, code):
            yield RULE.at(code.script.place(made.node), f"`{ast.unparse(target)}` is made here and never used")


def _target(made: MadeScaler, code: Code) -> ast.Name | ast.Attribute | None:
    """The one name the scaler is assigned to; None when it goes anywhere else."""
    bound = [(node.value, node.targets) for node in code.nodes(ast.Assign)]
    bound += [(node.value, [node.target]) for node in code.nodes(ast.AnnAssign) if node.value is not None]
    for value, targets in bound:
        if value is made.node or (isinstance(value, ast.IfExp) and made.node in (value.body, value.orelse)):
            target = targets[0]
            return target if len(targets) == 1 and isinstance(target, ast.Name | ast.Attribute) else None
    return None


def _may_be_used(target: ast.Name | ast.Attribute, code: Code) -> bool:
    if isinstance(target, ast.Attribute):
        return _attribute_may_be_used(target, code)
    home = code.function_at(target)
    if home.parent is None or target.id in home.outside:
        scope: ast.AST = code.script.tree
        if _is_for_others(code):
            return True
    else:
        scope = home.node
    return _is_read(scope, lambda node: isinstance(node, ast.Name) and node.id == target.id) or _reaches_all(scope)


def _attribute_may_be_used(target: ast.Attribute, code: Code) -> bool:
    owner = code.function_at(target).owner
    if owner is None or dotted_text(target.value) != "self" or _is_for_others(code):
        return True
    if any(dotted_text(base) not in PLAIN_BASES for base in owner.node.bases):
        return True  # a base class out of sight may use it
    by_name = any(node.value == target.attr for node in code.nodes(ast.Constant))  # getattr(self, "scaler")
    tree = code.script.tree
    return by_name or _is_read(tree, lambda node: isinstance(node, ast.Attribute) and node.attr == target.attr)


def _is_for_others(code: Code) -> bool:
    """Whether other files may use what this one makes: those that import it, or, where nothing is trained, any."""
    return bool(code.project.importers(code.path)) or ".backward(" not in code.script.text


def _is_read(scope: ast.AST, is_it: Callable[[ast.AST], bool]) -> bool:
    """Whether something is read for anything but its state."""
    idle = {node.value for node in ast.walk(scope) if isinstance(node, ast.Attribute) and node.attr in IDLE}
    reads = (node for node in ast.walk(scope) if isinstance(getattr(node, "ctx", None), ast.Load) and is_it(node))
    return any(node not in idle for node in reads)


def _reaches_all(scope: ast.AST) -> bool:
    calls = (node for node in ast.walk(scope) if isinstance(node, ast.Call))
    return any(isinstance(call.func, ast.Name) and call.func.id in REACHES_ALL for call in calls)
