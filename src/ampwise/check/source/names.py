"""Resolve names of a script: the imports of a file, and dotted names without their aliases."""

from __future__ import annotations

import ast
from collections.abc import Iterable

__all__ = ["Imports", "dotted_text", "method_called"]

# Star imports whose names are known; those of other modules are not.
STARS = {
    "torch.cuda.amp": ("autocast", "GradScaler", "custom_fwd", "custom_bwd"),
    "torch.amp": ("autocast", "GradScaler", "custom_fwd", "custom_bwd"),
}


class Imports:
    """Names that a file imports, anywhere in it, and their full names."""

    def __init__(self, package: str = "") -> None:
        self.package = package
        self.names: dict[str, str] = {}
        self.modules: set[str] = set()
        self.has_stars = False

    def add(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                self.modules.add(alias.name)
                self._bind(alias.asname or alias.name.partition(".")[0], alias.asname and alias.name)
            else:
                self._add_from(_absolute(node, self.package), alias)

    def qualified(self, node: ast.expr) -> str | None:
        """Return ``torch.cuda.amp.GradScaler`` for ``amp.GradScaler``; None if it does not start with an imported name.

        >>> imports = Imports()
        >>> imports.add(ast.parse("from torch.cuda import amp").body[0])
        >>> imports.qualified(ast.parse("amp.GradScaler", mode="eval").body)
        'torch.cuda.amp.GradScaler'
        """
        text = dotted_text(node)
        if text is None:
            return None
        first, dot, rest = text.partition(".")
        name = self.names.get(first)
        if name is None and self.has_stars and first == "torch":
            name = "torch"  # probably from `from utils import *`
        return None if name is None else f"{name}{dot}{rest}"

    def mentions(self, packages: Iterable[str]) -> bool:
        """Whether anything is imported from one of these packages."""
        wanted = tuple(packages)
        return any(module == name or module.startswith(f"{name}.") for module in self.modules for name in wanted)

    def _add_from(self, module: str, alias: ast.alias) -> None:
        self.modules.add(module)
        if alias.name == "*":
            self.has_stars = True
            for name in STARS.get(module, ()):
                self._bind(name, f"{module}.{name}")
        else:
            self._bind(alias.asname or alias.name, f"{module}.{alias.name}")

    def _bind(self, name: str, target: str | None) -> None:
        # The first import wins: later ones are fallbacks in `except ImportError`.
        self.names.setdefault(name, target or name)


def dotted_text(node: ast.expr) -> str | None:
    """Return ``a.b.c`` for a chain of attributes on a name, else None."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def method_called(node: ast.AST | None) -> str:
    """Return ``step`` for the call ``scaler.step(optimizer)``; an empty string if it is not a call of a method."""
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    above = package.split(".")[: -(node.level - 1)] if node.level > 1 else package.split(".")
    return ".".join(part for part in [*above, node.module or ""] if part)
