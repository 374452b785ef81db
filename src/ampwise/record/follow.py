"""A record while it grows: what is new is read, and nothing else."""

from __future__ import annotations

from pathlib import Path

from ampwise.record.layout import FINDINGS, LAYERS, MANIFEST, STEPS
from ampwise.record.reader import Part, Run, with_ranks

__all__ = ["Follower"]


class Follower:
    """Looks at a record as often as it is asked to, without ever being in the way of who writes it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._parts: dict[Path, Part] = {}  # by folder: ranks come as they come
        self._has_news = False
        self._told: tuple[object, ...] = ()  # which ranks there were, and the trouble with them

    def look(self) -> Run | None:
        """The run as ``Run.read`` would read it now, or None where nothing is new; BadInput as there.

        Without the layers of ranks but the first: nobody who looks on is shown them, and they grow the fastest.
        """
        run = with_ranks(self._part(self.folder), self._part)
        told = (list(run.ranks), run.trouble)
        if not self._has_news and told == self._told:
            return None
        self._has_news, self._told = False, told
        return run

    @property
    def written(self) -> float | None:
        """When the first rank last wrote something, in seconds since 1970; None where it has nothing."""
        times = []
        for name in (MANIFEST, STEPS, LAYERS, FINDINGS):
            try:
                times.append((self.folder / name).stat().st_mtime)
            except OSError:
                continue
        return max(times, default=None)

    def _part(self, folder: Path) -> Run:
        part = self._parts.setdefault(folder, Part(folder, layers=folder == self.folder))
        # Kept until a run was given: what comes after this may raise, and what was read is not read again.
        self._has_news |= part.look()
        return part.run
