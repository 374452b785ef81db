"""What modules have as attributes: a forward pass may count its calls, or put another buffer in the place of one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn import Module

__all__ = ["Attributes"]

HELD = ("_buffers", "_parameters")  # dictionaries whose entries may be replaced


class Attributes:
    """Of modules, as they were when they were noted. What an attribute is made of is not copied."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[Module, dict[str, Any], list[dict[str, Any]]]] = {}

    def note(self, models: Iterable[Module]) -> None:
        for module in (inner for model in models for inner in model.modules()):
            if id(module) not in self._noted:
                held = [dict(module.__dict__[name]) for name in HELD]
                self._noted[id(module)] = module, dict(module.__dict__), held

    def put_back(self) -> None:
        for module, attributes, held in self._noted.values():
            for name in module.__dict__.keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)
            for name, entries in zip(HELD, held, strict=True):
                now = module.__dict__[name]
                now.clear()
                now.update(entries)
