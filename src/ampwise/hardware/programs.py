"""Find other programs by their full path, ignoring empty and relative parts of PATH, which mean the current folder.

Such parts are common by accident (``PATH=$PATH:`` ends in one), and an untrusted current folder could contain a program
of the same name.
"""

from __future__ import annotations

import os
from pathlib import Path


def absolute_parts(path: str, *, outside: str | None = None) -> str:
    """Return a search path such as PATH without empty and relative parts, and without those in the folder ``outside``.

    >>> absolute_parts("/usr/bin::bin:.:/home/me/bin", outside="/home/me")
    '/usr/bin'
    """
    kept = [each for each in path.split(os.pathsep) if os.path.isabs(each)]  # noqa: PTH117
    if outside is not None:
        top = os.path.realpath(outside)
        kept = [each for each in kept if not Path(os.path.realpath(each)).is_relative_to(top)]
    return os.pathsep.join(kept)


def find_program(name: str) -> str | None:
    """Return the full path of a program; None if no absolute part of PATH has it. A path is returned as it is."""
    import shutil  # slow to import, and rarely needed

    return shutil.which(name, path=absolute_parts(os.environ.get("PATH", os.defpath)))


def open_in_browser(address: str) -> bool:
    """Open a page in the user's browser; False if there is none. The address appears on the browser's command line."""
    import webbrowser

    os.environ["PATH"] = absolute_parts(os.environ.get("PATH", os.defpath))  # where webbrowser looks for one
    return webbrowser.open(address)
