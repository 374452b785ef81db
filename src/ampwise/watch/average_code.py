"""Averages of weights in the code of a script: where they are made and updated, and whether that has an effect."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import says
from ampwise.trace.names_in_code import FUNCTIONS, bound_names, call_name, nodes_of, root_name, tree_of

__all__ = ["average_made_at", "dropped_updates", "is_only_updated", "made_by_class_at", "never_updated"]

AVERAGE = re.compile(
    r"(?:^|_)(?:ema|swa|avg|averaged?|polyak|shadow)(?:_|\d|$)|EMA|Ema(?![a-z])|Average|Averaging|Polyak|SWA"
)
SAYS_AVERAGE = re.compile(r"(?<![a-zA-Z])(?:ema|swa|avg|average|polyak|shadow)|EMA|Ema|Averag|Polyak|SWA")
UPDATES = re.compile(r"(?:^|_)(?:update|accumulate|step)(?:_|$)|^__call__$")  # functions that update, and nothing else
MODES = ("eval", "train", "to", "cuda", "cpu", "requires_grad_")
NEW = ("mul", "lerp", "clone")  # methods that make a new tensor, and are in the update of an average
IN_PLACE = ("mul_", "add_", "lerp_", "copy_", "sub_", "addcmul_")


@lru_cache(maxsize=256)
def average_made_at(site: CallSite) -> str | None:
    """Return the name of the average that a line makes, by the words in it; None if it makes none."""
    statement = _statement_at(site)
    names = [_last(each) for each in getattr(statement, "targets", ())]
    around = [node.name for node in _around(site) if isinstance(node, ast.ClassDef)]
    found = [each for each in (*names, *around) if each and AVERAGE.search(each)]
    return found[0] if found else None


def made_by_class_at(init: CallSite) -> CallSite | None:
    """Return the only line that makes an object of the class around a line, if that is one of averages by its name."""
    classes = [node.name for node in _around(init) if isinstance(node, ast.ClassDef)]
    if not classes or not AVERAGE.search(classes[-1]):
        return None
    made = [
        node.lineno
        for node in nodes_of(init.file or "")
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and call_name(node.value) == classes[-1]
    ]
    return CallSite(file=init.file, line=made[0]) if len(made) == 1 else None


def _statement_at(site: CallSite) -> ast.stmt | None:
    nodes = nodes_of(site.file or "")
    found = [node for node in nodes if isinstance(node, ast.Assign) and _covers(node, site.line or 0)]
    return found[-1] if found else None


def _around(site: CallSite) -> list[ast.AST]:
    nodes = nodes_of(site.file or "")
    return [node for node in nodes if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and _covers(node, site.line or 0)]


def _covers(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", None) or 0
    return bool(first <= line <= last)


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


# Updates whose result is dropped


@lru_cache(maxsize=4096)  # all files of a script's own code are asked about
def dropped_updates(file: str) -> tuple[CallSite, ...]:
    """Return the statements of a file that are to update an average, and only make new values that nothing uses."""
    if not any(map(SAYS_AVERAGE.search, linecache.getlines(file))):
        return ()
    tree = tree_of(file)
    found: dict[int, None] = {}
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)] if tree is not None else []
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)] if tree is not None else []
    for function in functions:
        names = [each.name for each in classes if function in each.body] + [function.name]
        if any(map(AVERAGE.search, names)):
            found |= dict.fromkeys(_dropped_in(function))
    for loop in ast.walk(tree) if tree is not None else ():
        if isinstance(loop, ast.For) and any(AVERAGE.search(_last(each)) for each in ast.walk(loop)):
            found |= dict.fromkeys(_dropped_by(loop.body, loop))
    return tuple(CallSite(file=file, line=line) for line in sorted(found))


def _dropped_in(function: ast.AST) -> Iterator[int]:
    for loop in ast.walk(function):
        if isinstance(loop, ast.For):
            yield from _dropped_by(loop.body, loop)
    copies = {
        target.id: statement
        for statement in ast.walk(function)
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and _makes_copies(statement.value)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    for name in copies:
        yield from _only_changed(function, name)


def _dropped_by(body: Sequence[ast.stmt], loop: ast.For) -> Iterator[int]:
    """Yield the lines in a loop over weights that make new values and drop them."""
    targets = {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
    for statement in (each for part in body for each in ast.walk(part) if isinstance(each, ast.stmt)):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            chain = list(_chain(statement.value))
            is_new = any(each in NEW for each in chain) and chain[0] in (*NEW, *IN_PLACE, "add")
            if is_new and root_name(statement.value) is not None:
                yield statement.lineno
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            name = target.id if isinstance(target, ast.Name) and isinstance(statement.value, ast.BinOp) else ""
            if name in targets and not _is_read_after(loop, statement, name):
                yield statement.lineno


def _chain(call: ast.expr) -> Iterator[str]:
    """Yield the methods of a chain of calls, the last first: add_ and mul_ of ``a.mul_(d).add_(b)``."""
    node: ast.expr = call
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield node.func.attr
        node = node.func.value


def _is_read_after(loop: ast.For, statement: ast.Assign, name: str) -> bool:
    own = {id(node) for node in ast.walk(statement)}
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) and id(node) not in own
        for part in loop.body
        for node in ast.walk(part)
        if getattr(node, "lineno", 0) >= statement.lineno
    )


def _makes_copies(value: ast.expr) -> bool:
    """Whether an expression gives copies: ``e.clone()``, ``[e.clone() for e in ...]``, ``m.state_dict()``."""
    if isinstance(value, ast.ListComp | ast.SetComp):
        value = value.elt
    elif isinstance(value, ast.DictComp):
        value = value.value
    return isinstance(value, ast.Call) and call_name(value) in ("clone", "state_dict", "deepcopy")


def _only_changed(function: ast.AST, name: str) -> Iterator[int]:
    """Yield the lines that change copies of this name, if nothing else is done with them."""
    made = [node for node in ast.walk(function) if isinstance(node, ast.Assign) and name in bound_names(node)]
    is_dict = any(isinstance(each.value, ast.Call) and call_name(each.value) == "state_dict" for each in made)
    changed: list[int] = []
    harmless: set[int] = set()
    for node in ast.walk(function):
        inner: ast.AST = node
        if isinstance(node, ast.For):
            items = {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
            own = [each for part in node.body for each in ast.walk(part) if _changes_in_place(each, items)]
            if own and (is_dict or not all(_is_simple(each) for each in node.body)):
                continue
            inner = node.iter
            lines = [each.lineno for each in own]  # type: ignore[attr-defined]
        elif (_changes_in_place(node, {name}) and not is_dict) or _sets_item(node, name):
            lines = [node.lineno]  # type: ignore[attr-defined]
        else:
            continue
        used = {id(each) for each in ast.walk(inner) if isinstance(each, ast.Name) and each.id == name}
        harmless |= used
        changed += lines if used else []
    read = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
    others = [node for node in read if isinstance(node.ctx, ast.Load) and id(node) not in harmless]
    if len(made) == 1 and not others:
        yield from changed


def _sets_item(node: ast.AST, name: str) -> bool:
    """Whether a node is a statement such as ``name[key] = value``."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(each, ast.Subscript) and _last(each.value) == name for each in targets)


def _is_simple(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr | ast.If)


def _changes_in_place(node: ast.AST, names: set[str]) -> bool:
    """Whether a node is a statement such as ``name.mul_(d).add_(w)``."""
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and next(_chain(call), "") in IN_PLACE and root_name(call) in names


# Uses of an average


def _name_made_at(site: CallSite) -> str | None:
    statement = _statement_at(site)
    targets: list[ast.expr] = getattr(statement, "targets", [])
    return _last(targets[0]) or None if len(targets) == 1 else None


def _loads(tree: ast.AST, name: str) -> list[ast.AST]:
    """Return where a name, or an attribute of this name, is read."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute) and _last(node) == name and isinstance(node.ctx, ast.Load)
    ]


def is_only_updated(site: CallSite) -> bool:
    """Whether the script updates the average that a line makes, and does nothing else with it."""
    tree, name = tree_of(site.file or ""), _name_made_at(site)
    if tree is None or name is None or any(isinstance(each, ast.ClassDef) for each in _around(site)):
        return False
    updating = {id(node) for part in ast.walk(tree) for node in _updating(part, name)}
    loads = _loads(tree, name)
    return bool(loads) and all(id(each) in updating for each in loads)


def _updating(part: ast.AST, name: str) -> Iterator[ast.AST]:
    """Yield the nodes of a statement that updates an average of this name, or only sets its mode."""
    call = part.value if isinstance(part, ast.Expr) else None
    if isinstance(call, ast.Call):
        on_it = isinstance(call.func, ast.Attribute) and _last(call.func.value) == name
        if UPDATES.search(call_name(call)) or (on_it and call_name(call) in MODES):
            yield from ast.walk(call)
    elif isinstance(part, ast.For) and not part.orelse:
        items = {each.id for each in ast.walk(part.target) if isinstance(each, ast.Name)}
        sets = [
            _changes_in_place(each, items)
            or (isinstance(each, ast.Assign) and {root_name(one) for one in each.targets} <= items)
            or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Call) and call_name(each.value) in MODES)
            for each in part.body
        ]
        if all(sets):
            yield from ast.walk(part.iter)


def never_updated(site: CallSite, files: Sequence[str]) -> bool:
    """Whether no line may update the average that a line makes: an object of a class of the script's own."""
    name = _name_made_at(site)
    if name is None or any(isinstance(each, ast.ClassDef) for each in _around(site)):
        return False
    for tree in filter(None, (tree_of(file) for file in files if says(file, name))):
        receivers = {id(node.value): node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for load in _loads(tree, name):
            if id(load) not in receivers or UPDATES.search(receivers[id(load)]):
                return False
    return True
