"""Batches of a loader with a position that can be saved and restored, in this process or another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ampwise.errors import BadInput
from ampwise.guard.data_sources import DataPlace, batches_per_epoch, set_epoch, source_of
from ampwise.guard.loader_generators import unsaveable

__all__ = ["ResumableData", "epoch_start"]

END = object()
KEYS = {"kind", "batches", "epoch", "done", "over", "passed_over", "state"}
EPOCH_KEYS = {"epoch", "over"}


class ResumableData:
    """Batches of a loader, epoch after epoch, in one loop.

    A loop that is left (for an evaluation, for example) and started again continues with the next batch. ``go_to`` may
    be called inside the loop, which then continues from that position.

    >>> data = ResumableData([10, 11, 12], epochs=2)
    >>> batches = iter(data)
    >>> next(batches), next(batches)
    (10, 11)
    >>> after_two = data.position()
    >>> list(batches)
    [12, 10, 11, 12]
    >>> data.go_to(after_two)
    >>> data.pass_over([(1, 0)])
    >>> list(data)
    [12, 11, 12]

    epochs: how many epochs to iterate; None: no end.

    After a restart the batches are the same bit for bit, if the random state of the process is restored, too, as Guard
    does; the generators of samplers, datasets and transforms are restored here. Two exceptions: numbers that
    the workers of a StatefulDataLoader draw are not part of its state, and generators listed in ``unrestored``.
    """

    def __init__(self, loader: Any, *, epochs: int | None = 1) -> None:
        if epochs is not None and (not isinstance(epochs, int) or epochs < 1):
            raise BadInput(f"Data(epochs={epochs!r}): expected a whole number, 1 or more, or None for no end.")
        self._loader, self._epochs = loader, epochs
        self._source = source_of(loader)
        if not self.rewinds and epochs not in (1, None):
            raise BadInput(
                f"Data(epochs={epochs}): a {type(loader).__name__} can be iterated only once. "
                "Give a loader, a list, or an object whose __iter__ starts over."
            )
        self._place = DataPlace(epoch=0, done=0, over=False)
        self._passed_over: set[tuple[int, int]] = set()
        self._iterator: Iterator[Any] | None = None  # of the current epoch
        self._in_loop = self._finished = False

    @property
    def epoch(self) -> int:
        """Epoch of the batch that was yielded last, from 0."""
        return self._place.epoch

    @property
    def index(self) -> int:
        """Index in its epoch of the batch that was yielded last, from 0; -1 before the first."""
        return self._place.done - 1

    @property
    def rewinds(self) -> bool:
        """Whether ``go_to`` can go back. A one-shot iterator cannot."""
        return self._source.rewinds

    @property
    def unrestored(self) -> Sequence[str]:
        """Generators in the loader whose random numbers differ after the last ``go_to``."""
        return [*unsaveable(self._loader), *self._source.unrestored]

    @property
    def finished(self) -> bool:
        """Whether all epochs are over, and no ``go_to`` came after."""
        return self._finished

    @property
    def passed_over(self) -> tuple[tuple[int, int], ...]:
        """Batches that are left out, as (epoch, index)."""
        return tuple(sorted(self._passed_over))

    def pass_over(self, batches: Iterable[tuple[int, int]]) -> None:
        """Leave these batches out, now and after ``go_to``; positions saved from now on include them."""
        self._passed_over.update(_pairs(batches))

    # --- the loop --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if self._in_loop:
            raise BadInput("a loop over this Data is already running. A second loop at a time needs its own Data.")
        if self._finished:
            raise BadInput(
                f"this Data is used up: {self._epochs} of {self._epochs} epochs. "
                "Data(loader, epochs=n) has all epochs in one loop; go_to(position) goes back."
            )
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        if self._in_loop:  # two iterators were made before either was used
            raise BadInput("a loop over this Data is already running. A second loop at a time needs its own Data.")
        self._in_loop = True
        try:
            while (batch := self._next()) is not END:
                yield batch
            self._finished = True
        finally:
            self._in_loop = False

    def _next(self) -> Any:
        while self._ensure_epoch():
            assert self._iterator is not None
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._end_epoch()
                continue
            self._place = self._place._replace(done=self._place.done + 1)
            if (self.epoch, self.index) not in self._passed_over:
                return batch
        return END

    def _ensure_epoch(self) -> bool:
        """Start an epoch if one is due; return False if all are over."""
        if self._place.over:
            if not self.rewinds or self.epoch + 1 == self._epochs:
                return False
            self._place = DataPlace(epoch=self.epoch + 1, done=0, over=False)
        if self._iterator is None:
            self._iterator = self._source.begin(self.epoch)
        return True

    def _end_epoch(self) -> None:
        self._iterator = None
        if self._place.done == 0:
            raise BadInput(
                f"the {type(self._loader).__name__} yielded no batch in epoch {self.epoch}. "
                "It is empty, smaller than a batch (drop_last=True), or can be iterated only once."
            )
        self._place = self._place._replace(over=True)

    # --- the position ----------------------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """Return the current position as data for ``to_json``; after ``go_to`` the next batch is the one that is next
        now."""
        return {
            "kind": self._source.kind,
            "batches": batches_per_epoch(self._loader),
            **self._place._asdict(),
            "passed_over": [list(batch) for batch in self.passed_over],
            "state": self._source.state(self._place.done),
        }

    def go_to(self, position: Any) -> None:
        """Continue from a position. The random state of the process does not change.

        Raise BadInput for an invalid position, one in other data, or an earlier one in an iterator that cannot go back.
        A position from ``epoch_of`` fits any data.
        """
        if isinstance(position, Mapping) and set(position) == EPOCH_KEYS:
            self._begin_epoch(position)
            return
        place, passed_over = _read(position)
        self._refuse_other_data(position, place)
        self._iterator = _Lost()  # until go_to succeeds; also ends the previous iterator's workers
        iterator = self._source.go_to(place, position["state"])
        self._iterator, self._place = iterator, place
        self._passed_over |= passed_over
        self._finished = False

    def _begin_epoch(self, position: Mapping[str, Any]) -> None:
        if not (_is_count(position["epoch"]) and isinstance(position["over"], bool)):
            raise BadInput("not a position in data: its epoch is not a number.")
        self._iterator, self._finished = None, False
        self._place = DataPlace(position["epoch"], done=0, over=position["over"])

    def _refuse_other_data(self, position: Mapping[str, Any], place: DataPlace) -> None:
        kind = self._source.kind
        if position["kind"] != kind:
            raise BadInput(f"the position is in data of another kind: got {position['kind']!r:.40}, expected {kind!r}.")
        if not self.rewinds and place.done < self._place.done:
            raise BadInput(
                f"a {type(self._loader).__name__} cannot go back from batch {self._place.done:,} to {place.done:,}. "
                "Data(...) of a loader, a list, or an object whose __iter__ starts over can."
            )
        set_epoch(self._loader, place.epoch)  # the length of some samplers depends on it
        batches = batches_per_epoch(self._loader)
        set_epoch(self._loader, self.epoch)
        if position["batches"] != batches:
            raise BadInput(
                f"the position is in data of {_count(position['batches'])} an epoch, and this has {_count(batches)}: "
                "use the same loader (dataset, batch size, number of ranks), or start over."
            )


def epoch_start(position: Any) -> Any:
    """Return the start of a position's epoch, which is valid for data with different batches; None if unknown."""
    known = isinstance(position, Mapping) and set(position) >= EPOCH_KEYS
    return {key: position[key] for key in sorted(EPOCH_KEYS)} if known else None


class _Lost:
    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise BadInput("the position in the data was lost when go_to failed. Go to another position, or start over.")


def _count(batches: Any) -> str:
    return f"{batches:,} batches" if isinstance(batches, int) else "unknown batches"


def _read(position: Any) -> tuple[DataPlace, set[tuple[int, int]]]:
    if not isinstance(position, Mapping) or set(position) != KEYS or not isinstance(position["state"], Mapping):
        raise BadInput("not a position in data. Data.position() returns one.")
    epoch, done, over = position["epoch"], position["done"], position["over"]
    if not (_is_count(epoch) and _is_count(done) and isinstance(over, bool)):
        raise BadInput("not a position in data: its epoch or its batch is not a number.")
    return DataPlace(epoch, done, over), _pairs(position["passed_over"])


def _pairs(batches: Any) -> set[tuple[int, int]]:
    try:
        pairs = {(epoch, index) for epoch, index in batches}
    except (TypeError, ValueError):
        pairs = {(-1, -1)}
    if not all(_is_count(epoch) and _is_count(index) for epoch, index in pairs):
        raise BadInput("batches to leave out: expected pairs of an epoch and an index, both from 0.")
    return pairs


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
