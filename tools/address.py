"""The repository's address and the newest release's tag, in the files that others copy them from.

Both are set in pyproject.toml: ``version``, and ``Source`` of ``[project.urls]``. `make docs` writes them wherever they
are shown.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tools.markdown import Pages

__all__ = ["address_pages"]

SHOWN_IN = ("action.yml", ".pre-commit-hooks.yaml", "CITATION.cff", "docs/ci.md", "docs/releasing.md", "pyproject.toml")
NAME = r"[\w.-]+/ampwise"


def address_pages(root: Path) -> Pages:
    """Return the files that show the address or the tag, with those of pyproject.toml.

    A development version has no tag: the one shown stays.
    """
    if not (root / "pyproject.toml").is_file():
        return {}
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source, version = project["urls"]["Source"], project["version"]
    name = source.removeprefix("https://github.com/")
    changes = [(rf"https://github\.com/{NAME}(?=[\s\"/`])", source), (rf"(?<=uses: ){NAME}(?=@)", name)]
    if "dev" not in version:
        changes += [
            (rf"(?<=uses: )({NAME})@[\w.]+", rf"\1@v{version}"),
            (r"(?<=rev: )v[\w.]+", f"v{version}"),
            (r"(?m)(?<=^version: ).+$", version),
        ]
    pages = {}
    for path in SHOWN_IN:
        text = (root / path).read_text(encoding="utf-8")
        for pattern, new in changes if path != "pyproject.toml" else changes[:1]:
            text = re.sub(pattern, new, text)
        pages[path] = text
    return pages
