"""Keep random numbers that a sink's package draws from changing those of the script."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["random_state_kept", "use_separate_random"]


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the global random state at the end, so that a package may draw while it is imported."""
    python_state = random.getstate()
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    numpy_state = None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.set_state(numpy_state)


class _ThreadRandom:
    """Replacement for the ``random`` module that uses its own generator in other threads than the main one."""

    def __init__(self) -> None:
        self._own = random.Random()

    def __getattr__(self, name: str) -> Any:
        return getattr(random if threading.current_thread() is threading.main_thread() else self._own, name)


def use_separate_random(modules: Iterable[str]) -> None:
    """Make these modules, if they are loaded, draw from a separate generator in a sink's thread."""
    for name in modules:
        module = sys.modules.get(name)
        if getattr(module, "random", None) is random:
            module.random = _ThreadRandom()  # type: ignore[union-attr]
