"""Replace functions of other libraries and restore them, and notice forks of the watched process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

__all__ = ["FORK_LISTENERS", "INTERNAL", "Patches", "hidden_from_warnings"]

MISSING = object()
# warnings.warn skips frames whose file name contains these words of Python's import system.
INTERNAL = "<ampwise, skipped like importlib._bootstrap>"


class Patches:
    """Replaced attributes and their original values."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any, Any]] = []  # owner, name, original, replacement

    def replace(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Replace ``owner.name`` by ``make(original)``; do nothing if there is no such attribute."""
        original = getattr(owner, name, None)
        if original is None:
            return
        # A class's own attribute: for an inherited method, restoring means deleting the replacement.
        own = vars(owner).get(name, MISSING)
        replacement = wraps(original)(hidden_from_warnings(make(original)))
        setattr(owner, name, replacement)
        self._before.append((owner, name, own, replacement))

    def wrap(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Replace ``owner.name`` by a function that returns ``call(original, *args, **kwargs)``."""
        hidden_from_warnings(call)
        self.replace(owner, name, lambda original: lambda *args, **kwargs: call(original, *args, **kwargs))

    def pairs(self) -> list[tuple[Any, Any]]:
        """Return (original, current value) for each replaced attribute."""
        return [(own, getattr(owner, name)) for owner, name, own, _ in self._before if own is not MISSING]

    def undo(self) -> None:
        """Restore everything, the last first, except what someone else has replaced since."""
        while self._before:
            owner, name, own, ours = self._before.pop()
            if vars(owner).get(name, MISSING) is not ours:
                continue
            if own is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def hidden_from_warnings(function: Any) -> Any:
    """Hide the function's frame from warnings, so that they name the script's line as without ampwise."""
    plain = getattr(function, "func", function)  # of a partial
    plain = getattr(plain, "__func__", plain)  # of a method
    plain.__code__ = plain.__code__.replace(co_filename=INTERNAL)
    return function


# Objects to notify of forks: ``about_to_fork()`` in the parent, in the thread that forks, ``forked()`` in the child.
FORK_LISTENERS: weakref.WeakSet[Any] = weakref.WeakSet()


def _before_fork() -> None:
    for each in list(FORK_LISTENERS):
        each.about_to_fork()


def _after_fork_in_child() -> None:
    for each in list(FORK_LISTENERS):
        each.forked()
    FORK_LISTENERS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
