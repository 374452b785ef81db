"""Looking at a record again and again: what was seen of it stays, though it cannot be read for a while."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ampwise.errors import BadInput
from ampwise.printers.terminal import printable
from ampwise.record.hints import why_not_a_record

if TYPE_CHECKING:
    from ampwise.record.follow import Follower
    from ampwise.record.reader import Run

__all__ = ["REST", "Looking"]

REST = 9.0  # times as long as looking took: whoever watches takes no more than a tenth of a core from the run


class Looking:
    """A run as it was seen last. BadInput at the beginning, where there is none; later on, that is trouble to tell."""

    def __init__(self, follower: Follower) -> None:
        try:
            run = follower.look()
        except BadInput as error:
            hint = why_not_a_record(follower.folder)
            raise BadInput(printable(f"{error}{hint and f' {hint}'}")) from error
        assert run is not None  # the first look has all
        self.follower = follower
        self.run = run  # the same object as long as there is nothing new
        self.lost = ""  # since when it cannot be read, and why; or empty
        self._seen = run
        self._lost_at = 0.0

    @property
    def lost_s(self) -> float:
        """For how long it cannot be read; 0.0 where it can."""
        return time.monotonic() - self._lost_at if self.lost else 0.0

    def look(self) -> Run:
        """The run as it stands, or stood; of one that is lost, ``trouble`` says so first."""
        try:
            fresh = self.follower.look()
        except BadInput as error:
            self._lose(str(error))
            return self.run
        if fresh is not None and self._seen.manifest and not fresh.manifest:
            self._lose(fresh.trouble[0])  # it has been there, and nothing goes without it
        elif fresh is not None or self.lost:
            self._seen = self.run = fresh or self._seen
            self.lost = ""
        return self.run

    def _lose(self, why: str) -> None:
        if not self.lost:
            self._lost_at = time.monotonic()
            self.lost = f"cannot be read since {time.strftime('%H:%M:%S')}: {why}"
            self.run = replace(self._seen, trouble=[f"The record {self.lost}", *self._seen.trouble])
