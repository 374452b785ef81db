"""Follow a record while it grows, reading only what is new."""

from __future__ import annotations

from pathlib import Path

from ampwise.runs.layout import FILES
from ampwise.runs.reader import RankRecord, Run, with_ranks

__all__ = ["RecordFollower"]


class RecordFollower:
    """Reads a growing record again and again, without disturbing the process that writes it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._parts: dict[Path, RankRecord] = {}  # by folder: ranks appear over time
        self._has_news = False
        self._last_seen: tuple[object, ...] = ()  # ranks and trouble at the last look

    def look(self) -> Run | None:
        """Return the run as ``Run.read`` would, or None if nothing is new; raise BadInput as ``Run.read`` does.

        Layers are read only for rank 0: no live view shows those of other ranks, and they grow the fastest.
        """
        run = with_ranks(self._part(self.folder), self._part)
        seen = (list(run.ranks), run.trouble)
        if not self._has_news and seen == self._last_seen:
            return None
        self._has_news, self._last_seen = False, seen
        return run

    @property
    def written(self) -> float | None:
        """When rank 0 last wrote something, in seconds since 1970; None if there are no files."""
        times = []
        for name in FILES:
            try:
                times.append((self.folder / name).stat().st_mtime)
            except OSError:
                continue
        return max(times, default=None)

    def _part(self, folder: Path) -> Run:
        part = self._parts.setdefault(folder, RankRecord(folder, layers=folder == self.folder))
        # Set until a run is returned: later parts may raise, and what was read is not read again.
        self._has_news |= part.look()
        return part.run
