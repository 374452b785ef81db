"""Replace functions of other libraries, and restore them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

__all__ = ["INTERNAL", "Patches", "hidden_from_warnings"]

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
        own = vars(owner).get(name, MISSING) if hasattr(owner, "__dict__") else original
        replacement = make(original)
        if callable(original) and not isinstance(original, type):
            replacement = wraps(original)(hidden_from_warnings(replacement))
        setattr(owner, name, replacement)
        self._before.append((owner, name, own, replacement))

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
    if hasattr(function, "__code__"):
        function.__code__ = function.__code__.replace(co_filename=INTERNAL)
    return function
