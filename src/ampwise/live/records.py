"""Which record is meant, and waiting for one that is not there yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ampwise.errors import BadInput, nearest
from ampwise.record.files import ASIDE
from ampwise.record.hints import newest_record, records_in
from ampwise.record.layout import MANIFEST, is_rank_folder

__all__ = ["find_record", "wait_for_record"]

PATIENCE_S = 600.0  # a queue may take longer to start a run, but so may a person to notice a typing mistake
PAUSE_S = 0.5


def find_record(path: Path) -> Path | None:
    """The record in ``path``, or the newest one in that folder; None where there may yet come one.

    Where there is something else, or no folder that it could come to, the way out is told by who reads it.
    """
    if _may_come(path):
        return None
    if (path / MANIFEST).exists() or not path.is_dir():
        return path
    return newest_record(path) or path


def wait_for_record(path: Path, say: Callable[[str], None], *, patience_s: float = PATIENCE_S) -> Path:
    """The record, as soon as there is one."""
    end = time.monotonic() + patience_s
    found = find_record(path)
    if found is None:
        say(f"waiting for a record in {path}{_guess(path)}; Ctrl-C leaves")
    while found is None:
        if time.monotonic() > end:
            raise BadInput(
                f"{path}: no record came in {patience_s / 60:.0f} minutes. `ampwise run -o {path} train.py` makes one."
            )
        time.sleep(PAUSE_S)
        found = find_record(path)
    return found


def _may_come(path: Path) -> bool:
    """No folder, but one that it can be made in; or a folder in which nothing is but what comes before a manifest."""
    if not path.exists():
        return not path.is_symlink() and path.absolute().parent.is_dir()
    if not path.is_dir():
        return False
    return all(one.name == f"{MANIFEST}{ASIDE}" or is_rank_folder(one.name) for one in path.iterdir())


def _guess(path: Path) -> str:
    if path.exists():
        return ", which has none yet"
    near = nearest(path.name, [one.name for one in records_in(path.absolute().parent)])
    return f", which does not exist yet{f' (there is {near[0]})' if near else ''}"
