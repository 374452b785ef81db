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
        import ampwise

        return ampwise.__getattr__("census")(tensors)  # which says what to install where torch is missing

    def __getattr__(self, name: str) -> Any:
        # What needs torch is loaded when it is asked for: ``from ampwise.census import DeviceCensus``.
        homes = {"census": "measure", "DeviceCensus": "device"}
        if name not in homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(f"{self.__name__}.{homes[name]}"), name)


sys.modules[__name__].__class__ = _Room
