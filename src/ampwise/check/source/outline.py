"""Outline of a file: its functions and classes, and every value bound to a name."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import Imports
from ampwise.check.source.script import SourceScript
from ampwise.finding import Place

__all__ = ["Binding", "ClassOutline", "FileOutline", "FunctionOutline", "outline"]

MODEL_USE = LazyPattern(r"\.(?:eval|train|parameters|named_parameters)\(")
DOTTED_END = LazyPattern(r"[A-Za-z_][\w.]*\Z")
LONGEST_NAME = 80
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


class Binding:
    """One assignment; ``value`` is None if it is unknown (a loop variable, an unpacked tuple)."""

    __slots__ = ("function", "guarded", "node", "value")

    def __init__(self, value: ast.expr | None, function: FunctionOutline, node: ast.AST, guarded: bool = False) -> None:
        self.value = value
        self.function = function
        self.node = node
        self.guarded = guarded  # under an `if`, a loop or a `try` of its function


class FunctionOutline:
    """A function, a method, or the body of the module."""

    __slots__ = (
        "_text",
        "annotations",
        "bindings",
        "defaults",
        "definitions",
        "functions",
        "name",
        "names_called",
        "node",
        "outline",
        "outside",
        "owner",
        "params",
        "parent",
    )

    def __init__(
        self,
        name: str,
        node: FunctionNode,
        outline: FileOutline,
        parent: FunctionOutline | None = None,
        owner: ClassOutline | None = None,
    ) -> None:
        self.name = name
        self.node = node
        self.outline = outline
        self.parent = parent
        self.owner = owner
        self.params: list[str] = []
        self.defaults: dict[str, ast.expr] = {}
        self.annotations: dict[str, ast.expr] = {}
        self.bindings: dict[str, list[Binding]] = {}
        self.functions: dict[str, FunctionOutline] = {}
        self.definitions: dict[ast.expr, FunctionOutline | ClassOutline | None] = {}  # names resolved so far
        self.outside: set[str] = set()  # declared global or nonlocal
        self.names_called: set[str] | None = None  # computed on demand
        self._text: str | None = None

    @property
    def body(self) -> list[ast.stmt]:
        return self.node.body

    @property
    def text(self) -> str:
        """Source of the function with its decorators; the whole file for the module."""
        if isinstance(self.node, ast.Module):
            return self.outline.script.text
        if self._text is None:
            first, last = self.lines
            self._text = "\n".join(self.outline.script.lines[first - 1 : last])
        return self._text

    @property
    def lines(self) -> tuple[int, int]:
        """First and last line, including decorators."""
        if isinstance(self.node, ast.Module):
            return 1, len(self.outline.script.lines)
        first = min([self.node.lineno, *(node.lineno for node in self.node.decorator_list)])
        return first, self.node.end_lineno or first

    @property
    def place(self) -> Place:
        """Place where the function begins."""
        return self.outline.script.place(self.node)

    @property
    def decorators(self) -> list[ast.expr]:
        return [] if isinstance(self.node, ast.Module) else self.node.decorator_list

    @property
    def self_name(self) -> str | None:
        """Name of the instance in a method; None in functions and static methods."""
        if self.owner is None or not self.params:
            return None
        static = any(isinstance(node, ast.Name) and node.id == "staticmethod" for node in self.decorators)
        return None if static else self.params[0]

    def holds(self, name: str) -> bool:
        return name not in self.outside and (name in self.bindings or name in self.params)

    def chain(self) -> Iterator[FunctionOutline]:
        """Yield this function and those that enclose it, ending with the module."""
        function: FunctionOutline | None = self
        while function is not None:
            yield function
            function = function.parent


class ClassOutline:
    """Class with its methods, and all assignments to attributes of ``self`` in them."""

    __slots__ = ("ancestry", "attributes", "methods", "name", "node", "outline")

    def __init__(self, name: str, node: ast.ClassDef, outline: FileOutline) -> None:
        self.name = name
        self.node = node
        self.outline = outline
        self.methods: dict[str, FunctionOutline] = {}
        self.attributes: dict[str, list[Binding]] = {}
        self.ancestry: list[ClassOutline] | None = None  # the class and its bases, computed on demand


class FileOutline:
    """Imports, functions and classes of one file, in order of definition."""

    __slots__ = (
        "calls_by_line",
        "classes",
        "functions",
        "imports",
        "lines_with",
        "models",
        "module",
        "order",
        "script",
    )

    module: FunctionOutline  # the body of the file itself

    def __init__(self, script: SourceScript, imports: Imports) -> None:
        self.script = script
        self.imports = imports
        self.functions: list[FunctionOutline] = []
        self.classes: dict[str, ClassOutline] = {}
        self.models = set(_models(script.text))  # names with a call of .eval(), .train() or .parameters()
        self.order: dict[ast.AST, list[ast.expr]] = {}  # calls in order of evaluation, computed on demand
        self.lines_with: dict[tuple[str, ...], list[int]] = {}  # lines with one of these words, computed on demand
        self.calls_by_line: list[tuple[int, str]] | None = None  # computed on demand

    @property
    def path(self) -> str:
        return self.script.path


def outline(script: SourceScript, package: str = "") -> FileOutline:
    """Make the outline of a script in one walk over its statements."""
    result = FileOutline(script, Imports(package))
    result.module = FunctionOutline(name="", node=script.tree, outline=result)
    result.functions.append(result.module)
    _Collector(result).statements(script.tree.body, result.module, None, False)
    return result


def _models(text: str) -> Iterator[str]:
    """Yield the names that ``.eval()``, ``.train()`` or ``.parameters()`` is called on.

    They are searched from the dot backwards, which is fast.
    """
    for match in MODEL_USE.finditer(text):
        name = DOTTED_END.search(text[max(0, match.start() - LONGEST_NAME) : match.start()])
        if name is not None:
            yield name[0]


class _Collector:
    def __init__(self, result: FileOutline) -> None:
        self.result = result

    def statements(
        self, body: Sequence[ast.stmt], function: FunctionOutline, owner: ClassOutline | None, guarded: bool
    ) -> None:
        for node in body:
            self.statement(node, function, owner, guarded)

    def statement(self, node: ast.stmt, function: FunctionOutline, owner: ClassOutline | None, guarded: bool) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.function(node, function, owner)
        elif isinstance(node, ast.ClassDef):
            self.class_(node, function)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self.result.imports.add(node)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            function.outside.update(node.names)
        else:
            self.plain(node, function, owner, guarded)

    def plain(self, node: ast.stmt, function: FunctionOutline, owner: ClassOutline | None, guarded: bool) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self.bind(target, node.value, function, node, guarded)
        elif isinstance(node, ast.AnnAssign):
            self.bind(node.target, node.value, function, node, guarded)
        elif isinstance(node, ast.AugAssign | ast.For | ast.AsyncFor):
            self.bind(node.target, None, function, node, guarded)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                if item.optional_vars is not None:
                    self.bind(item.optional_vars, item.context_expr, function, node, guarded)
        deeper = guarded or not isinstance(node, ast.With | ast.AsyncWith)
        for block in _blocks(node):
            self.statements(block, function, owner, deeper)

    def function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, parent: FunctionOutline, owner: ClassOutline | None
    ) -> None:
        function = FunctionOutline(name=node.name, node=node, outline=self.result, parent=parent, owner=owner)
        _add_parameters(function, node.args)
        self.result.functions.append(function)
        if owner is not None:
            owner.methods[node.name] = function
        else:
            parent.functions[node.name] = function
        self.statements(node.body, function, None, False)

    def class_(self, node: ast.ClassDef, parent: FunctionOutline) -> None:
        owner = ClassOutline(node.name, node, self.result)
        self.result.classes.setdefault(node.name, owner)
        for child in _class_statements(node.body):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                self.function(child, parent, owner)
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        owner.attributes.setdefault(target.id, []).append(Binding(child.value, parent, child))
            elif isinstance(child, ast.ClassDef):
                self.class_(child, parent)

    def bind(
        self, target: ast.expr, value: ast.expr | None, function: FunctionOutline, node: ast.AST, guarded: bool
    ) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            values: Sequence[ast.expr | None] = [None] * len(target.elts)
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                values = value.elts
            for part, part_value in zip(target.elts, values, strict=True):
                self.bind(part, part_value, function, node, guarded)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, None, function, node, guarded)
        elif isinstance(target, ast.Name):
            self._home(target.id, function).setdefault(target.id, []).append(Binding(value, function, node, guarded))
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            self.bind_attribute(target.value.id, target.attr, Binding(value, function, node, guarded))

    def bind_attribute(self, base: str, attribute: str, binding: Binding) -> None:
        for function in binding.function.chain():  # a function nested in a method shares its self
            if function.owner is not None and function.self_name == base:
                function.owner.attributes.setdefault(attribute, []).append(binding)
                return
        binding.function.bindings.setdefault(f"{base}.{attribute}", []).append(binding)

    def _home(self, name: str, function: FunctionOutline) -> dict[str, list[Binding]]:
        if name in function.outside:
            return self.result.module.bindings
        return function.bindings


def _add_parameters(function: FunctionOutline, arguments: ast.arguments) -> None:
    positional = [*arguments.posonlyargs, *arguments.args]
    function.params = [argument.arg for argument in [*positional, *arguments.kwonlyargs]]
    function.annotations = {
        argument.arg: argument.annotation
        for argument in [*positional, *arguments.kwonlyargs]
        if argument.annotation is not None
    }
    first = len(positional) - len(arguments.defaults)
    function.defaults = {
        argument.arg: default for argument, default in zip(positional[first:], arguments.defaults, strict=True)
    }
    for argument, keyword_default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if keyword_default is not None:
            function.defaults[argument.arg] = keyword_default
    for extra in (arguments.vararg, arguments.kwarg):
        if extra is not None:
            function.params.append(extra.arg)


def _class_statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a class, including those under ``if`` and ``try``."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            for block in _blocks(node):
                yield from _class_statements(block)
        else:
            yield node


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if block:
            yield block
    for handler in getattr(node, "handlers", ()):
        yield handler.body
    for case in getattr(node, "cases", ()):
        yield case.body
