"""Find a record, wait for one that does not exist yet, and poll it, keeping the last state while it cannot be read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ampwise.errors import BadInput, nearest
from ampwise.finding.terminal import printable
from ampwise.runs.files import TEMPORARY_SUFFIX
from ampwise.runs.layout import MANIFEST, is_rank_folder, newest_record, records_in, why_not_a_record
from ampwise.runs.reader import RecordFollower, Run

PATIENCE_S = 600.0  # a run may start later than this, but a typing mistake should not go unnoticed for longer
PAUSE_S = 0.5
PAUSE_FACTOR = 9.0  # pause as a multiple of the reading time: a live view takes at most a tenth of a core from the run


def find_record(path: Path) -> Path | None:
    """Return the record at ``path``, or the newest one in that folder; None if one may still be created.

    If the path is something else, it is returned as it is: reading it raises an error that says what to do.
    """
    if not path.exists():
        return None if not path.is_symlink() and path.absolute().parent.is_dir() else path
    if not path.is_dir():
        return path
    starting = f"{MANIFEST}{TEMPORARY_SUFFIX}"
    if all(one.name == starting or is_rank_folder(one.name) for one in path.iterdir()):
        return None
    return path if (path / MANIFEST).exists() else newest_record(path) or path


def wait_for_record(path: Path, say: Callable[[str], None]) -> Path:
    """Wait until there is a record, and return it."""
    end = time.monotonic() + PATIENCE_S
    found = find_record(path)
    if found is None:
        guess = ", which has none yet"
        if not path.exists():
            near = nearest(path.name, [one.name for one in records_in(path.absolute().parent)])
            guess = f", which does not exist yet{f' (there is {near[0]})' if near else ''}"
        say(f"waiting for a record in {path}{guess}; Ctrl-C quits")
    while found is None:
        if time.monotonic() > end:
            raise BadInput(
                f"{path}: no record after {PATIENCE_S / 60:.0f} minutes. `ampwise run -o {path} train.py` writes one."
            )
        time.sleep(PAUSE_S)
        found = find_record(path)
    return found


class RecordPoller:
    """The last state of a run. A missing record raises BadInput at the start; later it is added to ``trouble``."""

    def __init__(self, follower: RecordFollower) -> None:
        try:
            run = follower.look()
        except BadInput as error:
            hint = why_not_a_record(follower.folder)
            raise BadInput(printable(f"{error}{hint and f' {hint}'}")) from error
        assert run is not None  # the first look always returns a run
        self.follower = follower
        self.run = run  # the same object until something changes
        self.lost = ""  # since when and why it cannot be read; empty if it can
        self._seen = run
        self._lost_at = 0.0

    @property
    def lost_s(self) -> float:
        """Seconds since the record became unreadable; 0.0 if it is readable."""
        return time.monotonic() - self._lost_at if self.lost else 0.0

    def look(self) -> Run:
        """Return the current state, or the last one if the record cannot be read; then ``trouble`` starts with why."""
        try:
            fresh = self.follower.look()
        except BadInput as error:
            self._lose(str(error))
            return self.run
        if fresh is not None and self._seen.manifest and not fresh.manifest:
            self._lose(fresh.trouble[0])  # the manifest was there before
        elif fresh is not None or self.lost:
            self._seen = self.run = fresh or self._seen
            self.lost = ""
        return self.run

    def _lose(self, why: str) -> None:
        if not self.lost:
            self._lost_at = time.monotonic()
            self.lost = f"has been unreadable since {time.strftime('%H:%M:%S')}: {why}"
            self.run = replace(self._seen, trouble=[f"The record {self.lost}", *self._seen.trouble])
