"""Outline of a file: its functions and classes, and every value bound to a name."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import Imports
from ampwise.check.source.script import SourceScript
from ampwise.finding import Place

MODEL_USE = LazyPattern(r"\.(?:eval|train|parameters|named_parameters)\(")
DOTTED_END = LazyPattern(r"[A-Za-z_][\w.]*\Z")
LONGEST_NAME = 80
BLOCKS = ("body", "orelse", "finalbody")
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


@dataclass(slots=True, eq=False)
class Binding:
    """One assignment; ``value`` is None if it is unknown (a loop variable, an unpacked tuple)."""

    value: ast.expr | None
    function: FunctionOutline
    node: ast.AST
    guarded: bool = False  # under an `if`, a loop or a `try` of its function


class FunctionOutline:
    """A function, a method, or the body of the module."""

    def __init__(
        self,
        node: FunctionNode,
        outline: FileOutline,
        parent: FunctionOutline | None = None,
        owner: ClassOutline | None = None,
    ) -> None:
        self.node, self.outline, self.parent, self.owner = node, outline, parent, owner
        self.body = node.body
        # This function and those that enclose it, ending with the module.
        self.scopes: tuple[FunctionOutline, ...] = (self,) if parent is None else (self, *parent.scopes)
        self.params: list[str] = []
        self.defaults: dict[str, ast.expr] = {}
        self.annotations: dict[str, ast.expr] = {}  # of the parameters
        self.bindings: dict[str, list[Binding]] = {}
        self.returns: list[ast.expr | None] = []
        self.functions: dict[str, FunctionOutline] = {}
        self.definitions: dict[ast.expr | str, FunctionOutline | ClassOutline | None] = {}  # names resolved so far
        self.results: dict[object, dict[Any, Any]] = {}  # of ``frame.once_per_function``
        self.outside: set[str] = set()  # declared global or nonlocal
        self.names_called: set[str] | None = None  # computed on demand
        self.self_name: str | None = None  # of the instance in a method; None in functions and static methods
        if isinstance(node, ast.Module):
            self.name, self.lines = "", (1, len(outline.script.lines))
            self.decorators: list[ast.expr] = []
        else:
            self.name, self.decorators = node.name, node.decorator_list
            first = min([node.lineno, *[decorator.lineno for decorator in node.decorator_list]])
            self.lines = (first, node.end_lineno or first)  # including decorators
            self._add_parameters(node.args)

    def _add_parameters(self, arguments: ast.arguments) -> None:
        positional = [*arguments.posonlyargs, *arguments.args]
        named = [*positional, *arguments.kwonlyargs]
        self.params += [argument.arg for argument in named]
        self.annotations = {each.arg: each.annotation for each in named if each.annotation is not None}
        first = len(positional) - len(arguments.defaults)
        for argument, default in zip(positional[first:], arguments.defaults, strict=True):
            self.defaults[argument.arg] = default
        for argument, keyword_default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if keyword_default is not None:
                self.defaults[argument.arg] = keyword_default
        self.params += [extra.arg for extra in (arguments.vararg, arguments.kwarg) if extra is not None]
        if self.owner is not None and self.params:
            static = [node for node in self.decorators if isinstance(node, ast.Name) and node.id == "staticmethod"]
            self.self_name = None if static else self.params[0]

    @functools.cached_property
    def text(self) -> str:
        """Source of the function with its decorators; the whole file for the module."""
        first, last = self.lines
        return "\n".join(self.outline.script.lines[first - 1 : last])

    @property
    def place(self) -> Place:
        """Place where the function begins."""
        return self.outline.script.place(self.node)

    @property
    def is_run_by_framework(self) -> bool:
        """Whether it is a method that a framework such as Lightning calls, which does the step itself."""
        bases = [ast.unparse(base) for base in self.owner.node.bases] if self.owner is not None else []
        return any("Lightning" in base and "LightningLite" not in base for base in bases)

    @property
    def is_abstract(self) -> bool:
        """Whether its body does nothing: another class replaces it."""
        return all(
            isinstance(node, ast.Raise | ast.Pass)
            or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            for node in self.body
        )

    def holds(self, name: str) -> bool:
        return name not in self.outside and (name in self.bindings or name in self.params)

    def home_of(self, name: str) -> FunctionOutline | None:
        """Return the innermost scope that defines a name; None if none does."""
        for scope in self.scopes:
            if name not in scope.outside and (name in scope.bindings or name in scope.params):
                return scope
        return None


@dataclass(slots=True, eq=False)
class ClassOutline:
    """Class with its methods, and all assignments to attributes of ``self`` in them."""

    name: str
    node: ast.ClassDef
    outline: FileOutline
    methods: dict[str, FunctionOutline] = field(default_factory=dict)
    attributes: dict[str, list[Binding]] = field(default_factory=dict)
    ancestry: list[ClassOutline] | None = None  # the class and its bases, computed on demand


class FileOutline:
    """Imports, functions and classes of one file, in order of definition; one walk over its statements."""

    def __init__(self, script: SourceScript, package: str = "") -> None:
        self.script, self.path = script, script.path
        self.imports = Imports(package)
        self.classes: dict[str, ClassOutline] = {}
        self.module = FunctionOutline(script.tree, self)  # the body of the file itself
        self.functions = [self.module]
        # Names with a call of .eval(), .train() or .parameters(), searched from the dot backwards, which is fast.
        uses = [match.start() for match in MODEL_USE.finditer(script.text)]
        names = [DOTTED_END.search(script.text[max(0, start - LONGEST_NAME) : start]) for start in uses]
        self.models = {name[0] for name in names if name is not None}
        lasts = sorted({name.rpartition(".")[2] for name in self.models})
        self.model_calls = tuple([f"{before}{name}{after}" for name in lasts for before in " .(" for after in "(."])
        self.order: dict[ast.AST, list[ast.expr]] = {}  # calls in order of evaluation, computed on demand
        self.lines_with: dict[tuple[str, ...], list[int]] = {}  # lines with one of these words, computed on demand
        self.calls_by_line: list[tuple[int, str]] | None = None  # computed on demand
        self._add_statements(script.tree.body, self.module, guarded=False)

    def _add_statements(self, body: Sequence[ast.stmt], function: FunctionOutline, guarded: bool) -> None:
        for node in body:
            if isinstance(node, ast.Expr | ast.Pass):
                pass
            elif isinstance(node, ast.Return):
                function.returns.append(node.value)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if guarded and node.name in self.imports.names:
                    pass  # in `except ImportError`: it stands in for what is imported
                elif isinstance(node, ast.ClassDef):
                    self._add_class(node, function)
                else:
                    self._add_function(node, function, None)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self.imports.add(node)
            elif isinstance(node, ast.Global | ast.Nonlocal):
                function.outside.update(node.names)
            else:
                for target, value in _bound_by(node):
                    self._bind(target, value, function, node, guarded)
                if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                    is_guard = not isinstance(node, ast.With | ast.AsyncWith)
                    for block in _blocks(node):
                        self._add_statements(block, function, guarded or is_guard)

    def _add_function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, parent: FunctionOutline, owner: ClassOutline | None
    ) -> None:
        function = FunctionOutline(node, self, parent, owner)
        self.functions.append(function)
        (parent.functions if owner is None else owner.methods)[node.name] = function
        self._add_statements(node.body, function, guarded=False)

    def _add_class(self, node: ast.ClassDef, parent: FunctionOutline) -> None:
        owner = ClassOutline(node.name, node, self)
        self.classes.setdefault(node.name, owner)
        for child in _class_statements(node.body):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                self._add_function(child, parent, owner)
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                for target in child.targets if isinstance(child, ast.Assign) else [child.target]:
                    if isinstance(target, ast.Name):
                        owner.attributes.setdefault(target.id, []).append(Binding(child.value, parent, child))
            elif isinstance(child, ast.ClassDef):
                self._add_class(child, parent)

    def _bind(
        self, target: ast.expr, value: ast.expr | None, function: FunctionOutline, node: ast.AST, guarded: bool
    ) -> None:
        if isinstance(target, ast.Name):
            home = self.module if target.id in function.outside else function
            home.bindings.setdefault(target.id, []).append(Binding(value, function, node, guarded))
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            base, binding = target.value.id, Binding(value, function, node, guarded)
            for scope in function.scopes:  # a function nested in a method shares its self
                if scope.owner is not None and scope.self_name == base:
                    scope.owner.attributes.setdefault(target.attr, []).append(binding)
                    return
            function.bindings.setdefault(f"{base}.{target.attr}", []).append(binding)
        elif isinstance(target, ast.Tuple | ast.List):
            values: Sequence[ast.expr | None] = [None] * len(target.elts)
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                values = value.elts
            for part, part_value in zip(target.elts, values, strict=True):
                self._bind(part, part_value, function, node, guarded)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, None, function, node, guarded)


def _class_statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a class, including those under ``if`` and ``try``."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            for block in _blocks(node):
                yield from _class_statements(block)
        else:
            yield node


def _bound_by(node: ast.stmt) -> list[tuple[ast.expr, ast.expr | None]]:
    """Return the targets that a statement binds, each with its value."""
    if isinstance(node, ast.Assign):
        return [(target, node.value) for target in node.targets]
    if isinstance(node, ast.AnnAssign):
        return [(node.target, node.value)]
    if isinstance(node, ast.AugAssign | ast.For | ast.AsyncFor):
        return [(node.target, None)]
    if isinstance(node, ast.With | ast.AsyncWith):
        return [(item.optional_vars, item.context_expr) for item in node.items if item.optional_vars is not None]
    return []


def _blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    inner = [*getattr(node, "handlers", ()), *getattr(node, "cases", ())]
    return [*[getattr(node, name, []) for name in BLOCKS], *[part.body for part in inner]]
