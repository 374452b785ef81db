"""Where a name is defined, from the text of the source alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

__all__ = ["Definition", "Function", "Module", "Source", "is_public", "properties"]

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """A function, a class or an assignment of a module."""

    module: str
    name: str
    node: ast.stmt


class Module:
    """A file: what it defines, and where what it imports comes from."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"))

    @cached_property
    def defined(self) -> dict[str, ast.stmt]:
        return {name: node for node in self.tree.body for name in _defines(node)}

    @cached_property
    def imported(self) -> dict[str, tuple[str, str]]:
        """Names that come from other modules, for type checkers or at the first use too: {name: (module, its name)}."""
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom) and node.module)
        return {alias.asname or alias.name: (str(node.module), alias.name) for node in nodes for alias in node.names}


class Source:
    """The modules of ampwise under a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """A module of ours; None for what is not."""
        if name not in self._modules:
            base = self._folder.joinpath(*name.split("."))
            paths = (path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file())
            path = next(paths, None)
            self._modules[name] = None if path is None else Module(name, path)
        return self._modules[name]

    def modules(self, word: str) -> Iterator[Module]:
        """Those in whose text a word is, by name; the others are not parsed."""
        for path in sorted(self._folder.rglob("ampwise/**/*.py")):
            if word in path.read_text(encoding="utf-8"):
                parts = path.relative_to(self._folder).with_suffix("").parts
                yield self._ours(".".join(parts[:-1] if parts[-1] == "__init__" else parts))

    def exports(self, name: str) -> list[str]:
        """What ``__all__`` of a module holds: a list of texts, or ``sorted`` of a table's keys."""
        module = self._ours(name)
        value = _value(module.defined["__all__"])
        if isinstance(value, ast.Call) and isinstance(value.args[0], ast.Name):
            value = _value(module.defined[value.args[0].id])
        texts = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", [])
        return sorted(str(text.value) for text in texts if isinstance(text, ast.Constant))

    def find(self, module: str, name: str) -> Definition:
        """Where a name of a module is defined."""
        found = self.look_up(module, name)
        if found is None:
            raise LookupError(f"{module} has no {name!r} that could be found in its source")
        return found

    def look_up(self, module: str, name: str) -> Definition | None:
        """The same, and None for what is not ours."""
        where = self.module(module)
        while where is not None and name not in where.defined:
            if name not in where.imported:
                return None
            home, name = where.imported[name]
            where = self.module(home)
        return None if where is None else Definition(where.name, name, where.defined[name])

    def bases(self, definition: Definition) -> Iterator[Definition]:
        """The classes of ours that a class inherits from, near ones first."""
        for base in getattr(definition.node, "bases", ()):
            found = self.look_up(definition.module, base.id) if isinstance(base, ast.Name) else None
            if found is not None:
                yield found
                yield from self.bases(found)

    def given_by(self, definition: Definition) -> Iterator[Definition]:
        """The public classes of ours that a function, or the methods and fields of a class, are annotated to give."""
        for annotation in _given(definition.node):
            for node in ast.walk(annotation):
                found = self.look_up(definition.module, node.id) if isinstance(node, ast.Name) else None
                if found is not None and isinstance(found.node, ast.ClassDef) and is_public(found.name):
                    yield found

    def _ours(self, name: str) -> Module:
        module = self.module(name)
        if module is None:
            raise LookupError(f"there is no module {name}")
        return module


def is_public(name: str) -> bool:
    return not name.startswith("_")


def properties(node: Function) -> set[str]:
    """The decorators of a function, by the last part of their names."""
    return {ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in node.decorator_list}


def _given(node: ast.stmt) -> Iterator[ast.expr]:
    if isinstance(node, Function) and node.returns is not None:
        yield node.returns
    if isinstance(node, ast.ClassDef):
        for part in node.body:
            if isinstance(part, Function) and is_public(part.name):
                yield from _given(part)
            elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and is_public(part.target.id):
                yield part.annotation


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [
        name.id
        for target in targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    ]


def _value(node: ast.stmt) -> ast.expr | None:
    return node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
