"""What a scaler knows of each optimizer it has met: one record, dropped with the optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ampwise.engine.look import Look
from ampwise.engine.outcome import Outcome
from ampwise.engine.reading import Reading

__all__ = ["Entries", "Entry"]


class Entry:
    """One optimizer: where it stands in this iteration, and how its last step went."""

    def __init__(self, refer: Callable[[], Any]) -> None:
        self._refer = refer
        self.look: Look | None = None  # taken in this iteration
        self.flags: list[Tensor] = []  # found_inf as it was made public
        self.unscaled = False  # asked for, where there is no scale
        self.stepped = False
        self.reading: Reading | None = None  # of the last step; kept for whoever asks
        self.outcome: Outcome | None = None

    @property
    def optimizer(self) -> Any:
        """None once it is gone."""
        return self._refer()

    def begin_anew(self) -> None:
        """The iteration is over."""
        self.look, self.flags, self.unscaled, self.stepped = None, [], False, False


class Entries:
    """By identity, as torch has it: optimizers need be neither hashable nor weakly referable."""

    def __init__(self) -> None:
        self._by_id: dict[int, Entry] = {}

    def of(self, optimizer: Any) -> Entry:
        """The optimizer's entry, made when it is first met."""
        entry = self._by_id.get(id(optimizer))
        if entry is None or entry.optimizer is not optimizer:
            entry = self._by_id[id(optimizer)] = Entry(self._reference(optimizer))
        return entry

    def __iter__(self) -> Iterator[Entry]:
        return iter([entry for entry in self._by_id.values() if entry.optimizer is not None])

    def _reference(self, optimizer: Any) -> Callable[[], Any]:
        key, by_id = id(optimizer), self._by_id
        try:
            return weakref.ref(optimizer, lambda gone: by_id.pop(key, None))
        except TypeError:
            return lambda: optimizer
