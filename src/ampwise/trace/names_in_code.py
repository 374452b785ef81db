"""Names in the code of a script: its scopes, and what a piece of code reads, assigns and changes."""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import code_owner

__all__ = [
    "BUILTINS",
    "COMPREHENSIONS",
    "DEFINITIONS",
    "FUNCTIONS",
    "Scope",
    "assigned_at",
    "bound_names",
    "call_name",
    "calls_in",
    "changed_names",
    "free_names",
    "functions_of",
    "nodes_of",
    "root_name",
    "scopes_of",
    "tree_of",
    "uninitialised_at",
]

BUILTINS = frozenset(dir(builtins)) | {"__file__", "__name__"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
UNINITIALISED = ("empty", "empty_like", "new_empty", "Tensor", "FloatTensor")
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
# Methods and attributes that do not change how a model or loss is built: modes, devices, weights, precision, logs.
HARMLESS = {
    *("train", "eval", "cuda", "cpu", "to", "load_state_dict", "half", "bfloat16", "float", "double", "share_memory"),
    *("compile", "zero_grad", "step", "backward", "watch", "info", "print", "log", "debug", "warning", "summary"),
    *("set_description", "set_postfix", "write", "close", "wait_for_everyone", "save", "remove", "set_epoch", "main"),
    *("add_scalar", "fit", "no_sync", "print_help", "synchronize", "require_backward_grad_sync"),
}
# Objects with the options of a script, which functions complete: ``init_distributed(args)`` sets ``args.rank``.
OPTIONS = {"args", "cfg", "config", "opt", "hparams", "opts"}
NOT_SETUP = ("train", "valid", "test", "eval", "log", "print", "save", "dump", "watch", "wandb", "fit", "run", "main")


@dataclass(eq=False, slots=True)
class Scope:
    """A module, its ``if __name__ == "__main__"`` block, or a function."""

    name: str
    body: list[ast.stmt]
    node: ast.AST
    parent: Scope | None = None
    cls: ast.ClassDef | None = None

    @property
    def parameters(self) -> dict[str, ast.expr | None]:
        """Parameters of the function with their defaults."""
        if not isinstance(self.node, FUNCTIONS):
            return {}
        given = self.node.args
        plain = [*given.posonlyargs, *given.args]
        defaults: list[ast.expr | None] = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
        pairs = [*zip(plain, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
        return {argument.arg: default for argument, default in pairs}

    @property
    def own(self) -> str | None:
        """Name of ``self`` in a method."""
        return next(iter(self.parameters), None) if self.cls is not None else None

    @property
    def is_module(self) -> bool:
        """Whether it is the whole file."""
        return isinstance(self.node, ast.Module)


@lru_cache(maxsize=32)
def tree_of(file: str) -> ast.Module | None:
    """Return the parsed source of a file; None if it has none, or it is not Python."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return None


def nodes_of(file: str) -> Iterator[ast.AST]:
    """Yield the nodes of a file's source; none if it has none, or it is not Python."""
    tree = tree_of(file)
    return iter(()) if tree is None else ast.walk(tree)


def functions_of(file: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions and methods of a file, and then the code outside of them as one, ``<module>``."""
    tree = tree_of(file)
    if tree is not None:
        yield from (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS))
        body = [each for each in tree.body if not isinstance(each, DEFINITIONS)]
        yield ast.FunctionDef(name="<module>", args=None, body=body, decorator_list=[])  # type: ignore[arg-type]


def uninitialised_at(kind: type, attribute: str) -> CallSite:
    """Return the line of a class that makes an attribute of uninitialised memory which no call fills; else nowhere."""
    for cls in kind.__mro__:
        try:
            file = inspect.getsourcefile(cls)
        except TypeError:
            continue
        tree = None if file is None else tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            if not isinstance(node, ast.ClassDef) or node.name != cls.__name__:
                continue
            mentions = f".{attribute}"
            calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
            if any(call_name(each).endswith("_") and mentions in ast.unparse(each) for each in calls):
                return CallSite()
            for each in ast.walk(node):
                made = isinstance(each, ast.Assign) and ast.unparse(each.targets[0]).endswith(mentions)
                if made and any(call_name(part) in UNINITIALISED for part in ast.walk(each)):
                    return CallSite(file=file, line=each.lineno)  # type: ignore[attr-defined]
    return CallSite()


def assigned_at(kind: type, attribute: str) -> CallSite:
    """Return the only line of a class that sets an attribute, which no call changes in place; else nowhere."""
    found: list[CallSite] = []
    for cls in kind.__mro__:
        try:
            file = inspect.getsourcefile(cls)
        except (TypeError, OSError):
            continue
        tree = tree_of(file) if file is not None and code_owner(file) == "own" else None
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)] if tree is not None else []
        for node in [part for each in classes if each.name == cls.__name__ for part in ast.walk(each)]:
            name = f".{attribute}"
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                sets = any(f"{ast.unparse(each)}[".partition("[")[0].endswith(name) for each in targets)
                in_place = isinstance(node, ast.AugAssign) or any(isinstance(each, ast.Subscript) for each in targets)
            elif isinstance(node, ast.Call) and call_name(node) in ("register_buffer", "register_parameter"):
                sets = bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value == attribute
                in_place = False
            else:
                in_place = sets = (
                    isinstance(node, ast.Call) and call_name(node).endswith("_") and name in ast.unparse(node)
                )
            if sets and in_place:
                return CallSite()
            if sets:
                found.append(CallSite(file=file or "", line=node.lineno))  # type: ignore[attr-defined]
    return found[0] if len(found) == 1 else CallSite()


def scopes_of(tree: ast.Module) -> list[Scope]:
    """All scopes of a file, the module first."""
    guards = [stmt for stmt in tree.body if isinstance(stmt, ast.If) and _is_guard(stmt.test)]
    module = Scope("the module", [stmt for stmt in tree.body if stmt not in guards], tree)
    found = [module]

    def visit(body: Iterable[ast.AST], parent: Scope, cls: ast.ClassDef | None) -> None:
        for stmt in body:
            if isinstance(stmt, FUNCTIONS):
                found.append(Scope(stmt.name, stmt.body, stmt, parent, cls))
                visit(stmt.body, found[-1], None)
            elif isinstance(stmt, ast.ClassDef):
                visit(stmt.body, parent, stmt)
            elif isinstance(stmt, ast.stmt | ast.excepthandler | ast.match_case):
                visit(ast.iter_child_nodes(stmt), parent, cls)

    visit(module.body, module, None)
    for guard in guards:
        found.append(Scope('if __name__ == "__main__"', guard.body, guard, module))
        visit(guard.body, found[-1], None)
    return found


def _is_guard(test: ast.expr) -> bool:
    sides = [test.left, *test.comparators] if isinstance(test, ast.Compare) else []
    return {"__name__", "__main__"} <= {getattr(side, "id", getattr(side, "value", "")) for side in sides}


def root_name(node: ast.AST) -> str | None:
    """The name that an expression such as ``a.b[0].c()`` begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call | ast.Starred):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def call_name(node: ast.AST) -> str:
    """The last part of the name that is called: "DataLoader" for ``torch.utils.data.DataLoader(...)``."""
    func = node.func if isinstance(node, ast.Call) else node
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """Calls in a statement, inner ones first, without those in functions and classes defined in it."""
    if isinstance(node, DEFINITIONS):
        return
    for child in ast.iter_child_nodes(node):
        yield from calls_in(child)
    if isinstance(node, ast.Call):
        yield node


def _key(node: ast.AST, own: str | None) -> str | None:
    """``x`` for a name, ``self.x`` for an attribute of self."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and own and isinstance(node.value, ast.Name) and node.value.id == own:
        return f"self.{node.attr}"
    return None


def free_names(node: ast.AST, own: str | None = None) -> set[str]:
    """Names that a statement or expression reads from outside of itself; ``own`` is the name of self there."""
    key = _key(node, own)
    if key is not None:
        return {key} if isinstance(node.ctx, ast.Load) else set()  # type: ignore[attr-defined]
    inside: set[str] = set()
    if isinstance(node, (*FUNCTIONS, ast.Lambda)):
        body = node.body if isinstance(node.body, list) else [node.body]
        around = [child for child in ast.iter_child_nodes(node) if child not in body]  # defaults, decorators, types
        inside = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}.union(
            *(bound_names(stmt, own) for stmt in body)
        )
        read = set().union(*(free_names(stmt, own) for stmt in body)) - inside
        return read.union(*(free_names(each, own) for each in around))
    if isinstance(node, COMPREHENSIONS):
        inside = {each.id for part in node.generators for each in ast.walk(part.target) if isinstance(each, ast.Name)}
    elif isinstance(node, ast.ClassDef):
        own = None
        inside = {node.name}.union(*(bound_names(stmt) for stmt in node.body))
    elif isinstance(node, ast.AugAssign):
        target = _key(node.target, own)
        return free_names(node.value, own) | ({target} if target else free_names(node.target, own))
    return set().union(*(free_names(child, own) for child in ast.iter_child_nodes(node))) - inside


def bound_names(node: ast.AST, own: str | None = None) -> set[str]:
    """Names that a statement assigns, imports or defines, in it or in its blocks."""
    if isinstance(node, DEFINITIONS):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, (ast.Lambda, *COMPREHENSIONS)):
        return set()
    key = _key(node, own)
    if key is not None:
        return {key} if isinstance(node.ctx, ast.Store) else set()  # type: ignore[attr-defined]
    named = {node.name} if isinstance(node, ast.ExceptHandler) and node.name else set()
    return named.union(*(bound_names(child, own) for child in ast.iter_child_nodes(node)))


def changed_names(node: ast.AST, own: str | None = None) -> set[str]:
    """Names of objects that a statement changes: ``x.a = 1``, ``x[0] = 1``, ``x.append(1)``, ``setup(args)``."""
    found: set[str] = set()
    for part in ast.walk(node):
        changed: ast.AST | None = None
        if isinstance(part, ast.Attribute | ast.Subscript) and isinstance(part.ctx, ast.Store):
            changed = None if getattr(part, "attr", "") in HARMLESS else part.value
        elif isinstance(part, ast.Expr) and isinstance(part.value, ast.Call):
            func = part.value.func
            changed = func.value if isinstance(func, ast.Attribute) and func.attr not in HARMLESS else None
        while isinstance(changed, ast.Attribute | ast.Subscript | ast.Call) and _key(changed, own) is None:
            changed = changed.func if isinstance(changed, ast.Call) else changed.value
        key = _key(changed, own) if changed is not None else None
        found |= {key} if key and key != own else set()

        call = part.value if isinstance(part, ast.Expr | ast.Assign) else None
        device = isinstance(part, ast.Assign) and ast.unparse(part.targets[0]).endswith("device")
        if isinstance(call, ast.Call) and (device or isinstance(part, ast.Expr)):
            is_setup = not any(word in ast.unparse(call.func).lower() for word in NOT_SETUP)
            found |= {each.id for each in call.args if is_setup and isinstance(each, ast.Name) and each.id in OPTIONS}
    return found
