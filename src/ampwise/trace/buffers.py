"""Buffers that a forward pass changes: what they were when a step began.

Which these are is learned in the first step; few models have any besides running statistics, which are not taken here
(the engine has them), and then nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from ampwise.trace.ranges import bytes_of
from ampwise.trace.undo import overwrite

__all__ = ["Buffers", "Remembered", "as_remembered"]

MOST_BYTES = 64 * 2**20  # that are copied in the first step, to learn


@dataclass(slots=True, eq=False)
class Remembered:
    module: Module
    name: str
    tensor: Tensor  # itself: another may have taken its place
    version: int
    copy: Tensor | None

    @property
    def has_moved(self) -> bool:
        now = self.module._buffers.get(self.name)
        return now is not self.tensor or self.tensor._version != self.version


class Buffers:
    """All but those of normalisation layers."""

    def __init__(self, models: Sequence[Module]) -> None:
        modules = dict.fromkeys(module for model in models for module in model.modules())
        self._places = [
            (module, name)
            for module in modules
            if not isinstance(module, _NormBase)
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._learned = not self._places
        self._remembered: list[Remembered] = []

    def remember(self) -> None:
        """As they are now."""
        if not self._places:
            return
        there = [(module, name, module._buffers.get(name)) for module, name in self._places]
        found = [(m, name, each) for m, name, each in there if isinstance(each, Tensor) and _can_change(each)]
        affordable = self._learned or sum(bytes_of(each) for _, _, each in found) <= MOST_BYTES
        self._remembered = [
            Remembered(module, name, each, each._version, each.detach().clone() if affordable else None)
            for module, name, each in found
        ]

    def step_over(self) -> None:
        """From the first step on, those that have moved in it are the ones to remember."""
        if not self._learned:
            self._learned = True
            self._places = [(each.module, each.name) for each in self._remembered if each.has_moved]

    @property
    def remembered(self) -> list[Remembered]:
        """What the last call of ``remember`` has found."""
        return self._remembered


@contextmanager
def as_remembered(remembered: Sequence[Remembered]) -> Iterator[None]:
    """Buffers as they were, to the end of the ``with``."""
    now = [(each, each.module._buffers.get(each.name)) for each in remembered]
    held = [None if tensor is None else tensor.detach().clone() for _, tensor in now]
    for each in remembered:
        each.module._buffers[each.name] = each.tensor
        if each.copy is not None:
            overwrite(each.tensor, each.copy)
    try:
        yield
    finally:
        for (each, tensor), copy in zip(now, held, strict=True):
            each.module._buffers[each.name] = tensor
            if tensor is not None and copy is not None:
                overwrite(tensor, copy)


def _can_change(buffer: Tensor) -> bool:
    """Not those of lazy modules that have seen no data yet; nor those of inference mode, which training cannot write to
    and which do not count their writes."""
    return not is_lazy(buffer) and not buffer.is_inference()
