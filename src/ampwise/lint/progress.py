"""A bar of one line on a terminal, for runs long enough to wonder about; gone when they end."""

from __future__ import annotations

import time
from types import TracebackType

from ampwise.printers.terminal import redraw

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import TextIO

__all__ = ["Progress"]

MANY_FILES = 200
BETWEEN_S = 0.1
WIDEST = 40


class Progress:
    """How many of ``total`` files are done, on ``stream`` if that is a terminal and they are many."""

    def __init__(self, total: int, stream: TextIO | None) -> None:
        self._total, self._done = total, 0
        self._stream = stream if stream is not None and total > MANY_FILES and stream.isatty() else None
        self._drawn_at: float | None = None

    def __enter__(self) -> Progress:
        return self

    def advance(self, files: int = 1) -> None:
        """Say that more files are done."""
        self._done = min(self._total, self._done + files)
        now = time.monotonic()
        if self._stream is not None and (self._drawn_at is None or now - self._drawn_at >= BETWEEN_S):
            self._drawn_at = now
            redraw(self._bar(), self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None and self._drawn_at is not None:
            redraw("", self._stream)

    def _bar(self) -> str:
        import shutil

        counted = f" {self._done}/{self._total} files"
        width = max(0, min(WIDEST, shutil.get_terminal_size().columns - len(counted) - 3))
        filled = width * self._done // self._total
        return f"[{'#' * filled}{'-' * (width - filled)}]{counted}"
