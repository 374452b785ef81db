"""What modules have as attributes: a forward pass may count its calls, or put another buffer in the place of one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn import Module

__all__ = ["Attributes"]


class Attributes:
    """Of modules, as they were when they were noted. What an attribute is made of is not copied.

    Parameters are left alone: FSDP puts gathered ones in their places, and knows by itself where it is.
    """

    def __init__(self) -> None:
        self._noted: dict[int, tuple[Module, dict[str, Any], dict[str, Any]]] = {}

    def note(self, models: Iterable[Module]) -> None:
        for module in (inner for model in models for inner in model.modules()):
            if id(module) not in self._noted:
                self._noted[id(module)] = module, dict(module.__dict__), dict(module._buffers)

    def put_back(self) -> None:
        for module, attributes, buffers in self._noted.values():
            for name in module.__dict__.keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
