"""Check whether a sink's target can be written, without creating anything."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["why_file_not_writable", "why_folder_not_writable"]


def why_file_not_writable(path: Path) -> str | None:
    """Return why a file cannot be written, or None if it can."""
    if path.is_dir():
        return f"{path} is a folder, expected a file"
    if path.exists():
        return None if os.access(path, os.W_OK) else f"{path} is not writable"
    return why_folder_not_writable(path.parent)


def why_folder_not_writable(path: Path) -> str | None:
    """Return why a folder, and files in it, cannot be created, or None if they can."""
    existing = next(each for each in (path, *path.parents) if each.exists())
    if not existing.is_dir():
        return f"{existing} is a file, expected a folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} is not writable"
