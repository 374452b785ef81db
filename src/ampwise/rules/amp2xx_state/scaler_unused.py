from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING

from ampwise.check.source.names import dotted_text
from ampwise.check.source.scalers import scalers_made
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.project import SourceFile
    from ampwise.watch.run_events import RunEvents

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


def check_source(code: SourceFile) -> Findings:
    # The targets of each expression, assigned directly or as a branch of a conditional expression.
    assigned: dict[ast.expr | None, list[ast.expr]] = {}
    for target, value in code.assignments:
        for held in (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,):
            assigned.setdefault(held, []).append(target)
    for made in scalers_made(code):
        # The only name it is assigned to; elsewhere it may go anywhere.
        targets = assigned.get(made.node, [])
        name = targets[0] if len(targets) == 1 else None
        if isinstance(name, ast.Name | ast.Attribute) and not _may_be_used(name, code):
            yield RULE.at(code.script.place(made.node), f"`{ast.unparse(name)}` is created here but never used")


def _may_be_used(target: ast.Name | ast.Attribute, code: SourceFile) -> bool:
    home = code.function_at(target)
    is_local = isinstance(target, ast.Name) and home.parent is not None and target.id not in home.outside
    # Other files may use what this one creates: those that import it, or any if this one does not train.
    if not is_local and (code.project.importers(code.path) or ".backward(" not in code.script.text):
        return True
    names, reaches_all = _read_in(home.node if is_local else code.script.tree)
    if isinstance(target, ast.Name):
        return target.id in names or reaches_all
    if home.owner is None or dotted_text(target.value) != "self":
        return True
    if any(dotted_text(base) not in PLAIN_BASES for base in home.owner.node.bases):
        return True  # a base class defined elsewhere may use it
    # getattr(self, "scaler") reads it too.
    return f".{target.attr}" in names or any(node.value == target.attr for node in code.nodes(ast.Constant))


@functools.lru_cache(maxsize=8)  # called for every scaler of a scope
def _read_in(scope: ast.AST) -> tuple[set[str], bool]:
    """Return the names and ``.attributes`` that are read for anything but their state, and whether all may be."""
    nodes = list(ast.walk(scope))
    idle = {node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr in IDLE}
    reads = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Load) and node not in idle]
    names = {node.id for node in reads if isinstance(node, ast.Name)}
    attributes = {f".{node.attr}" for node in reads if isinstance(node, ast.Attribute)}
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return names | attributes, not called.isdisjoint(REACHES_ALL)


def check_run(run: RunEvents) -> Findings:
    for made in run.unused_scalers if run.steps else ():
        yield RULE.at(made.site.place, f"this GradScaler was never used, in a run of {run.steps} steps")
