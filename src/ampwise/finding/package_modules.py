"""List the modules of a package by reading its folder."""

from __future__ import annotations

import os
from collections.abc import Iterable


def module_names(folders: Iterable[str]) -> list[str]:
    """Return the names of the public modules and packages in a package's ``__path__``.

    Like ``pkgutil.iter_modules``, which imports ``inspect`` and would slow down every start of the command line.
    """
    found: set[str] = set()
    for folder in folders:
        try:
            files = os.listdir(folder)  # noqa: PTH208 (pathlib is slow to import)
        except OSError:  # a zip file that Python imports from
            files = []
        names = {file.removesuffix(".py") for file in files if file.endswith(".py") or "." not in file}
        if all(name.startswith("_") for name in names):  # in a zip, or without source files
            import pkgutil

            names = {module.name for module in pkgutil.iter_modules([folder])}
        found |= names
    return sorted(name for name in found if not name.startswith("_"))
