"""Deprecated names of ``torch.cuda.amp`` and ``torch.cpu.amp`` that moved to ``torch.amp``, and how to rewrite them.

A rewritten call must work, so an import is rewritten together with all uses of its names. If one of them cannot be
rewritten safely, none is.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.project import SourceFile
from ampwise.finding import Edit

__all__ = ["DeprecatedUse", "deprecated_uses"]

MOVED = ("autocast", "GradScaler", "custom_fwd", "custom_bwd")
# What `torch.cuda.amp.autocast(...)` took by position; torch.amp's takes the device and then the dtype.
POSITIONS = ("enabled", "dtype", "cache_enabled")
MODULES = {
    f"torch.{device}.amp{inner}": device
    for device in ("cuda", "cpu")
    for inner in ("", ".autocast_mode", ".grad_scaler")
}
DEPRECATED = {f"{module}.{name}": (device, name) for module, device in MODULES.items() for name in MOVED}
# Code under such a test, or in a `try`, is there for old versions of torch.
ABOUT_VERSIONS = LazyPattern(
    r"version|hasattr|getattr|TORCH|_available|__dict__|dir\(|find_spec|callable", re.IGNORECASE
)


MOST_SHARED = 100  # above this many edits, only one finding carries the edits that many share
OPENING = LazyPattern(r"\s*\(")


class _NotSure(Exception):
    """A use that cannot be rewritten safely."""


class DeprecatedUse:
    """Use of a deprecated name, and the edits that replace it; without edits it needs a manual change."""

    __slots__ = ("edits", "name", "node")

    def __init__(self, node: ast.AST, name: str, edits: tuple[Edit, ...] = ()) -> None:
        self.node = node
        self.name = name
        self.edits = edits


def deprecated_uses(code: SourceFile) -> list[DeprecatedUse]:
    """Return the imports of deprecated names, and their uses with a module name, such as ``amp.autocast()``."""
    return _Deprecated(code).uses()


class _Deprecated:
    def __init__(self, code: SourceFile) -> None:
        self.code = code
        self.script = code.script
        self.imports = code.outline.imports
        self._found: dict[str, list[Edit] | None] = {}
        self._has_shared = False
        self._caught: dict[ast.Try, tuple[bool, set[ast.AST]]] = {}

    def uses(self) -> list[DeprecatedUse]:
        found = [*self._imported(), *self._dotted()]
        return sorted(found, key=lambda use: (use.node.lineno, use.node.col_offset))  # type: ignore[attr-defined]

    # -- from torch.cuda.amp import autocast ---------------------------------------------------------------

    def _imported(self) -> Iterator[DeprecatedUse]:
        statements = self._import_statements()
        names = {alias.name for node in statements for alias in node.names}
        edits = (
            self._sure_edits(functools.partial(self._once, "imports", self._edits_of_imports), "GradScaler" in names)
            if statements
            else ()
        )
        for node in statements:
            yield DeprecatedUse(node, f"{node.module}", edits)
            edits = edits if len(edits) <= MOST_SHARED else ()

    def _import_statements(self) -> list[ast.ImportFrom]:
        return [
            node
            for node in self.code.nodes(ast.ImportFrom)
            if node.module in MODULES and not node.level and any(alias.name in (*MOVED, "*") for alias in node.names)
        ]

    def _edits_of_imports(self) -> list[Edit]:
        """Return the edits for all imports of deprecated names and all uses of the imported names."""
        names: dict[str, tuple[str, str]] = {}
        statements = self._import_statements()
        for node in statements:
            self._require(not self._for_old_versions(node))
            for alias in node.names:
                self._require(alias.name in MOVED)
                what = (MODULES[node.module or ""], alias.name)
                self._require(names.setdefault(alias.asname or alias.name, what) == what)
        edits = [self._renamed_module(node) for node in statements]
        self._require(not self._is_imported_elsewhere(set(names)))
        for name, (device, moved) in names.items():
            self._require(self._is_bound_only_by(name, statements))
            for use in self._names(name):
                edits += self._rewritten(use, device, moved, written=name)
        return edits

    def _renamed_module(self, node: ast.ImportFrom) -> Edit:
        """Rewrite ``from torch.cuda.amp import`` to ``from torch.amp import``; the imported names stay."""
        text = self.script.segment(node)
        found = re.match(rf"from\s+{re.escape(node.module or '')}(?=\s+import\b)", text)
        if found is None:
            raise _NotSure
        line, column = self.script.span(node)[0]
        return self.script.edit(line, column, line, column + found.end(), "from torch.amp")

    def _is_imported_elsewhere(self, names: set[str]) -> bool:
        """Whether other files may import these names from this one and use them in the old way."""
        if self.code.path.endswith("__init__.py") or "__all__" in self.script.text:
            return True
        taken = set().union(*self.code.project.importers(self.code.path).values())
        return bool(taken & names)

    # -- torch.cuda.amp.autocast(), amp.autocast() ------------------------------------------------------------

    def _dotted(self) -> Iterator[DeprecatedUse]:
        for node in self.dotted_uses:
            device, name = DEPRECATED[self._full_name(node)]
            edits = self._sure_edits(functools.partial(self._edits_of_use, node), name == "GradScaler")
            yield DeprecatedUse(node, f"torch.{device}.amp.{name}", edits)

    @functools.cached_property
    def dotted_uses(self) -> list[ast.Attribute]:
        return [
            node
            for node in self.code.nodes(ast.Attribute)
            if node.attr in MOVED and self._full_name(node) in DEPRECATED
        ]

    def _full_name(self, node: ast.expr) -> str:
        return self.imports.qualified(node) or ""

    def _edits_of_use(self, node: ast.expr) -> list[Edit]:
        """Return the edits for one use, in whatever form it is written."""
        if isinstance(node, ast.Name):
            return self._once("imports", self._edits_of_imports)
        root = _root(node)
        if self.imports.names.get(root) != "torch":
            return self._once(f"alias {root}", functools.partial(self._edits_of_module_alias, root))
        device, name = DEPRECATED[self._full_name(node)]
        return self._rewritten(node, device, name, written=f"{root}.amp.{name}")

    def _sure_edits(self, edits_of: Callable[[], list[Edit]], of_scaler: bool) -> tuple[Edit, ...]:
        """Return all edits, or none if one is not safe; a scaler's include those of ``isinstance`` tests."""
        try:
            edits, tests = edits_of(), self._edits_of_tests if of_scaler else []
        except _NotSure:
            return ()
        if len(edits) + len(tests) > MOST_SHARED:  # they fix all uses at once: one finding carries them
            if self._has_shared:
                return ()
            self._has_shared = True
        return tuple(dict.fromkeys([*edits, *tests]))

    @property
    def _edits_of_tests(self) -> list[Edit]:
        """Edits of ``isinstance(scaler, torch.cuda.amp.GradScaler)``, which is False for a scaler of torch.amp."""
        return self._once("tests", lambda: list(dict.fromkeys(self._find_edits_of_tests())))

    def _once(self, what: str, edits_of: Callable[[], list[Edit]]) -> list[Edit]:
        """Return edits that many uses share, found once; raises _NotSure every time if they are not safe."""
        if what not in self._found:
            try:
                self._found[what] = edits_of()
            except _NotSure:
                self._found[what] = None
        found = self._found[what]
        if found is None:
            raise _NotSure
        return found

    def _find_edits_of_tests(self) -> Iterator[Edit]:
        given: set[int] = set()
        kept: list[list[Edit]] = []  # so that no other list gets the id of one
        for node in (*self.code.nodes(ast.Name), *self.code.nodes(ast.Attribute)):
            if DEPRECATED.get(self._full_name(node), ("", ""))[1] == "GradScaler":
                parent = self.parent(node)
                if not (isinstance(parent, ast.Call) and parent.func is node) and not self._is_annotation(node):
                    edits = self._edits_of_use(node)
                    if id(edits) not in given:  # all uses of an import share its edits
                        given.add(id(edits))
                        kept.append(edits)
                        yield from edits

    def _edits_of_module_alias(self, alias: str) -> list[Edit]:
        """Rewrite ``from torch.cuda import amp`` to ``from torch import amp``, with every use of ``amp``."""
        statements = [
            node
            for node in self.code.tree_nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            and any((name.asname or name.name) == alias for name in node.names)
        ]
        self._require(len(statements) == 1 and len(statements[0].names) == 1)
        statement = statements[0]
        self._require(not self._for_old_versions(statement) and not self._is_imported_elsewhere({alias}))
        self._require(self._is_bound_only_by(alias, [statement]))
        new = f"import torch.amp as {alias}"
        if isinstance(statement, ast.ImportFrom):
            self._require(statement.module in ("torch.cuda", "torch.cpu") and statement.names[0].name == "amp")
            new = "from torch import amp" + ("" if alias == "amp" else f" as {alias}")
        edits = [self.script.replace(statement, new)]
        dotted_uses = set(self.dotted_uses)
        for name in self._names(alias):
            use = self.parent(name)
            self._require(isinstance(use, ast.Attribute) and use in dotted_uses)
            assert isinstance(use, ast.Attribute)
            device, what = DEPRECATED[self._full_name(use)]
            self._require(self._full_name(use).count(".") == 3)  # not through amp.autocast_mode
            edits += self._rewritten(use, device, what, written=f"{alias}.{what}")
        return edits

    # -- one use ----------------------------------------------------------------------------------------------

    def _rewritten(self, node: ast.expr, device: str, name: str, *, written: str) -> list[Edit]:
        """Return the edits that replace one use of ``name`` by ``written``."""
        self._require(not self._for_old_versions(node))
        parent = self.parent(node)
        if isinstance(parent, ast.Call) and parent.func is node:
            return self._rewritten_call(parent, device, name, written)
        if self._is_decorator(node) and name.startswith("custom_"):
            return [self.script.replace(node, f'{written}(device_type="{device}")')]
        # As a type it covers the old class, too, which is derived from it.
        self._require(
            name in ("GradScaler", "autocast") and (self._is_annotation(node) or self._is_instance_test(node))
        )
        return [] if self.script.segment(node) == written else [self.script.replace(node, written)]

    def _rewritten_call(self, call: ast.Call, device: str, name: str, written: str) -> list[Edit]:
        start, function_end = self.script.span(call.func)
        opening = OPENING.compiled.match(self.script.text, self.script.offset(*function_end))
        self._require(opening is not None and start[0] == function_end[0] and "\n" not in opening[0])
        self._require(not any(isinstance(argument, ast.Starred) for argument in call.args))
        assert opening is not None
        given = f'"{device}"' if name in ("autocast", "GradScaler") else f'device_type="{device}"'
        line, column = function_end
        after_bracket = (line, column + len(opening[0]))
        edits = [self.script.edit(*start, *after_bracket, f"{written}({self._before_first(call, given)}")]
        if name == "autocast":
            edits += self._named_positions(call, after_bracket)
        else:
            self._require(name == "GradScaler" or not call.args)
        return edits

    def _before_first(self, call: ast.Call, given: str) -> str:
        """Return the new first argument with its separator: on the line of the others, or on its own line."""
        arguments = [*call.args, *call.keywords]
        if not arguments:
            return given
        line, column = min(self.script.span(argument)[0] for argument in arguments)
        if line == self.script.span(call.func)[1][0]:
            return f"{given}, "
        indentation = self.script.lines[line - 1][: column - 1]
        self._require(not indentation.strip())
        return f"\n{indentation}{given},"

    def _named_positions(self, call: ast.Call, after_bracket: tuple[int, int]) -> Iterator[Edit]:
        """Rewrite ``autocast(True, torch.half)`` to ``autocast(enabled=True, dtype=torch.half)``."""
        self._require(len(call.args) <= len(POSITIONS))
        reached, expected = after_bracket, ""
        for word, argument in zip(POSITIONS, call.args, strict=False):
            start, end = self.script.span(argument)
            between = self.script.text[self.script.offset(*reached) : self.script.offset(*start)]
            # Brackets around an argument are not part of its node, so its text would be incomplete.
            self._require(re.sub(r"#[^\n]*", "", between).strip() == expected)
            yield self.script.replace(argument, f"{word}={self.script.segment(argument)}")
            reached, expected = end, ","

    # -- the context of a use -----------------------------------------------------------------------------------

    @functools.cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in self.code.tree_nodes for child in ast.iter_child_nodes(node)}

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self.parents.get(node)

    def _outer_nodes(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield each node that contains ``node``, with its child on the way."""
        inner: ast.AST = node
        outer = self.parent(node)
        while outer is not None:
            yield outer, inner
            inner, outer = outer, self.parent(outer)

    def _for_old_versions(self, node: ast.AST) -> bool:
        for outer, inner in self._outer_nodes(node):
            if isinstance(outer, ast.ExceptHandler) or (
                isinstance(outer, ast.Try) and self._tries_imports(outer, inner)
            ):
                return True
            test = outer.test if isinstance(outer, ast.If | ast.IfExp) else None
            if test is not None and test is not inner and ABOUT_VERSIONS.search(ast.unparse(test)):
                return True
        return False

    def _tries_imports(self, node: ast.Try, inner: ast.AST) -> bool:
        """Whether a ``try`` tests what torch offers, and does not wrap a whole training run."""
        if node not in self._caught:
            caught = " ".join(ast.unparse(handler.type) if handler.type else "" for handler in node.handlers)
            about = re.search(r"ImportError|ModuleNotFoundError|AttributeError|TypeError", caught) is not None
            self._caught[node] = about or (bool(node.handlers) and len(node.body) <= 2), set(node.body)
        about_torch, body = self._caught[node]
        return about_torch and inner in body

    def _is_decorator(self, node: ast.expr) -> bool:
        return node in getattr(self.parent(node), "decorator_list", ())

    def _is_annotation(self, node: ast.expr) -> bool:
        for outer, inner in self._outer_nodes(node):
            if inner in (getattr(outer, "annotation", None), getattr(outer, "returns", None)):
                return True
            if not isinstance(outer, ast.Subscript | ast.BinOp | ast.Tuple):
                return False
        return False

    def _is_instance_test(self, node: ast.expr) -> bool:
        outer: ast.AST | None = self.parent(node)
        if isinstance(outer, ast.Tuple):
            outer = self.parent(outer)
        return isinstance(outer, ast.Call) and isinstance(outer.func, ast.Name) and outer.func.id == "isinstance"

    def _names(self, name: str) -> Iterator[ast.Name]:
        return iter(self._names_by_text.get(name, []))

    @functools.cached_property
    def _names_by_text(self) -> dict[str, list[ast.Name]]:
        found: dict[str, list[ast.Name]] = {}
        for node in self.code.nodes(ast.Name):
            found.setdefault(node.id, []).append(node)
        return found

    def _is_bound_only_by(
        self, name: str, statements: list[ast.ImportFrom] | list[ast.Import | ast.ImportFrom]
    ) -> bool:
        """Whether only these imports bind ``name`` in the file."""
        return self._binders.get(name, set()) | self._binders.get("*", set()) <= set(statements)

    @functools.cached_property
    def _binders(self) -> dict[str, set[ast.AST]]:
        """Nodes that bind names, by name; "*" for star imports, whose names are unknown."""
        found: dict[str, set[ast.AST]] = {}
        for node in self.code.tree_nodes:
            if isinstance(node, ast.Name):
                names = [] if isinstance(node.ctx, ast.Load) else [node.id]
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names = [node.name]
            else:
                names = [node.arg] if isinstance(node, ast.arg) else []
            for name in names:
                found.setdefault(name, set()).add(node)
        return found

    @staticmethod
    def _require(condition: bool) -> None:
        if not condition:
            raise _NotSure


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
