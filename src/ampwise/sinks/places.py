"""Whether files can be made where a sink is to make them; nothing is made."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["why_no_file", "why_no_folder"]


def why_no_file(path: Path) -> str | None:
    """What is in the way of writing it, or None."""
    if path.is_dir():
        return f"{path} is a folder, and a file is expected"
    if path.exists():
        return None if os.access(path, os.W_OK) else f"{path} may not be written"
    return why_no_folder(path.parent)


def why_no_folder(path: Path) -> str | None:
    """What is in the way of making it, and files in it, or None."""
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir():
        return f"{there} is a file, and a folder is expected"
    return None if os.access(there, os.W_OK | os.X_OK) else f"nothing may be written in {there}"
