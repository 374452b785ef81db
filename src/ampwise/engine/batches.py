"""The batches of a loader, window by window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from ampwise.engine.window import Window

__all__ = ["Batches"]


class Batches:
    """Fetched a window at a time, so that it is known beforehand where the last window ends."""

    def __init__(self, loader: Iterable[Any], window: Window, flush: Callable[[], Any]) -> None:
        self._loader, self._window, self._flush = loader, window, flush

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True  # and no question to a loader that may have no length

    def __iter__(self) -> Iterator[Any]:
        source, window = iter(self._loader), self._window
        seen, length = window.seen, window.length
        try:
            while batches := list(islice(source, window.remaining)):
                window.expect(len(batches))
                yield from batches
        finally:
            trained = window.seen != seen  # or they were looked at only, maybe in the middle of a window
            window.length = window.size if trained else length  # the loop may have been left early
        if trained:
            self._flush()  # where a batch was passed over
