"""Which files a script imports: named in its text, and found on disk beside it or below the current folder."""
# ruff: noqa: PTH113, PTH118, PTH120 (pathlib takes longer to import than a check)

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.relevance import WORTH_READING, has_any
from ampwise.check.source.script import UnreadableFile, read_bytes

IMPORTED = LazyPattern(
    r"^[ \t]*from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]+)|^[ \t]*import[ \t]+([\w., ]+)", re.M
)
PACKAGE = "__init__.py"
DEEPEST = 3  # imports of imported files
MOST_FOUND = 100  # files


def imports_in(text: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each module that a text imports from, and the names that it takes ("*": the module itself).

    >>> sorted((module, *sorted(names)) for module, names in imports_in("from lab import train, save as keep"))
    [('lab', 'save', 'train'), ('lab.save', '*'), ('lab.train', '*')]
    """
    for module, names, plain in IMPORTED.findall(text):
        if module:
            taken = {part.split()[0] for part in names.strip("()").replace("\\", " ").split(",") if part.split()}
            yield module, taken
            for name in taken:  # from package import module
                yield f"{module}.{name}", {"*"}
        else:
            for part in plain.split(","):
                if part.split():
                    yield part.split()[0], {"*"}


def files_imported(paths: Iterable[str], texts: Mapping[str, str] | None = None) -> list[str]:
    """Return the files that Python files import, directly or not, without those files themselves.

    A module is looked for where Python may: beside the file, above it up to the current folder or out of its package,
    or where a relative import says. What has no part in training is left out, with what only it imports. ``texts`` has
    what is to be read instead of a file.
    """
    texts = texts or {}
    found: dict[str, None] = {}
    pending = [(os.path.normpath(path), 0) for path in paths]
    given = {path for path, _ in pending}
    for path, depth in pending:
        text = texts[path] if path in texts else _text(path)
        if depth and not (has_any(text, WORTH_READING) or path.endswith(PACKAGE)):
            continue
        if depth:
            found[path] = None
        modules = dict.fromkeys(module for module, _ in imports_in(text)) if depth < DEEPEST else ()
        folder = os.path.dirname(path)
        roots = _roots(folder) if modules else []
        for module in modules:
            other = _file_of(module, folder, roots)
            if other is not None and other not in given and len(given) < MOST_FOUND:
                given.add(other)
                pending.append((other, depth + 1))
    return list(found)


def _text(path: str) -> str:
    try:
        return read_bytes(path).decode("utf-8", "replace") if path.endswith(".py") else ""
    except UnreadableFile:
        return ""


def _file_of(module: str, folder: str, roots: list[str]) -> str | None:
    """Return the file of a module that a file in ``folder`` imports."""
    name = module.lstrip(".")
    level = len(module) - len(name)
    parts = name.split(".") if name else []
    for root in [os.path.join(folder, *[os.pardir] * (level - 1))] if level else roots:
        stem = os.path.normpath(os.path.join(root, *parts))
        inside = os.path.join(os.path.realpath(root), "")  # a link out of it is not followed
        for path in ([f"{stem}.py"] if parts else []) + [os.path.join(stem, PACKAGE)]:
            if os.path.isfile(path) and os.path.realpath(path).startswith(inside):
                return path
    return None


def _roots(folder: str) -> list[str]:
    """Return the folders in which a file of ``folder`` may find a module, the nearest first."""
    here = os.path.realpath("")
    found = [folder]
    while True:
        below, above, real = found[-1], os.path.dirname(found[-1]), os.path.realpath(found[-1])
        is_within = real != here and real.startswith(os.path.join(here, ""))
        if above == below or not (is_within or os.path.isfile(os.path.join(below, PACKAGE))):
            return found
        found.append(above)
