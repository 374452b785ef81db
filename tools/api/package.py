"""What pyproject.toml promises: the Pythons, the extras, the command; and what plugins of others are called."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tools.api.source import Source

__all__ = ["package_lines"]

OURS_ALONE = {"dev", "docs"}  # extras for who works on ampwise


GROUP = "GROUP"  # the constant that names a group of entry points


def package_lines(path: Path, source: Source) -> Iterator[str]:
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    yield f"requires-python {project['requires-python']}"
    yield from (f"dependency {each}" for each in sorted(project["dependencies"]))
    yield from (f"command {name} = {where}" for name, where in sorted(project["scripts"].items()))
    for name, asked in sorted(project["optional-dependencies"].items()):
        if name not in OURS_ALONE:
            yield f"extra {name}: {', '.join(asked)}"
    for module in source.modules(GROUP):
        name = ast.unparse(module.defined[GROUP]).partition(" = ")[2] if GROUP in module.defined else ""
        if name.startswith("'ampwise."):  # a command's GROUP is its heading in the help
            yield f"entry points {name}"
