"""NumPy's warnings about values that it has computed in the script's own code."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ampwise.finding.call_site import CallSite
from ampwise.trace.numpy_errors import KINDS, MOST, error_here
from ampwise.watch.patches import Patches

__all__ = ["NumpyWarnings"]


class NumpyWarnings:
    """Lines of the script at which NumPy has warned of a value that it computed from good ones, and that is not finite.

    A script often prepares its data long before the first step, where nothing else observes it.
    """

    def __init__(self) -> None:
        self.sites: dict[CallSite, str] = {}  # with the kind

    def install(self, patches: Patches) -> None:
        patches.wrap(warnings, "_showwarnmsg", self.shown)

    def shown(self, original: Callable[[Any], None], message: Any) -> None:
        kind, encountered, _ = str(message.message).partition(" encountered in ")
        if encountered and kind in KINDS and issubclass(message.category, RuntimeWarning) and len(self.sites) < MOST:
            with suppress(Exception):
                error = error_here(kind)
                if error is not None and not error.was_given_bad and not error.calls_repair:
                    self.sites[error.site] = kind
        original(message)
