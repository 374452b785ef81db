"""How often the host waits for the GPU, and at whose line: torch's own warnings, heard by us alone."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ampwise.evidence.conduct import Site
from ampwise.site import caller
from ampwise.watch.patches import Patches

__all__ = ["Waits"]

# What torch warns of at each wait, and once when it is first asked to.
HEARD = re.compile(r"called a synchronizing CUDA operation|Synchronization debug mode is a prototype feature")
WAIT = "called a synchronizing CUDA operation"
OFF, WARN = 0, 1


class Waits:
    """Waits for the GPU, counted by line while listening.

    Torch tells them as warnings. A filter of ours, at the front of the list, lets them all through to a hook of ours
    that passes on every other. Torch's mode is off wherever the script changes the filters itself, so that a wait
    can neither be raised as an error there nor be found among the warnings that the script collects.
    """

    def __init__(
        self, set_mode: Callable[[int], None] | None = None, get_mode: Callable[[], int] | None = None
    ) -> None:
        self._set_mode = set_mode or (lambda mode: torch._C._cuda_set_sync_debug_mode(mode))
        self._get_mode = get_mode or (lambda: torch._C._cuda_get_sync_debug_mode())
        self._patches: Patches | None = None
        self._filter: tuple[Any, ...] = ("always", HEARD, Warning, None, 0)
        self._counts: dict[Site, int] = {}
        self._catching = 0

    @property
    def listening(self) -> bool:
        return self._patches is not None

    def listen(self) -> bool:
        """Begin; False, and nothing is done, where the script uses torch's mode itself."""
        if self.listening or self._get_mode() != OFF:
            return False
        self._counts, self._catching = {}, 0
        patches = self._patches = Patches()
        patches.replace(warnings, "_showwarnmsg", self._hearing)
        for name in ("filterwarnings", "simplefilter", "resetwarnings"):
            patches.replace(warnings, name, self._staying_first)
        patches.replace(warnings.catch_warnings, "__enter__", self._pausing)
        patches.replace(warnings.catch_warnings, "__exit__", self._resuming)
        patches.replace(torch.cuda, "set_sync_debug_mode", self._leaving)
        self._put_first()
        self._set_mode(WARN)
        return True

    def heard(self) -> dict[Site, int]:
        """End: how often each line waited."""
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
        """Without torch's mode, which is then put back."""
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
        # Straight into the list: warnings.filterwarnings would also make Python forget what it has warned of.
        _filters().insert(0, self._filter)

    def _take_out(self) -> None:
        filters = _filters()
        filters[:] = [one for one in filters if one is not self._filter]

    def _hearing(self, show: Callable[[Any], None]) -> Callable[[Any], None]:
        def hear(message: Any) -> None:
            text = str(message.message)
            if not HEARD.match(text):
                show(message)
            elif text.startswith(WAIT):
                site = caller()
                self._counts[site] = self._counts.get(site, 0) + 1

        return hear

    def _staying_first(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            try:
                return change(*args, **kwargs)
            finally:
                if self.listening and not self._catching:
                    self._put_first()

        return changed

    def _pausing(self, enter: Callable[..., Any]) -> Callable[..., Any]:
        def entered(block: Any) -> Any:
            self._catching += 1
            if self.listening and self._get_mode() == WARN:
                self._set_mode(OFF)
            self._take_out()
            return enter(block)

        return entered

    def _resuming(self, leave: Callable[..., Any]) -> Callable[..., Any]:
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

    def _leaving(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            self.heard()  # from here on the mode is the script's
            return change(*args, **kwargs)

        return changed


def _filters() -> list[Any]:
    filters: Any = warnings.filters  # a list, which the type stubs do not admit
    return filters  # type: ignore[no-any-return]
