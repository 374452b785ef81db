"""What a tensor holds, counted by powers of two: the algebra (no torch), and measuring on CPU and GPU.

This room and its verb share a name. Importing any file in here makes Python bind ``ampwise.census`` to the
room, which would hide the function ``ampwise.census``; so the room can be called, and calling it measures.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ampwise.census.algebra import Census
from ampwise.census.count import Count

__all__ = ["Census", "Count"]


class _Room(ModuleType):
    def __call__(self, tensors: Any) -> Any:
        """Measure: ``help(ampwise.census.census)`` tells how."""
        return self.census(tensors)

    def __getattr__(self, name: str) -> Any:
        # Loaded when asked for, as the package loads its public names: it says what to install without torch.
        if name not in ("DeviceCensus", "census"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        import ampwise

        return ampwise.__getattr__(name)


sys.modules[__name__].__class__ = _Room
