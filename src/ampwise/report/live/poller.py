"""Poll a record, and keep the last state while it cannot be read."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ampwise.errors import BadInput
from ampwise.finding.terminal import printable
from ampwise.runs.find import why_not_a_record

if TYPE_CHECKING:
    from ampwise.runs.follower import RecordFollower
    from ampwise.runs.reader import Run

__all__ = ["PAUSE_FACTOR", "RecordPoller"]

PAUSE_FACTOR = (
    9.0  # pause as a multiple of the reading time: the live view takes at most a tenth of a core from the run
)


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
