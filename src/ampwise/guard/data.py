"""The batches of a loader, of which the place is known and can be returned to, in this process or another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ampwise.errors import BadInput
from ampwise.guard.generators import unsaveable
from ampwise.guard.sources import Place, length_of, set_epoch, source_of

__all__ = ["Data", "epoch_of"]

END = object()
KEYS = {"kind", "batches", "epoch", "done", "over", "passed_over", "state"}
EPOCH_KEYS = {"epoch", "over"}


class Data:
    """The batches of a loader, epoch after epoch, in one loop.

    Who leaves the loop (to evaluate, say) and begins another goes on with the next batch. ``go_to`` may be called
    inside the loop, which then goes on from there.

    >>> data = Data([10, 11, 12], epochs=2)
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

    epochs: how often the loader is gone over; None: for ever.

    After a restart the batches are the same to the bit, if the random numbers of the process are restored, too, as
    Guard does, with those that samplers, datasets and transforms keep for themselves. Two exceptions: random numbers
    that the workers of a StatefulDataLoader draw are not part of its state; and those of ``unrestored`` are not known.
    """

    def __init__(self, loader: Any, *, epochs: int | None = 1) -> None:
        if epochs is not None and (not isinstance(epochs, int) or epochs < 1):
            raise BadInput(f"Data(epochs={epochs!r}): a number from 1 on, or None for ever.")
        self._loader, self._epochs = loader, epochs
        self._source = source_of(loader)
        if not self.rewinds and epochs not in (1, None):
            raise BadInput(
                f"Data(epochs={epochs}): a {type(loader).__name__} can be gone over once. "
                "Give a loader, a list, or an object whose __iter__ begins anew."
            )
        self._place = Place(epoch=0, done=0, over=False)
        self._passed_over: set[tuple[int, int]] = set()
        self._iterator: Iterator[Any] | None = None  # of the epoch under way
        self._in_loop = self._gone_over = False

    @property
    def epoch(self) -> int:
        """The epoch of the batch handed out last, from 0."""
        return self._place.epoch

    @property
    def index(self) -> int:
        """The number of that batch in its epoch, from 0; -1 before the first."""
        return self._place.done - 1

    @property
    def rewinds(self) -> bool:
        """Whether ``go_to`` goes back. An iterator that can be gone over once does not."""
        return self._source.rewinds

    @property
    def unrestored(self) -> Sequence[str]:
        """Where in the loader random numbers are drawn that differ after the last ``go_to``."""
        return [*unsaveable(self._loader), *self._source.unrestored]

    @property
    def gone_over(self) -> bool:
        """All epochs are over, and nothing went back since."""
        return self._gone_over

    @property
    def passed_over(self) -> tuple[tuple[int, int], ...]:
        """The batches that are not handed out: epoch and index."""
        return tuple(sorted(self._passed_over))

    def pass_over(self, batches: Iterable[tuple[int, int]]) -> None:
        """Hand these out no more, now and after ``go_to``; positions from now on know of them."""
        self._passed_over.update(_pairs(batches))

    # --- the loop --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if self._in_loop:
            raise BadInput("this Data is being gone over already. A second loop at a time needs a Data of its own.")
        if self._gone_over:
            raise BadInput(
                f"this Data was gone over: {self._epochs} of {self._epochs} epochs. "
                "Data(loader, epochs=n) has all epochs in one loop; go_to(position) goes back."
            )
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        if self._in_loop:  # two were made before either was asked
            raise BadInput("this Data is being gone over already. A second loop at a time needs a Data of its own.")
        self._in_loop = True
        try:
            while (batch := self._next()) is not END:
                yield batch
            self._gone_over = True
        finally:
            self._in_loop = False

    def _next(self) -> Any:
        while self._under_way():
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

    def _under_way(self) -> bool:
        """Begin an epoch where one is due. False: all are over."""
        if self._place.over:
            if not self.rewinds or self.epoch + 1 == self._epochs:
                return False
            self._place = Place(epoch=self.epoch + 1, done=0, over=False)
        if self._iterator is None:
            self._iterator = self._source.begin(self.epoch)
        return True

    def _end_epoch(self) -> None:
        self._iterator = None
        if self._place.done == 0:
            raise BadInput(
                f"the {type(self._loader).__name__} gave no batch in epoch {self.epoch}. "
                "It is empty, smaller than a batch (drop_last=True), or can be gone over only once."
            )
        self._place = self._place._replace(over=True)

    # --- the place -------------------------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """Plain data, for ``plain.to_json``. Who goes to it gets the batch that comes next now."""
        return {
            "kind": self._source.kind,
            "batches": length_of(self._loader),
            **self._place._asdict(),
            "passed_over": [list(batch) for batch in self.passed_over],
            "state": self._source.state(self._place.done),
        }

    def go_to(self, position: Any) -> None:
        """Go on from there. The random numbers of the process are left as they are now.

        BadInput for what is no position, one in other data, or one that lies behind an iterator that cannot go back.
        What ``epoch_of`` gives fits any data.
        """
        if isinstance(position, Mapping) and set(position) == EPOCH_KEYS:
            self._begin_epoch(position)
            return
        place, passed_over = _read(position)
        self._refuse_other(position, place)
        self._iterator = _Lost()  # until it is found; the workers of the one before end
        iterator = self._source.go_to(place, position["state"])
        self._iterator, self._place = iterator, place
        self._passed_over |= passed_over
        self._gone_over = False

    def _begin_epoch(self, position: Mapping[str, Any]) -> None:
        if not (_is_count(position["epoch"]) and isinstance(position["over"], bool)):
            raise BadInput("this is no position in data: its epoch is no number.")
        self._iterator, self._gone_over = None, False
        self._place = Place(position["epoch"], done=0, over=position["over"])

    def _refuse_other(self, position: Mapping[str, Any], place: Place) -> None:
        kind = self._source.kind
        if position["kind"] != kind:
            raise BadInput(f"the position is in data of another kind ({position['kind']!r:.40}, and this is {kind!r}).")
        if not self.rewinds and place.done < self._place.done:
            raise BadInput(
                f"a {type(self._loader).__name__} cannot go back from batch {self._place.done:,} to {place.done:,}. "
                "Data(...) of a loader, a list, or an object whose __iter__ begins anew can."
            )
        set_epoch(self._loader, place.epoch)  # which some samplers' length depends on
        batches = length_of(self._loader)
        set_epoch(self._loader, self.epoch)
        if position["batches"] != batches:
            raise BadInput(
                f"the position is in data of {_count(position['batches'])} an epoch, and this has {_count(batches)}: "
                "give the loader as it was (the dataset, the batch size, as many ranks), or begin anew."
            )


def epoch_of(position: Any) -> Any:
    """The beginning of the epoch that a position is in, for data in which its batches have other numbers; or None."""
    known = isinstance(position, Mapping) and set(position) >= EPOCH_KEYS
    return {key: position[key] for key in sorted(EPOCH_KEYS)} if known else None


class _Lost:
    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise BadInput("the place in the data was lost when go_to failed. Go to another position, or begin anew.")


def _count(batches: Any) -> str:
    return f"{batches:,} batches" if isinstance(batches, int) else "unknown batches"


def _read(position: Any) -> tuple[Place, set[tuple[int, int]]]:
    if not isinstance(position, Mapping) or set(position) != KEYS or not isinstance(position["state"], Mapping):
        raise BadInput("this is no position in data. Data.position() gives one.")
    epoch, done, over = position["epoch"], position["done"], position["over"]
    if not (_is_count(epoch) and _is_count(done) and isinstance(over, bool)):
        raise BadInput("this is no position in data: its epoch, or its batch, is no number.")
    return Place(epoch, done, over), _pairs(position["passed_over"])


def _pairs(batches: Any) -> set[tuple[int, int]]:
    try:
        pairs = {(epoch, index) for epoch, index in batches}
    except (TypeError, ValueError):
        pairs = {(-1, -1)}
    if not all(_is_count(epoch) and _is_count(index) for epoch, index in pairs):
        raise BadInput("batches to pass over are pairs of an epoch and an index, both from 0.")
    return pairs


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
