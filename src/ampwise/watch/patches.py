"""Other people's functions, replaced for a while and put back."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

__all__ = ["INTERNAL", "Patches", "unseen"]

MISSING = object()
# A warning names the line that called; Python passes by the frames of its import machinery, known by these words.
INTERNAL = "<ampwise, passed by like importlib._bootstrap>"


class Patches:
    """Attributes that were replaced, and what stood there before."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any, Any]] = []  # owner, name, what it was, what it is

    def replace(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Put ``make(original)`` in the place of ``owner.name``; nothing is done where there is no such name."""
        original = getattr(owner, name, None)
        if original is None:
            return
        # Of a class, what it has itself: an inherited method is put back by taking ours away.
        own = vars(owner).get(name, MISSING) if hasattr(owner, "__dict__") else original
        replacement = make(original)
        if callable(original) and not isinstance(original, type):
            replacement = wraps(original)(unseen(replacement))
        setattr(owner, name, replacement)
        self._before.append((owner, name, own, replacement))

    def pairs(self) -> list[tuple[Any, Any]]:
        """What stood in a place first, and what stands there now."""
        return [(own, getattr(owner, name)) for owner, name, own, _ in self._before if own is not MISSING]

    def undo(self) -> None:
        """Put everything back, the last first; what someone else has replaced since stays theirs."""
        while self._before:
            owner, name, own, ours = self._before.pop()
            if vars(owner).get(name, MISSING) is not ours:
                continue
            if own is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def unseen(function: Any) -> Any:
    """The function, such that a warning raised within names the script's line as it would without us."""
    if hasattr(function, "__code__"):
        function.__code__ = function.__code__.replace(co_filename=INTERNAL)
    return function
