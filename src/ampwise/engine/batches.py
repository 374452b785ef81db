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

    def __iter__(self) -> Iterator[Any]:
        source = iter(self._loader)
        try:
            while batches := list(islice(source, self._window.remaining)):
                self._window.expect(len(batches))
                yield from batches
        finally:
            self._window.expect(None)  # for a loop may have been left early
        self._flush()  # for a batch may have been passed over
