"""The forms that have a version: what is written to disk, and what `--json` prints. Their top-level keys."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from tools.api.source import Module, Source

__all__ = ["form_lines"]

CONSTANT = "VERSION"


def form_lines(source: Source, schemas: Path) -> Iterator[str]:
    """A line a form: each table of the source that has a "version" which is a VERSION, and each JSON schema."""
    for module in source.modules(CONSTANT):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Dict) and _is_form(node):
                yield f"{module.name}, version {_number(source, module)}: {', '.join(_keys(node))}"
    for file in sorted(schemas.glob("*.json")):
        schema = json.loads(file.read_text(encoding="utf-8"))
        objects = [form.get("items", form) for form in schema.get("anyOf", [schema])]
        keys = dict.fromkeys(
            key for each in objects for form in each.get("anyOf", [each]) for key in form.get("properties", ())
        )
        yield f"ampwise schema {file.stem}, version {schema['$id'].rpartition(':')[2]}: {', '.join(keys)}"


def _is_form(node: ast.Dict) -> bool:
    pairs = zip(node.keys, node.values, strict=True)
    return any(_text(key) == "version" and isinstance(value, ast.Name) and value.id == CONSTANT for key, value in pairs)


def _keys(node: ast.Dict) -> list[str]:
    return [_text(key) or "..." for key in node.keys]


def _text(key: ast.expr | None) -> str | None:
    return str(key.value) if isinstance(key, ast.Constant) else None


def _number(source: Source, module: Module) -> str:
    definition = source.find(module.name, CONSTANT)
    return ast.unparse(definition.node).partition(" = ")[2]
