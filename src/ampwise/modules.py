"""The modules of a package, by looking into its folder."""

from __future__ import annotations

import os
from collections.abc import Iterable

__all__ = ["module_names"]


def module_names(folders: Iterable[str]) -> list[str]:
    """The modules in a package's ``__path__`` that are not private, by name.

    As ``pkgutil.iter_modules``, which imports ``inspect`` and so costs every start of the command line its time.
    """
    found: set[str] = set()
    for folder in folders:
        try:
            files = os.listdir(folder)  # noqa: PTH208 (pathlib takes longer to import than all of this)
        except OSError:  # a zip, which Python can import from
            import pkgutil

            found.update(module.name for module in pkgutil.iter_modules([folder]))
        else:
            found.update(file.removesuffix(".py") for file in files if file.endswith(".py"))
    return sorted(name for name in found if not name.startswith("_"))
