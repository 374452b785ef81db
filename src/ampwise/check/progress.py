"""Progress bar for long runs, on a terminal only; it is removed at the end."""

from __future__ import annotations

import time
from typing import Self, TextIO

from ampwise.finding.terminal import redraw

MANY_FILES = 200
BETWEEN_S = 0.1
WIDEST = 40


class ProgressBar:
    """Progress bar for ``total`` files, shown on ``stream`` if it is a terminal and there are many files."""

    def __init__(self, total: int, stream: TextIO | None) -> None:
        self._total, self._done = total, 0
        self._stream = stream if stream is not None and total > MANY_FILES and stream.isatty() else None
        self._drawn_at: float | None = None

    def __enter__(self) -> Self:
        return self

    def advance(self, files: int = 1) -> None:
        """Count more files as done."""
        self._done = min(self._total, self._done + files)
        now = time.monotonic()
        if self._stream is not None and (self._drawn_at is None or now - self._drawn_at >= BETWEEN_S):
            self._drawn_at = now
            import shutil

            counted = f" {self._done}/{self._total} files"
            width = max(0, min(WIDEST, shutil.get_terminal_size().columns - len(counted) - 3))
            filled = width * self._done // self._total
            redraw(f"[{'#' * filled}{'-' * (width - filled)}]{counted}", self._stream)

    def __exit__(self, *error: object) -> None:
        if self._stream is not None and self._drawn_at is not None:
            redraw("", self._stream)
