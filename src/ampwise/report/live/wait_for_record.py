"""Find a record, and wait for one that does not exist yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ampwise.errors import BadInput, nearest
from ampwise.runs.files import TEMPORARY_SUFFIX
from ampwise.runs.find import newest_record, records_in
from ampwise.runs.layout import MANIFEST, is_rank_folder

__all__ = ["find_record", "wait_for_record"]

PATIENCE_S = 600.0  # a run may start later than this, but a typing mistake should not go unnoticed for longer
PAUSE_S = 0.5


def find_record(path: Path) -> Path | None:
    """Return the record at ``path``, or the newest one in that folder; None if one may still be created.

    If the path is something else, it is returned as it is: reading it raises an error that says what to do.
    """
    if _may_come(path):
        return None
    if (path / MANIFEST).exists() or not path.is_dir():
        return path
    return newest_record(path) or path


def wait_for_record(path: Path, say: Callable[[str], None], *, patience_s: float = PATIENCE_S) -> Path:
    """Wait until there is a record, and return it."""
    end = time.monotonic() + patience_s
    found = find_record(path)
    if found is None:
        say(f"waiting for a record in {path}{_guess(path)}; Ctrl-C quits")
    while found is None:
        if time.monotonic() > end:
            raise BadInput(
                f"{path}: no record after {patience_s / 60:.0f} minutes. `ampwise run -o {path} train.py` writes one."
            )
        time.sleep(PAUSE_S)
        found = find_record(path)
    return found


def _may_come(path: Path) -> bool:
    """Whether a record may still be created: the path does not exist but its parent does, or a run is starting."""
    if not path.exists():
        return not path.is_symlink() and path.absolute().parent.is_dir()
    if not path.is_dir():
        return False
    return all(one.name == f"{MANIFEST}{TEMPORARY_SUFFIX}" or is_rank_folder(one.name) for one in path.iterdir())


def _guess(path: Path) -> str:
    if path.exists():
        return ", which has none yet"
    near = nearest(path.name, [one.name for one in records_in(path.absolute().parent)])
    return f", which does not exist yet{f' (there is {near[0]})' if near else ''}"
