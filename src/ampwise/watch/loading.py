"""How long the training loop waits for its data."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from torch.utils.data import dataloader

from ampwise.evidence.conduct import Site
from ampwise.site import caller
from ampwise.watch.patches import Patches

__all__ = ["Loading"]


class Loading:
    """The time spent in DataLoaders' ``__next__``, by the line that waited, since it was last taken.

    Only of the thread that trains: another that fetches ahead keeps nobody waiting.
    """

    def __init__(self, patches: Patches, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._waits: dict[Site, float] = {}
        self.off = False  # the present step is passed over
        self._within = False  # a loader that reads from another one waits once
        patches.replace(dataloader._BaseDataLoaderIter, "__next__", self._timed)

    def taken(self) -> dict[Site, float]:
        """The waits so far, which then begin anew; this thread is the one that trains."""
        self._thread = threading.get_ident()
        waits, self._waits = self._waits, {}
        return waits

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def following(iterator: Any) -> Any:
            if self.off or self._within or threading.get_ident() != self._thread or os.getpid() != self._process:
                return original(iterator)
            self._within = True
            began = self._clock()
            try:
                return original(iterator)
            finally:
                self._within = False
                site = caller()
                self._waits[site] = self._waits.get(site, 0.0) + self._clock() - began

        return following
