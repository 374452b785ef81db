"""Resolve names of a script: the imports of a file, and dotted names without their aliases."""

from __future__ import annotations

import ast
import functools
import operator

# Star imports whose names are known; those of other modules are not.
STARS = dict.fromkeys(("torch.cuda.amp", "torch.amp"), ("autocast", "GradScaler", "custom_fwd", "custom_bwd"))


class Imports:
    """Names that a file imports, anywhere in it, and their full names. The first import of a name wins: later ones
    are fallbacks in ``except ImportError``.
    """

    def __init__(self, package: str = "") -> None:
        self.package = package
        self.names: dict[str, str] = {}
        self.modules: set[str] = set()
        self.has_stars = False

    def add(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self.modules.add(alias.name)
                top = alias.name.partition(".")[0]
                self.names.setdefault(alias.asname or top, alias.name if alias.asname else top)
            return
        module = node.module or ""
        if node.level:
            above = self.package.split(".")
            above = above[: -(node.level - 1)] if node.level > 1 else above
            module = ".".join(part for part in [*above, module] if part)
        self.modules.add(module)
        for alias in node.names:
            if alias.name == "*":
                self.has_stars = True
                for name in STARS.get(module, ()):
                    self.names.setdefault(name, f"{module}.{name}")
            else:
                self.names.setdefault(alias.asname or alias.name, f"{module}.{alias.name}")

    def qualified(self, node: ast.expr) -> str | None:
        """Return ``torch.cuda.amp.GradScaler`` for ``amp.GradScaler``; None if it does not start with an imported name.

        >>> imports = Imports()
        >>> imports.add(ast.parse("from torch.cuda import amp").body[0])
        >>> imports.qualified(ast.parse("amp.GradScaler", mode="eval").body)
        'torch.cuda.amp.GradScaler'
        """
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        name = self.names.get(node.id)
        if name is None:
            if not self.has_stars or node.id != "torch":
                return None
            name = "torch"  # probably from `from utils import *`
        return ".".join([name, *reversed(parts)])


def dotted_text(node: ast.AST) -> str | None:
    """Return ``a.b.c`` for a chain of attributes on a name, else None."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


@functools.lru_cache(maxsize=10_000)  # the same few tests and arguments, again in each context
def code_of(node: ast.AST) -> str:
    """Return the code of a node in its normal form, as ``ast.unparse``."""
    return dotted_text(node) or ast.unparse(node)  # most are plain names, for which `unparse` takes long


def last_name(node: ast.expr) -> str:
    """Return ``step`` for ``self.scaler.step``; an empty string if it is not a chain of attributes on a name."""
    root = node
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name):
        return ""
    return node.attr if isinstance(node, ast.Attribute) else root.id


def method_called(node: ast.AST | None) -> str:
    """Return ``step`` for the call ``scaler.step(optimizer)``; an empty string if it is not a call of a method."""
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""


def arguments_given(call: ast.Call) -> list[ast.expr]:
    """Return all arguments of a call, by position and by keyword."""
    return [*call.args, *map(operator.attrgetter("value"), call.keywords)]
