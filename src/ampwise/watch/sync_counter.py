"""Count host-GPU syncs by source line, from torch's sync debug warnings, which the script does not see."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import calling_site
from ampwise.watch.patches import Patches

__all__ = ["SyncCounter"]

# Torch's warning at each sync, and the one when the mode is first switched on.
SYNC_WARNINGS = re.compile(r"called a synchronizing CUDA operation|Synchronization debug mode is a prototype feature")
SYNC = "called a synchronizing CUDA operation"
OFF, WARN = 0, 1


class SyncCounter:
    """Counter of host-GPU syncs by source line, from ``listen`` to ``stop``.

    Torch reports syncs as warnings. A warning filter at the front of the list lets them through to a hook that counts
    them and passes on all other warnings. Torch's mode is off wherever the script catches warnings itself, so that a
    sync can neither be raised as an error there nor be found among the warnings that the script collects.
    """

    def __init__(
        self, set_mode: Callable[[int], None] | None = None, get_mode: Callable[[], int] | None = None
    ) -> None:
        self._set_mode = set_mode or (lambda mode: torch._C._cuda_set_sync_debug_mode(mode))
        self._get_mode = get_mode or (lambda: torch._C._cuda_get_sync_debug_mode())
        self._patches: Patches | None = None
        self._filter: tuple[Any, ...] = ("always", SYNC_WARNINGS, Warning, None, 0)
        self._counts: dict[CallSite, int] = {}
        self._catching = 0

    @property
    def listening(self) -> bool:
        return self._patches is not None

    def listen(self) -> bool:
        """Start counting. Return False, and do nothing, if the script uses torch's mode itself."""
        if self.listening or self._get_mode() != OFF:
            return False
        self._counts, self._catching = {}, 0
        patches = self._patches = Patches()
        patches.replace(warnings, "_showwarnmsg", self._counting)
        for name in ("filterwarnings", "simplefilter", "resetwarnings"):
            patches.replace(warnings, name, self._keeping_filter_first)
        patches.replace(warnings.catch_warnings, "__enter__", self._pausing_in_catch)
        patches.replace(warnings.catch_warnings, "__exit__", self._resuming_after_catch)
        patches.replace(torch.cuda, "set_sync_debug_mode", self._giving_up_mode)
        self._put_first()
        self._set_mode(WARN)
        return True

    def stop(self) -> dict[CallSite, int]:
        """Stop, and return how often each line has synced."""
        if self._patches is not None:
            if self._get_mode() == WARN:
                self._set_mode(OFF)
            self._patches.undo()
            self._patches = None
            self._take_out()
        counts, self._counts = self._counts, {}
        return counts

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Switch torch's mode off in this context."""
        was_on = self.listening and self._get_mode() == WARN
        if was_on:
            self._set_mode(OFF)
        try:
            yield
        finally:
            if was_on and self.listening:
                self._set_mode(WARN)

    def _put_first(self) -> None:
        self._take_out()
        # Straight into the list: warnings.filterwarnings would also reset which warnings were already shown.
        _filters().insert(0, self._filter)

    def _take_out(self) -> None:
        filters = _filters()
        filters[:] = [one for one in filters if one is not self._filter]

    def _counting(self, show: Callable[[Any], None]) -> Callable[[Any], None]:
        def count(message: Any) -> None:
            text = str(message.message)
            if not SYNC_WARNINGS.match(text):
                show(message)
            elif text.startswith(SYNC):
                site = calling_site()
                self._counts[site] = self._counts.get(site, 0) + 1

        return count

    def _keeping_filter_first(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            try:
                return change(*args, **kwargs)
            finally:
                if self.listening and not self._catching:
                    self._put_first()

        return changed

    def _pausing_in_catch(self, enter: Callable[..., Any]) -> Callable[..., Any]:
        def entered(block: Any) -> Any:
            self._catching += 1
            if self.listening and self._get_mode() == WARN:
                self._set_mode(OFF)
            self._take_out()
            return enter(block)

        return entered

    def _resuming_after_catch(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        def left(block: Any, *exc_info: Any) -> Any:
            try:
                return leave(block, *exc_info)
            finally:
                self._catching = max(self._catching - 1, 0)
                if self.listening and not self._catching:
                    self._put_first()
                    if self._get_mode() == OFF:
                        self._set_mode(WARN)

        return left

    def _giving_up_mode(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            self.stop()  # from here on the script sets the mode
            return change(*args, **kwargs)

        return changed


def _filters() -> list[Any]:
    filters: Any = warnings.filters  # a list, contrary to the type stubs
    return filters  # type: ignore[no-any-return]
