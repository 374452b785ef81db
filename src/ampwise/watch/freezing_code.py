"""Statements of a script that are meant to freeze parameters, and those of them that freeze nothing."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import says
from ampwise.trace.names_in_code import (
    BUILTINS,
    FUNCTIONS,
    bound_names,
    call_name,
    free_names,
    nodes_of,
    root_name,
    tree_of,
)

__all__ = [
    "Idle",
    "attribute_set_at",
    "freezes_at",
    "frozen_unused_copy",
    "gives_freeze",
    "idle_freezes",
    "is_misspelled",
    "module_frozen_at",
    "says_frozen",
]

MISSPELLED = re.compile(r"_?(require[sd]*|requries|reqiures)_?(s_)?(grad|gard|grads|gradient|gradients|gra)_?")
OF_KERAS = "trainable"  # means nothing to torch
COPIES = ("detach", "clone", "cpu", "cuda")  # what freezes only a copy
SETTINGS = ("eval", "train", "to", "cuda", "cpu", "requires_grad_")
SAYS_FROZEN = re.compile(r"freez|froz|fixed|static|constant", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Idle:
    """A statement in a loop over parameters that freezes none of them."""

    site: CallSite
    why: str
    is_for_some: bool = False  # it would freeze those for which a condition holds
    needs_settings: bool = False  # and does so, if the condition ever holds
    settings: frozenset[str] = frozenset()  # names that the condition reads from outside of the loop


def is_misspelled(name: str) -> bool:
    """Whether an attribute is meant to be ``requires_grad``, and is another one."""
    return name != "requires_grad" and (name == OF_KERAS or MISSPELLED.fullmatch(name) is not None)


@lru_cache(maxsize=64)
def attribute_set_at(name: str, files: tuple[str, ...]) -> CallSite | None:
    """Return the first line that sets an attribute of this name to False; None if the script reads it anywhere."""
    found: list[CallSite] = []
    for file in (each for each in files if says(each, name)):
        for node in nodes_of(file):
            if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load):
                return None
            if isinstance(node, ast.Constant) and node.value == name:  # getattr(parameter, name)
                return None
            if isinstance(node, ast.Assign) and _sets(node, name):
                found.append(CallSite(file=file, line=node.lineno))
    return min(found, key=lambda site: (site.file or "", site.line or 0), default=None)


@lru_cache(maxsize=64)
def module_frozen_at(name: str, files: tuple[str, ...]) -> CallSite | None:
    """Return the line that sets ``requires_grad`` of a module to False, given the module's name in its model.

    None if a module may have such a flag of its own.
    """
    found: dict[bool, list[CallSite]] = {True: [], False: []}  # by whether the line has the name
    for file in (each for each in files if says(each, "requires_grad")):
        nodes = list(nodes_of(file))
        over = {id(node): each for each in nodes if isinstance(each, ast.For) for node in ast.walk(each)}
        for node in nodes:
            if isinstance(node, ast.Assign) and _sets(node, "requires_grad"):
                base = next(each.value for each in node.targets if isinstance(each, ast.Attribute))
                loop = over.get(id(node))
                if isinstance(base, ast.Name) and base.id == "self":
                    return None
                is_loops = loop is not None and isinstance(base, ast.Name) and base.id in bound_names(loop.target)
                if not is_loops or not (_calls(loop, "parameters") or _calls(loop, "named_parameters")):  # type: ignore[arg-type]
                    found[call_name(base) == name].append(CallSite(file=file, line=node.lineno))
    every = found[True] or found[False]
    return every[0] if every else None


def _sets(statement: ast.Assign, name: str) -> bool:
    is_false = isinstance(statement.value, ast.Constant) and statement.value.value is False
    return is_false and _assigns(statement, name)


def _assigns(statement: ast.Assign, name: str) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == name for each in statement.targets)


@lru_cache(maxsize=256)
def idle_freezes(file: str, line: int) -> tuple[Idle, ...]:
    """Return the statements that freeze nothing in the loop that begins at a line: ``for p in model.parameters():``."""
    tree = tree_of(file)
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)] if tree is not None else []
    loop = next((node for node in loops if node.lineno <= line <= (node.iter.end_lineno or 0)), None)
    if loop is None or _unfreezes(tree):
        return ()
    names = {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
    return tuple(_idle_in(loop.body, names, file, over_copies=_calls(loop.iter, "state_dict"), tests=[]))


@lru_cache(maxsize=256)
def freezes_at(file: str, line: int) -> CallSite | None:
    """Return the statement that freezes parameters in the loop that begins at a line; None if there is none."""
    tree = tree_of(file)
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)] if tree is not None else []
    for loop in (each for each in loops if each.lineno <= line <= (each.iter.end_lineno or 0)):
        names = {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
        for node in ast.walk(loop):
            if isinstance(node, ast.stmt) and not _why_idle(node, names) and _freezes(node, names):
                return CallSite(file=file, line=node.lineno)
    return None


def _unfreezes(tree: ast.Module | None) -> bool:
    """Whether a file may unfreeze parameters elsewhere."""
    nodes = list(ast.walk(tree)) if tree is not None else []
    calls = [node for node in nodes if isinstance(node, ast.Call) and call_name(node) == "requires_grad_"]
    given = [call.args[0] if call.args else None for call in calls]
    given += [node.value for node in nodes if isinstance(node, ast.Assign) and _assigns(node, "requires_grad")]
    return any(not isinstance(each, ast.Constant) or each.value is not False for each in given)


def _calls(node: ast.AST, name: str) -> bool:
    return any(isinstance(each, ast.Call) and call_name(each) == name for each in ast.walk(node))


def _idle_in(
    body: list[ast.stmt], names: set[str], file: str, *, over_copies: bool, tests: list[ast.expr]
) -> Iterator[Idle]:
    for statement in body:
        site = CallSite(file=file, line=statement.lineno)
        why = _why_idle(statement, names)
        if why:
            yield Idle(site, why, is_for_some=bool(tests))
        elif over_copies and _freezes(statement, names):
            yield Idle(
                site,
                "`state_dict()` gives detached tensors, and not the parameters themselves",
                is_for_some=bool(tests),
            )
        elif (
            tests
            and _freezes(statement, names)
            and all(free_names(each) & names - {_parameter(statement)} for each in tests)
        ):
            settings = frozenset().union(*(free_names(each) for each in tests)) - names - BUILTINS
            yield Idle(site, "its condition holds for none", is_for_some=True, needs_settings=True, settings=settings)
        if isinstance(statement, ast.If) and free_names(statement.test) & names:
            yield from _idle_in(statement.body, names, file, over_copies=over_copies, tests=[*tests, statement.test])


def _freezes(statement: ast.stmt, names: set[str]) -> bool:
    """Whether a statement sets ``requires_grad`` of a loop's variable to False."""
    if isinstance(statement, ast.Assign) and _sets(statement, "requires_grad"):
        return any(root_name(each) in names for each in statement.targets)
    call = statement.value if isinstance(statement, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and call_name(call) == "requires_grad_"
        and root_name(call.func) in names
        and [getattr(each, "value", None) for each in call.args] == [False]
    )


def _parameter(statement: ast.stmt) -> str | None:
    """Return the variable whose ``requires_grad`` a statement sets: a condition on it is not one on names."""
    if isinstance(statement, ast.Assign):
        return root_name(statement.targets[0])
    return root_name(statement.value) if isinstance(statement, ast.Expr) else None


def _why_idle(statement: ast.stmt, names: set[str]) -> str:
    """Return why a statement about a loop's variable freezes nothing; "" if it does, or is about something else."""
    value = getattr(statement, "value", None)
    if not isinstance(statement, ast.Expr | ast.Assign) or value is None:
        return ""
    if isinstance(statement, ast.Expr) and root_name(getattr(value, "left", value)) not in names:
        return ""
    if isinstance(statement, ast.Expr) and isinstance(value, ast.Compare):
        is_about = isinstance(value.left, ast.Attribute) and value.left.attr == "requires_grad"
        return "`==` compares, and sets nothing" if is_about else ""
    if isinstance(statement, ast.Expr) and isinstance(value, ast.Attribute):
        return "`requires_grad_` is not called" if value.attr == "requires_grad_" else ""
    if isinstance(value, ast.Call) and call_name(value) == "detach" and root_name(value.func) in names:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if all(isinstance(each, ast.Name) and each.id in names for each in targets):
            return "`detach()` gives a new tensor, and leaves the parameter as it is"
    if _freezes(statement, names):
        target = value.func if isinstance(value, ast.Call) else statement.targets[0]  # type: ignore[union-attr]
        through = [call_name(each) for each in ast.walk(target) if isinstance(each, ast.Call)]
        through += [each.attr for each in ast.walk(target) if isinstance(each, ast.Attribute) and each.attr == "data"]
        if through := [each for each in through if each in (*COPIES, "data")]:
            what = f"`{through[0]}`" if through[0] == "data" else f"`{through[0]}()`"
            return f"it is set on what {what} gives, and not on the parameter"
    return ""


@lru_cache(maxsize=256)
def frozen_unused_copy(file: str, line: int) -> CallSite | None:
    """Return the statement at a line that freezes a copy of a module, if the script uses that for nothing else."""
    tree = tree_of(file)
    if tree is None:
        return None
    scopes = [node for node in ast.walk(tree) if isinstance(node, (*FUNCTIONS, ast.Module))]
    around = [each for each in scopes if isinstance(each, ast.Module) or each.lineno <= line <= (each.end_lineno or 0)]
    scope = max(around, key=lambda each: getattr(each, "lineno", 0), default=None)
    statements = [node for node in ast.walk(scope) if isinstance(node, ast.stmt)] if scope is not None else []
    here = next((node for node in statements if node.lineno == line and isinstance(node, ast.For | ast.Expr)), None)
    name = None if here is None else root_name(here.iter if isinstance(here, ast.For) else here.value)
    made = [
        each for each in statements if isinstance(each, ast.Assign) and name in {root_name(one) for one in each.targets}
    ]
    if len(made) != 1 or not isinstance(made[0].value, ast.Call) or call_name(made[0].value) != "deepcopy":
        return None
    setting = [each for each in statements if isinstance(each, ast.For | ast.Expr) and _only_sets(each, name)]
    inside = {id(node) for each in setting for node in ast.walk(each)}
    used = [
        node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name and id(node) not in inside
    ]
    if len(used) > 1:  # where it is made
        return None
    return freezes_at(file, line) if isinstance(here, ast.For) else CallSite(file=file, line=line)


def _only_sets(statement: ast.For | ast.Expr, name: str | None) -> bool:
    """Whether a statement only changes settings of a module: ``name.eval()``, or a loop that freezes its parameters."""
    if isinstance(statement, ast.For):
        names = {each.id for each in ast.walk(statement.target) if isinstance(each, ast.Name)}
        return root_name(statement.iter) == name and all(_freezes(each, names) for each in statement.body)
    call = statement.value
    return isinstance(call, ast.Call) and call_name(call) in SETTINGS and root_name(call.func) == name


def gives_freeze(site: CallSite) -> bool:
    """Whether the ``from_pretrained`` in a line says whether to freeze, or this is unclear."""
    calls = [
        node
        for node in nodes_of(site.file or "")
        if isinstance(node, ast.Call)
        and call_name(node) == "from_pretrained"
        and node.lineno <= (site.line or 0) <= (node.end_lineno or 0)
    ]
    given = {word.arg for call in calls for word in call.keywords}
    return len(calls) != 1 or len(calls[0].args) > 1 or bool(given & {"freeze", None})


def says_frozen(site: CallSite) -> bool:
    """Whether the text of a line, or of the one before, says that something is frozen on purpose."""
    line = site.line or 1
    return any(SAYS_FROZEN.search(linecache.getline(site.file or "", each)) for each in (line - 1, line))
