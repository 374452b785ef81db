"""Rooms that share a name with their verb.

Importing any file of such a room makes Python bind ``ampwise.census`` to the room, which would hide the function
``ampwise.census``. So the room can be called, and calling it calls the function.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__all__ = ["share_name"]


def share_name(room: str, *others: str) -> None:
    """Make a room callable as its function is; ``others`` are public names that are asked of it, too."""
    verb = room.rpartition(".")[2]
    names = (verb, *others)

    class Room(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(self, verb)(*args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            # Loaded when asked for, as the package loads its public names: it says what to install without torch.
            if name not in names:
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
            import ampwise

            return ampwise.__getattr__(name)

    sys.modules[room].__class__ = Room
