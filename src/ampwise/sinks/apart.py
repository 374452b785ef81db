"""Keeping what a sink's package draws by chance apart from what the script does."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["draw_apart", "without_drawing"]


@contextmanager
def without_drawing() -> Iterator[None]:
    """The script's numbers are those it would have drawn, also after a package has drawn some while it was loaded."""
    drawn = random.getstate()
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    drawn_by_numpy = None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        random.setstate(drawn)
        if numpy is not None:
            numpy.set_state(drawn_by_numpy)


class _Apart:
    """In place of ``random``: in the main thread it is that, as what draws there is the script."""

    def __init__(self) -> None:
        self._own = random.Random()

    def __getattr__(self, name: str) -> Any:
        return getattr(random if threading.current_thread() is threading.main_thread() else self._own, name)


def draw_apart(modules: Iterable[str]) -> None:
    """From now on these, as far as they are loaded, draw from a generator of their own in a sink's thread."""
    for name in modules:
        module = sys.modules.get(name)
        if getattr(module, "random", None) is random:
            module.random = _Apart()  # type: ignore[union-attr]
