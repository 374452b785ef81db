"""What a scaler knows of each optimizer it has met: one record, dropped with the optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any

from torch import Tensor

from ampwise.engine.scaling.gradients import versions_of
from ampwise.engine.scaling.look import Look
from ampwise.engine.scaling.outcome import Outcome
from ampwise.engine.scaling.reading import Reading

__all__ = ["Entries", "Entry"]


class Entry:
    """One optimizer: where it stands in this iteration, and how its last step went."""

    def __init__(self, key: int, refer: Callable[[], Any], *, weakly: bool) -> None:
        self.key = key  # the optimizer's identity, by which torch knows it too
        self._refer, self.weakly = refer, weakly
        self.look: Look | None = None  # taken in this iteration
        self.flags: list[Tensor] = []  # found_inf as it was made public
        self.flag_versions: list[int] | None = []
        self.unscaled = False  # asked for, where there is no scale
        self.reading: Reading | None = None  # of the last step; kept for whoever asks
        self.outcome: Outcome | None = None

    @property
    def optimizer(self) -> Any:
        """None once it is gone."""
        return self._refer()

    def shows(self, flags: Sequence[Tensor]) -> bool:
        """Whether these are its flags, as they were made."""
        same = len(flags) == len(self.flags) and all(map(is_, flags, self.flags))
        return same and versions_of(flags) == self.flag_versions

    def begin_anew(self) -> None:
        """The iteration is over."""
        self.look, self.unscaled = None, False


class Entries:
    """By identity, as torch has it: optimizers need be neither hashable nor weakly referable."""

    def __init__(self) -> None:
        self._by_id: dict[int, Entry] = {}

    def of(self, optimizer: Any) -> Entry:
        """The optimizer's entry, made when it is first met."""
        entry = self._by_id.get(id(optimizer))
        if entry is None or entry.optimizer is not optimizer:
            entry = self._by_id[id(optimizer)] = self._new(optimizer)
        return entry

    def __iter__(self) -> Iterator[Entry]:
        return iter([entry for entry in self._by_id.values() if entry.optimizer is not None])

    def drop_idle(self, but: Sequence[Entry]) -> None:
        """Of those that are held strongly, all but the ones stepped in this iteration: nobody else may want them."""
        for key, entry in list(self._by_id.items()):
            if not entry.weakly and entry not in but:
                del self._by_id[key]

    def _new(self, optimizer: Any) -> Entry:
        key, by_id = id(optimizer), self._by_id
        try:
            return Entry(key, weakref.ref(optimizer, lambda gone: by_id.pop(key, None)), weakly=True)
        except TypeError:
            return Entry(key, lambda: optimizer, weakly=False)
