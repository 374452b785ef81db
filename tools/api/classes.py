"""Functions and classes in lines: signatures, fields, members, methods, properties."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.api.source import Definition, Function, Source, is_public, properties

__all__ = ["described"]

ENUMS = {"Enum", "IntEnum", "StrEnum"}
# What every object has, and ways of Python's that nobody asks for by name.
INNER = {
    *dir(object),
    *("__post_init__", "__copy__", "__deepcopy__", "__del__", "__getattr__", "__setstate__", "__getnewargs__"),
}


def described(source: Source, definition: Definition, path: str, *, constructed: bool = True) -> Iterator[str]:
    """The lines of a name; ``constructed`` is false for what users get and do not make."""
    node = definition.node
    if isinstance(node, ast.ClassDef):
        yield from _class(source, definition, path, constructed)
    elif isinstance(node, Function):
        yield f"{path}{_signature(node)}"
    else:
        yield f"{path} = {ast.unparse(node).partition(' = ')[2]}"


def _class(source: Source, definition: Definition, path: str, constructed: bool) -> Iterator[str]:
    family = [definition, *source.bases(definition)]
    bodies = [node for each in family for node in getattr(each.node, "body", [])]
    bases = ", ".join(ast.unparse(base) for base in getattr(definition.node, "bases", []))
    yield f"class {path}({bases})"
    parts: dict[str, str] = {}
    for node in bodies:  # near ones first: what they define hides what they inherit
        for name, line in _parts(node, is_enum=bases in ENUMS):
            parts.setdefault(name, line)
    if not constructed:
        parts.pop("__init__", None)
    yield from (f"    {parts[name]}" for name in sorted(parts))


def _parts(node: ast.stmt, *, is_enum: bool) -> Iterator[tuple[str, str]]:
    if isinstance(node, Function):
        yield from _method(node)
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_public(node.target.id):
        if not ast.unparse(node.annotation).startswith("ClassVar"):
            default = (
                "" if node.value is None else " = ..." if _is_made(node.value) else f" = {ast.unparse(node.value)}"
            )
            yield node.target.id, f"{node.target.id}: {ast.unparse(node.annotation)}{default}"
    elif isinstance(node, ast.Assign) and is_enum:
        for target in node.targets:
            yield ast.unparse(target), f"{ast.unparse(target)} = {ast.unparse(node.value)}"


def _method(node: Function) -> Iterator[tuple[str, str]]:
    if node.name == "__init__":
        yield "__init__", f"__init__{_signature(node, method=True)}"
        yield from _attributes(node)
    elif is_public(node.name) or (node.name.endswith("__") and node.name not in INNER):
        kinds = properties(node)
        if "setter" in kinds:
            yield f"{node.name} =", f"{node.name} may be set"
        elif kinds & {"property", "cached_property"}:
            yield node.name, f"{node.name} -> {_text(node.returns)}"
        else:
            kind = "".join(f"{each} " for each in ("classmethod", "staticmethod") if each in kinds)
            yield node.name, f"{kind}{node.name}{_signature(node, method='staticmethod' not in kinds)}"


def _attributes(init: Function) -> Iterator[tuple[str, str]]:
    """Public attributes that the constructor sets."""
    for node in ast.walk(init):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names = [leaf for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Attribute)]
        for leaf in names:
            if isinstance(leaf.value, ast.Name) and leaf.value.id == "self" and is_public(leaf.attr):
                yield leaf.attr, leaf.attr


def _signature(node: Function, *, method: bool = False) -> str:
    """As it is written, without the argument that Python gives by itself."""
    arguments = node.args
    if method:
        first = arguments.posonlyargs or arguments.args
        arguments = ast.arguments(
            **{field: getattr(arguments, field) for field in arguments._fields}
            | {"posonlyargs" if arguments.posonlyargs else "args": first[1:]}
        )
    result = "" if node.returns is None or node.name == "__init__" else f" -> {_text(node.returns)}"
    return f"({ast.unparse(arguments)}){result}"


def _text(annotation: ast.expr | None) -> str:
    return "?" if annotation is None else ast.unparse(annotation)


def _is_made(value: ast.expr) -> bool:
    """Whether a field's default is made anew for each record: what makes it is nobody's business."""
    return isinstance(value, ast.Call)
