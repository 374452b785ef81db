"""A GradScaler that is never used."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from ampwise.check.source.names import dotted_text
from ampwise.check.source.project import SourceFile
from ampwise.check.source.scalers import ScalerCall, scalers_made
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP202",
    name="scaler-unused",
    severity=Severity.WARNING,
    summary="A GradScaler is created but never used.",
    why=(
        "Creating a scaler changes nothing: the loss must go through `scaler.scale`, the step through `scaler.step`. "
        "A script with an unused scaler trains in FP16 without loss scaling, or unknowingly in FP32."
    ),
    fix="Use it (`scaler.scale(loss).backward()`, `scaler.step(optimizer)`, `scaler.update()`) or remove it.",
    bad='scaler = torch.amp.GradScaler("cuda")\nloss.backward()\noptimizer.step()',
    good=(
        'scaler = torch.amp.GradScaler("cuda")\nscaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()'
    ),
)
NEEDS = (("GradScaler",),)

# Saving and loading its state does not count as use.
IDLE = frozenset(("state_dict", "load_state_dict"))
# A call of one of these may read any name.
REACHES_ALL = frozenset(("locals", "globals", "vars", "exec", "eval"))
PLAIN_BASES = frozenset(("object", "nn.Module", "torch.nn.Module", "ABC", "abc.ABC"))


def check(code: SourceFile) -> Iterator[Finding]:
    for made in scalers_made(code):
        target = _target(made, code)
        if target is not None and not _may_be_used(target, code):
            yield RULE.at(code.script.place(made.node), f"`{ast.unparse(target)}` is created here but never used")


def _target(made: ScalerCall, code: SourceFile) -> ast.Name | ast.Attribute | None:
    """Return the only name the scaler is assigned to; None if it goes anywhere else."""
    targets = _targets_of_calls(code).get(made.node, [])
    target = targets[0] if len(targets) == 1 else None
    return target if isinstance(target, ast.Name | ast.Attribute) else None


@functools.lru_cache(maxsize=1)
def _targets_of_calls(code: SourceFile) -> dict[ast.expr, list[ast.expr]]:
    """Map each expression to its assignment targets, directly or as a branch of a conditional expression."""
    found: dict[ast.expr, list[ast.expr]] = {}
    bound = [(node.value, node.targets) for node in code.nodes(ast.Assign)]
    bound += [(node.value, [node.target]) for node in code.nodes(ast.AnnAssign) if node.value is not None]
    for value, targets in bound:
        for held in (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,):
            found.setdefault(held, targets)
    return found


def _may_be_used(target: ast.Name | ast.Attribute, code: SourceFile) -> bool:
    if isinstance(target, ast.Attribute):
        return _attribute_may_be_used(target, code)
    home = code.function_at(target)
    if home.parent is None or target.id in home.outside:
        scope: ast.AST = code.script.tree
        if _is_for_others(code):
            return True
    else:
        scope = home.node
    return target.id in _read_in(scope) or _reaches_all(scope)


def _attribute_may_be_used(target: ast.Attribute, code: SourceFile) -> bool:
    owner = code.function_at(target).owner
    if owner is None or dotted_text(target.value) != "self" or _is_for_others(code):
        return True
    if any(dotted_text(base) not in PLAIN_BASES for base in owner.node.bases):
        return True  # a base class defined elsewhere may use it
    # getattr(self, "scaler") reads it too.
    return target.attr in _strings(code) or f".{target.attr}" in _read_in(code.script.tree)


@functools.lru_cache(maxsize=1)
def _strings(code: SourceFile) -> set[object]:
    return {node.value for node in code.nodes(ast.Constant) if isinstance(node.value, str)}


def _is_for_others(code: SourceFile) -> bool:
    """Return whether other files may use what this one creates: importers, or any file if this one does not train."""
    return bool(code.project.importers(code.path)) or ".backward(" not in code.script.text


@functools.lru_cache(maxsize=8)  # called for every scaler of a scope
def _read_in(scope: ast.AST) -> set[str]:
    """Return the names and, with a leading dot, the attributes that are read for anything but their state."""
    idle = {node.value for node in ast.walk(scope) if isinstance(node, ast.Attribute) and node.attr in IDLE}
    reads = (node for node in ast.walk(scope) if isinstance(getattr(node, "ctx", None), ast.Load) and node not in idle)
    named = (node for node in reads if isinstance(node, ast.Name | ast.Attribute))
    return {node.id if isinstance(node, ast.Name) else f".{node.attr}" for node in named}


@functools.lru_cache(maxsize=8)
def _reaches_all(scope: ast.AST) -> bool:
    calls = (node for node in ast.walk(scope) if isinstance(node, ast.Call))
    return any(isinstance(call.func, ast.Name) and call.func.id in REACHES_ALL for call in calls)
