"""The values that a file gives its options by default: in ``add_argument``, fields, constants and parameters."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import dotted_text, method_called
from ampwise.check.source.precision import argument_of
from ampwise.check.source.project import SourceFile

LAST_WORD = LazyPattern(r"(\w+)\W*$")
Pair = tuple[str, ast.expr | None]


@functools.lru_cache(maxsize=2)
def defaults_of(code: SourceFile) -> dict[str, set[str | bool]]:
    """Return the strings and flags that options, fields, constants and parameters have by default, by name."""
    pairs: list[Pair] = []
    for target, value in code.assignments:
        pairs.append(((dotted_text(target) or "").rpartition(".")[2], value))
    for function in code.outline.functions:
        pairs += function.defaults.items()
    for call in code.nodes(ast.Call):
        pairs += [(word.arg, word.value) for word in call.keywords if word.arg]
        method, first = method_called(call), call.args[0] if call.args else None
        if method in ("get", "pop", "setdefault") and len(call.args) == 2 and isinstance(first, ast.Constant):
            pairs.append((str(first.value), call.args[1]))
    return _literals([*pairs, *_arguments_added(code)])


@functools.lru_cache(maxsize=2)
def option_defaults(code: SourceFile) -> dict[str, set[str | bool]]:
    """Return the defaults of the script's own options alone: of ``add_argument``, and of the fields of classes."""
    fields: list[Pair] = []
    for owner in code.outline.classes.values():
        for name, bindings in owner.attributes.items():
            fields += [(name, binding.value) for binding in bindings if binding.function.owner is None]
    return _literals([*fields, *_arguments_added(code)])


def last_word(option: str) -> str:
    """Return ``dtype`` for the option ``args.dtype`` or ``config["dtype"]``."""
    found = LAST_WORD.search(option)
    return found[1] if found is not None else ""


def _arguments_added(code: SourceFile) -> Iterator[Pair]:
    for call in code.nodes(ast.Call):
        if method_called(call) in ("add_argument", "option") and call.args:
            options = [str(part.value) for part in call.args if isinstance(part, ast.Constant)]
            option = next((text for text in options if text.startswith("--")), "")
            yield option.lstrip("-").replace("-", "_"), argument_of(call, "default")


def _literals(pairs: list[Pair]) -> dict[str, set[str | bool]]:
    found: dict[str, set[str | bool]] = {}
    for name, value in pairs:
        if name and isinstance(value, ast.Constant) and isinstance(value.value, str | bool):
            found.setdefault(name, set()).add(value.value)
    return found
