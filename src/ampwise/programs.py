"""Other programs, found by their full path: an empty or relative part of PATH would mean the current folder.

Such parts are common by accident (``PATH=$PATH:`` ends in one), and whoever made the current folder could put a program
there that has the name of ours.
"""

from __future__ import annotations

import os

__all__ = ["absolute_parts", "find_program", "open_in_browser"]


def absolute_parts(path: str, *, outside: str | None = None) -> str:
    """A search path such as PATH without its empty and relative parts, and without those in the folder ``outside``.

    >>> absolute_parts("/usr/bin::bin:.:/home/me/bin", outside="/home/me")
    '/usr/bin'
    """
    kept = [each for each in path.split(os.pathsep) if os.path.isabs(each)]  # noqa: PTH117
    if outside is not None:
        top = os.path.realpath(outside)
        kept = [each for each in kept if not _is_in(os.path.realpath(each), top)]
    return os.pathsep.join(kept)


def find_program(name: str) -> str | None:
    """The full path of a program; None when no absolute part of PATH has it. A path is taken as it is."""
    import shutil  # slow to import, and seldom needed

    return shutil.which(name, path=absolute_parts(os.environ.get("PATH", os.defpath)))


def open_in_browser(address: str) -> bool:
    """Show a page in the user's browser; False when there is none. The address is on its command line."""
    import webbrowser

    os.environ["PATH"] = absolute_parts(os.environ.get("PATH", os.defpath))  # where webbrowser looks for one
    return webbrowser.open(address)


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(os.path.join(folder, ""))  # noqa: PTH118
