"""Deprecated names of ``torch.cuda.amp`` and ``torch.cpu.amp`` that moved to ``torch.amp``, and how to rewrite them.

A rewritten call must work, so an import is rewritten together with all uses of its names. If one of them cannot be
rewritten safely, none is.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.project import SourceFile
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Edit

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
# A test for a torch that has the new names: `hasattr(torch.amp, "GradScaler")`, `version >= (2, 4)`, `"2.4.0"`.
ABOUT_NEW_NAMES = LazyPattern(r"torch\.amp|hasattr\(torch, '(amp|autocast|GradScaler)'|\b2[.,_ ]+\d")
NEW_NAMES = ("torch.autocast", "torch.GradScaler")
MOST_SHARED = 100  # above this many edits, only one finding carries the edits that many share
OPENING = LazyPattern(r"\s*\(")


class _NotSure(Exception):
    """A use that cannot be rewritten safely."""


def _require(condition: bool) -> None:
    if not condition:
        raise _NotSure


class DeprecatedUse(NamedTuple):
    """Use of a deprecated name, and the edits that replace it; without edits it needs a manual change."""

    node: ast.ImportFrom | ast.Attribute
    name: str  # the deprecated module for an import or an alias of it, else the class or function
    edits: tuple[Edit, ...]


def deprecated_uses(code: SourceFile) -> list[DeprecatedUse]:
    """Return the imports of deprecated names, and their uses with a module name, such as ``amp.autocast()``.

    Those for a torch that does not have the new names, beside code that uses them, are not among them.
    """
    found = _Deprecated(code)
    uses = [*found.imported(), *found.dotted(), *found.assigned_modules()]
    uses = [use for use in uses if not found.is_fallback(use.node)]
    return sorted(uses, key=lambda use: (use.node.lineno, use.node.col_offset))


class _Deprecated:
    def __init__(self, code: SourceFile) -> None:
        self.code = code
        self.script = code.script
        self.imports = code.outline.imports
        self._found: dict[str, list[Edit] | None] = {}
        self._has_shared = False
        self._decided: dict[ast.AST, float] = {}
        self._caught: dict[ast.Try, tuple[bool, set[ast.AST]]] = {}

    # -- from torch.cuda.amp import autocast ---------------------------------------------------------------

    def imported(self) -> Iterator[DeprecatedUse]:
        statements = self._import_statements
        if not statements:
            return
        names = {alias.name for node in statements for alias in node.names}
        edits = self._sure_edits(self._edits_of_imports, "GradScaler" in names)
        for node in statements:
            yield DeprecatedUse(node, f"{node.module}", edits)
            edits = edits if len(edits) <= MOST_SHARED else ()

    @functools.cached_property
    def _import_statements(self) -> list[ast.ImportFrom]:
        nodes = [node for node in self.code.nodes(ast.ImportFrom) if node.module in MODULES and not node.level]
        return [node for node in nodes if any(alias.name in (*MOVED, "*") for alias in node.names)]

    def _edits_of_imports(self) -> list[Edit]:
        return self._once("imports", self._find_edits_of_imports)

    def _find_edits_of_imports(self) -> list[Edit]:
        """Return the edits for all imports of deprecated names and all uses of the imported names."""
        names: dict[str, tuple[str, str]] = {}
        edits = []
        for node in self._import_statements:
            _require(not self._is_for_old_versions(node))
            for alias in node.names:
                _require(alias.name in MOVED)
                what = (MODULES[node.module or ""], alias.name)
                _require(names.setdefault(alias.asname or alias.name, what) == what)
            # `from torch.cuda.amp import` becomes `from torch.amp import`; the imported names stay.
            found = re.match(rf"from\s+{re.escape(node.module or '')}(?=\s+import\b)", self.script.segment(node))
            if found is None:
                raise _NotSure
            line, column = self.script.span(node)[0]
            edits.append(self.script.edit(line, column, line, column + found.end(), "from torch.amp"))
        _require(not self._is_imported_elsewhere(set(names)))
        for name, (device, moved) in names.items():
            _require(self._is_bound_only_by(name, self._import_statements))
            for use in self._names_by_text.get(name, ()):
                edits += self._rewritten(use, device, moved, written=name)
        return edits

    def _is_imported_elsewhere(self, names: set[str]) -> bool:
        """Whether other files may import these names from this one and use them in the old way."""
        if self.code.path.endswith("__init__.py") or "__all__" in self.script.text:
            return True
        taken = set().union(*self.code.project.importers(self.code.path).values())
        return bool(taken & names)

    # -- torch.cuda.amp.autocast(), amp.autocast() ------------------------------------------------------------

    def dotted(self) -> Iterator[DeprecatedUse]:
        for node in self._dotted_uses:
            device, name = DEPRECATED[self._full_name(node)]
            edits = self._sure_edits(functools.partial(self._edits_of_use, node), name == "GradScaler")
            yield DeprecatedUse(node, f"torch.{device}.amp.{name}", edits)

    @functools.cached_property
    def _dotted_uses(self) -> list[ast.Attribute]:
        nodes = [node for node in self.code.nodes(ast.Attribute) if node.attr in MOVED]
        return [node for node in nodes if self._full_name(node) in DEPRECATED]

    def assigned_modules(self) -> Iterator[DeprecatedUse]:
        """Yield ``amp = torch.cuda.amp``, through which the deprecated names are used."""
        for node in self.code.nodes(ast.Attribute):
            if node.attr == "amp" and self._full_name(node) in ("torch.cuda.amp", "torch.cpu.amp"):
                parent = self.script.parents.get(node)
                if isinstance(parent, ast.Assign | ast.AnnAssign | ast.IfExp):
                    yield DeprecatedUse(node, self._full_name(node), ())

    def _full_name(self, node: ast.expr) -> str:
        return self.imports.qualified(node) or ""

    def _edits_of_use(self, node: ast.expr) -> list[Edit]:
        """Return the edits for one use, in whatever form it is written."""
        if isinstance(node, ast.Name):
            return self._edits_of_imports()
        inner = node
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        root = inner.id if isinstance(inner, ast.Name) else ""
        if self.imports.names.get(root) != "torch":
            return self._once(f"alias {root}", functools.partial(self._edits_of_module_alias, root))
        device, name = DEPRECATED[self._full_name(node)]
        return self._rewritten(node, device, name, written=f"{root}.amp.{name}")

    def _sure_edits(self, edits_of: Callable[[], list[Edit]], of_scaler: bool) -> tuple[Edit, ...]:
        """Return all edits, or none if one is not safe; a scaler's include those of ``isinstance`` tests."""
        try:
            edits = edits_of()
            tests = self._once("tests", self._edits_of_tests) if of_scaler else []
        except _NotSure:
            return ()
        if len(edits) + len(tests) > MOST_SHARED:  # they fix all uses at once: one finding carries them
            if self._has_shared:
                return ()
            self._has_shared = True
        return tuple(dict.fromkeys([*edits, *tests]))

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

    def _edits_of_tests(self) -> list[Edit]:
        """Return edits of ``isinstance(scaler, torch.cuda.amp.GradScaler)``, which is False for torch.amp's scaler."""
        found: dict[Edit, None] = {}
        given: dict[int, list[Edit]] = {}  # all uses of an import share its edits
        for node in (*self.code.nodes(ast.Name), *self.code.nodes(ast.Attribute)):
            if DEPRECATED.get(self._full_name(node), ("", ""))[1] == "GradScaler":
                parent = self.script.parents.get(node)
                if not (isinstance(parent, ast.Call) and parent.func is node) and not self._is_annotation(node):
                    edits = self._edits_of_use(node)
                    if id(edits) not in given:
                        given[id(edits)] = edits
                        found.update(dict.fromkeys(edits))
        return list(found)

    def _edits_of_module_alias(self, alias: str) -> list[Edit]:
        """Rewrite ``from torch.cuda import amp`` to ``from torch import amp``, with every use of ``amp``."""
        imports: list[ast.Import | ast.ImportFrom] = [*self.code.nodes(ast.Import), *self.code.nodes(ast.ImportFrom)]
        statements = [node for node in imports if any((name.asname or name.name) == alias for name in node.names)]
        _require(len(statements) == 1 and len(statements[0].names) == 1)
        statement = statements[0]
        _require(not self._is_for_old_versions(statement) and not self._is_imported_elsewhere({alias}))
        _require(self._is_bound_only_by(alias, [statement]))
        new = f"import torch.amp as {alias}"
        if isinstance(statement, ast.ImportFrom):
            _require(statement.module in ("torch.cuda", "torch.cpu") and statement.names[0].name == "amp")
            new = "from torch import amp" + ("" if alias == "amp" else f" as {alias}")
        edits = [self.script.replace(statement, new)]
        dotted_uses = set(self._dotted_uses)
        for name in self._names_by_text.get(alias, ()):
            use = self.script.parents.get(name)
            if not isinstance(use, ast.Attribute) or use not in dotted_uses:
                raise _NotSure
            device, what = DEPRECATED[self._full_name(use)]
            _require(self._full_name(use).count(".") == 3)  # not through amp.autocast_mode
            edits += self._rewritten(use, device, what, written=f"{alias}.{what}")
        return edits

    # -- one use ----------------------------------------------------------------------------------------------

    def _rewritten(self, node: ast.expr, device: str, name: str, *, written: str) -> list[Edit]:
        """Return the edits that replace one use of ``name`` by ``written``."""
        _require(not self._is_for_old_versions(node))
        parent = self.script.parents.get(node)
        if isinstance(parent, ast.Call) and parent.func is node:
            return self._rewritten_call(parent, device, name, written)
        if node in getattr(parent, "decorator_list", ()) and name.startswith("custom_"):
            return [self.script.replace(node, f'{written}(device_type="{device}")')]
        # As a type it covers the old class, too, which is derived from it.
        outer = self.script.parents.get(parent) if isinstance(parent, ast.Tuple) else parent
        is_test = isinstance(outer, ast.Call) and isinstance(outer.func, ast.Name) and outer.func.id == "isinstance"
        _require(name in ("GradScaler", "autocast") and (self._is_annotation(node) or is_test))
        return [] if self.script.segment(node) == written else [self.script.replace(node, written)]

    def _rewritten_call(self, call: ast.Call, device: str, name: str, written: str) -> list[Edit]:
        start, function_end = self.script.span(call.func)
        line, column = function_end
        opening = OPENING.compiled.match(self.script.text, self.script.offset(*function_end))
        if opening is None or start[0] != line or "\n" in opening[0]:
            raise _NotSure
        _require(not any(isinstance(argument, ast.Starred) for argument in call.args))
        given = f'"{device}"' if name in ("autocast", "GradScaler") else f'device_type="{device}"'
        arguments = [*call.args, *call.keywords]
        if arguments:  # before the first of them, on its line
            first_line, first_column = min([self.script.span(argument)[0] for argument in arguments])
            indentation = self.script.lines[first_line - 1][: first_column - 1]
            _require(first_line == line or not indentation.strip())
            given = f"{given}, " if first_line == line else f"\n{indentation}{given},"
        after_bracket = (line, column + len(opening[0]))
        edits = [self.script.edit(*start, *after_bracket, f"{written}({given}")]
        if name == "autocast":
            edits += self._named_positions(call, after_bracket)
        else:
            _require(name == "GradScaler" or not call.args)
        return edits

    def _named_positions(self, call: ast.Call, after_bracket: tuple[int, int]) -> Iterator[Edit]:
        """Rewrite ``autocast(True, torch.half)`` to ``autocast(enabled=True, dtype=torch.half)``."""
        _require(len(call.args) <= len(POSITIONS))
        reached, expected = after_bracket, ""
        for word, argument in zip(POSITIONS, call.args, strict=False):
            start, end = self.script.span(argument)
            between = self.script.text[self.script.offset(*reached) : self.script.offset(*start)]
            # Brackets around an argument are not part of its node, so its text would be incomplete.
            _require(re.sub(r"#[^\n]*", "", between).strip() == expected)
            yield self.script.replace(argument, f"{word}={self.script.segment(argument)}")
            reached, expected = end, ","

    # -- the context of a use -----------------------------------------------------------------------------------

    def _outer_nodes(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield each node that contains ``node``, with its child on the way."""
        while node in self.script.parents:
            yield self.script.parents[node], node
            node = self.script.parents[node]

    def is_fallback(self, node: ast.AST) -> bool:
        """Whether a use is only for a torch without the new names, which other code beside it uses."""
        for outer, inner in self._outer_nodes(node):
            if isinstance(outer, ast.ExceptHandler):
                tried = self.script.parents[outer]
                if isinstance(tried, ast.Try) and self._uses_new_names(tried.body):
                    return True
            if isinstance(outer, ast.If | ast.IfExp) and inner is not outer.test:
                then = [outer.body] if isinstance(outer, ast.IfExp) else outer.body
                orelse = [outer.orelse] if isinstance(outer, ast.IfExp) else outer.orelse
                if self._asks_for_new_names(outer.test, orelse if inner in then else then):
                    return True
            if self._decided_at(outer) < getattr(inner, "lineno", 0):
                return True
        return False

    def _decided_at(self, outer: ast.AST) -> float:
        """Return the first line of a block at which a torch with the new names leaves it; infinite if there is none.

        So it is with ``if hasattr(torch, "autocast"): return torch.autocast("cuda")``.
        """
        if outer not in self._decided:
            body = getattr(outer, "body", ())
            tests = [each for each in body if isinstance(each, ast.If)] if isinstance(body, list) else []
            ends = [each for each in tests if isinstance(each.body[-1], ast.Return)]
            lines = [each.end_lineno or each.lineno for each in ends if self._asks_for_new_names(each.test, each.body)]
            self._decided[outer] = min(lines, default=math.inf)
        return self._decided[outer]

    def _asks_for_new_names(self, test: ast.expr, other_branch: Sequence[ast.AST]) -> bool:
        """Whether a test decides between the new names, in the other branch, and the deprecated ones."""
        text = ast.unparse(test)
        if not ABOUT_VERSIONS.search(text):
            return False
        return ABOUT_NEW_NAMES.search(text) is not None or self._uses_new_names(other_branch)

    def _uses_new_names(self, nodes: Sequence[ast.AST]) -> bool:
        for part in (part for node in nodes for part in walk(node)):
            if isinstance(part, ast.ImportFrom):
                names = [f"{part.module}.{alias.name}" for alias in part.names]
            else:
                names = [self._full_name(part)] if isinstance(part, ast.Attribute | ast.Name) else []
            if any(name in NEW_NAMES or f"{name}.".startswith("torch.amp.") for name in names):
                return True
        return False

    def _is_for_old_versions(self, node: ast.AST) -> bool:
        for outer, inner in self._outer_nodes(node):
            if isinstance(outer, ast.ExceptHandler):
                return True
            if isinstance(outer, ast.Try) and self._tries_imports(outer, inner):
                return True
            test = outer.test if isinstance(outer, ast.If | ast.IfExp) else None
            if test is not None and test is not inner and ABOUT_VERSIONS.search(ast.unparse(test)):
                return True
        return False

    def _tries_imports(self, node: ast.Try, inner: ast.AST) -> bool:
        """Whether a ``try`` tests what torch offers, and does not wrap a whole training run."""
        if node not in self._caught:
            caught = " ".join([ast.unparse(handler.type) if handler.type else "" for handler in node.handlers])
            about = re.search(r"ImportError|ModuleNotFoundError|AttributeError|TypeError", caught) is not None
            self._caught[node] = about or (bool(node.handlers) and len(node.body) <= 2), set(node.body)
        about_torch, body = self._caught[node]
        return about_torch and inner in body

    def _is_annotation(self, node: ast.expr) -> bool:
        for outer, inner in self._outer_nodes(node):
            if inner in (getattr(outer, "annotation", None), getattr(outer, "returns", None)):
                return True
            if not isinstance(outer, ast.Subscript | ast.BinOp | ast.Tuple):
                return False
        return False

    @functools.cached_property
    def _names_by_text(self) -> dict[str, list[ast.Name]]:
        found: dict[str, list[ast.Name]] = {}
        for node in self.code.nodes(ast.Name):
            found.setdefault(node.id, []).append(node)
        return found

    def _is_bound_only_by(self, name: str, statements: Sequence[ast.Import | ast.ImportFrom]) -> bool:
        """Whether only these imports bind ``name`` in the file."""
        return self._binders.get(name, set()) | self._binders.get("*", set()) <= set(statements)

    @functools.cached_property
    def _binders(self) -> dict[str, set[ast.AST]]:
        """Nodes that bind names, by name; "*" for star imports, whose names are unknown."""
        found: dict[str, set[ast.AST]] = {}
        for node in self.code.tree_nodes:
            names: list[str] = []
            if isinstance(node, ast.Name):
                names = [] if isinstance(node.ctx, ast.Load) else [node.id]
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.arg):
                names = [node.arg]
            for name in names:
                found.setdefault(name, set()).add(node)
        return found
