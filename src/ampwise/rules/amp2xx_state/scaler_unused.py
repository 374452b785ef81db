from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING

from ampwise.check.source.names import dotted_text
from ampwise.check.source.scalers import scalers_made
from ampwise.check.source.tree_walk import walk
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
IDLE = frozenset(("state_dict", "load_state_dict", "is_enabled"))
# A call of one of these may read any name.
READS_ALL = frozenset(("locals", "globals", "vars", "exec", "eval"))
REACHES_ALL = "*"
DEEPEST = 4  # functions that pass it on
PLAIN_BASES = frozenset(("object", "nn.Module", "torch.nn.Module", "ABC", "abc.ABC"))


def check_source(code: SourceFile) -> Findings:
    # The targets of each expression, assigned directly or as a branch of a conditional expression.
    assigned: dict[ast.expr | None, list[ast.expr]] = {}
    pairs = list(code.assignments)
    for target, value in code.assignments:  # one, other = GradScaler(), GradScaler()
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs += zip(target.elts, value.elts, strict=True)
    for target, value in pairs:
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
    reads = _read_in(home.node if is_local else code.script.tree)
    if isinstance(target, ast.Name):
        return REACHES_ALL in reads or any(_uses(node, code) for node in reads.get(target.id, ()))
    if home.owner is None or dotted_text(target.value) != "self":
        return True
    fetched = reads.get(f".{target.attr}", ())
    is_derived = any(dotted_text(base) not in PLAIN_BASES for base in home.owner.node.bases)
    if is_derived and not any(_is_left_out(node, code) for node in fetched):
        return True  # a base class defined elsewhere may use it, if the class has no step of its own without it
    # getattr(self, "scaler") reads it too.
    named = any(node.value == target.attr for node in code.nodes(ast.Constant))
    return named or any(_uses(node, code) for node in fetched)


def _is_left_out(node: ast.expr, code: SourceFile) -> bool:
    """Whether ``scaler = self.scaler`` stands in a function that has a backward of its own."""
    return _renamed(node, code) is not None and ".backward(" in code.function_at(node).text


def _renamed(node: ast.expr, code: SourceFile) -> str | None:
    """Return the local name that is all a read of the scaler goes to."""
    above = code.script.parents[node]
    targets = above.targets if isinstance(above, ast.Assign) and above.value is node else []
    target, function = (targets[0] if len(targets) == 1 else None), code.function_at(node)
    is_local = isinstance(target, ast.Name) and function.parent is not None and target.id not in function.outside
    return target.id if isinstance(target, ast.Name) and is_local else None


def _uses(node: ast.expr, code: SourceFile, depth: int = 0) -> bool:
    """Return whether a read of the scaler uses it: one that passes it to a function which ignores it does not."""
    parents = code.script.parents
    above = parents[node]
    if isinstance(above, ast.Attribute) and above.attr in IDLE:
        return False
    renamed = _renamed(node, code) if depth < DEEPEST else None
    if renamed is not None:  # scaler = self.scaler
        inside = _read_in(code.function_at(node).node)
        return REACHES_ALL in inside or any(_uses(read, code, depth + 1) for read in inside.get(renamed, ()))
    word = above.arg if isinstance(above, ast.keyword) else None
    call = parents[above] if isinstance(above, ast.keyword) else above
    if not isinstance(call, ast.Call) or call.func is node or depth >= DEEPEST:
        return True
    frame = code.frame(code.function_at(call))
    target = frame.callee(call)
    if target is None or target[0].outline is not code.outline or target[0].is_abstract or target[0].decorators:
        return True
    given = frame.enter(target[0], call, target[1]).arguments
    names = [name for name, value in given.items() if value is node and word in (None, name)]
    reads = _read_in(target[0].node)
    if len(names) != 1 or REACHES_ALL in reads:
        return True
    return any(_uses(read, code, depth + 1) for read in reads.get(names[0], ()))


@functools.lru_cache(maxsize=8)  # called for every scaler of a scope
def _read_in(scope: ast.AST) -> dict[str, list[ast.expr]]:
    """Return where each name and ``.attribute`` is read; REACHES_ALL is a key if a call may read any name."""
    found: dict[str, list[ast.expr]] = {}
    for node in walk(scope):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.setdefault(node.id, []).append(node)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.setdefault(f".{node.attr}", []).append(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in READS_ALL:
            found.setdefault(REACHES_ALL, []).append(node)
    return found


def check_run(run: RunEvents) -> Findings:
    for made in run.unused_scalers if run.steps else ():
        yield RULE.at(made.site.place, f"this GradScaler was never used, in a run of {run.steps} steps")
