"""The calls in which a DataLoader returns a batch: how long the training thread waits in them, and for which line."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import dataloader

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import calling_site
from ampwise.watch.patches import Patches

__all__ = ["DataLoading"]


class DataLoading:
    """Time spent in DataLoaders' ``__next__``, by the line that waited, since ``take`` was last called.

    Only the training thread counts: a thread that prefetches does not delay training.
    """

    def __init__(self, patches: Patches, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._waits: dict[CallSite, float] = {}
        self.off = False  # in skipped steps
        self._within = False  # a loader that reads from another one is counted once
        # Called with the iterator and its batch, in any thread; None: it raised an error, or has ended.
        self.on_batch: Callable[[Any, Any], None] = lambda iterator, batch: None
        patches.wrap(dataloader._BaseDataLoaderIter, "__next__", self.next_batch)

    def take(self) -> dict[CallSite, float]:
        """Return the waits so far and reset them. The calling thread is the training thread."""
        self._thread = threading.get_ident()
        waits, self._waits = self._waits, {}
        return waits

    def next_batch(self, original: Callable[..., Any], iterator: Any) -> Any:
        batch = None
        try:
            if self.off or self._within or threading.get_ident() != self._thread or os.getpid() != self._process:
                batch = original(iterator)
                return batch
            self._within = True
            began = self._clock()
            try:
                batch = original(iterator)
                return batch
            finally:
                self._within = False
                site = calling_site()
                self._waits[site] = self._waits.get(site, 0.0) + self._clock() - began
        finally:
            self.on_batch(iterator, batch)
