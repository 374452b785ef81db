"""Iterate over a loader one accumulation window at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from ampwise.train.accumulator import Accumulator

__all__ = ["WindowedBatches"]


class WindowedBatches:
    """Batches of a loader, fetched one accumulation window at a time, so that the end of the data is known early."""

    def __init__(self, loader: Iterable[Any], window: Accumulator, flush: Callable[[], Any]) -> None:
        self._loader, self._window, self._flush = loader, window, flush

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True  # without calling len(), which the loader may not have

    def __iter__(self) -> Iterator[Any]:
        source, window = iter(self._loader), self._window
        seen, length = window.seen, window.length
        try:
            while batches := list(islice(source, window.remaining)):
                window.expect(len(batches))
                yield from batches
        finally:
            trained = window.seen != seen  # else batches were only read, maybe within an open window
            window.length = window.size if trained else length  # the loop may have ended early
        if trained:
            self._flush()  # in case a batch was skipped
