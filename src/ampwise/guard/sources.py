"""Where batches come from, and how each kind is brought back to a place: by its own state, or by counting.

A loader that has ``state_dict`` and ``load_state_dict`` is taken at its word. Of any other, the random numbers with
which an epoch began are kept: to come back, the epoch begins again with them, and the batches before the place are
passed over, unread where that is the same. Generators that a loader and its parts hold are among them. What is not
seen: random numbers that are drawn for the order of the data and for the training in turns.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from ampwise.errors import BadInput
from ampwise.guard.generators import load_states, states_of
from ampwise.printers.terminal import say
from ampwise.randomness import captured, restore_random

__all__ = ["Place", "Source", "length_of", "set_epoch", "source_of"]

CPU = torch.device("cpu")
PARTS = ("sampler", "batch_sampler", "batch_sampler.sampler", "dataset")  # of a loader, that may have what it has
PATIENCE_S = 5.0  # then it is told what is waited for
ADVICE = "torchdata.stateful_dataloader.StatefulDataLoader keeps its place, and goes back to it at once."


class Place(NamedTuple):
    """In the data: after so many batches of an epoch. ``over``: and it was found that there are no more."""

    epoch: int
    done: int
    over: bool


class Source(Protocol):
    """A loader of some kind."""

    kind: str
    rewinds: bool
    unrestored: Sequence[str]  # generators of random numbers that the last position had not, or has alone

    def begin(self, epoch: int) -> Iterator[Any]:
        """A new epoch."""

    def state(self, done: int) -> dict[str, Any]:
        """What a position has beside its numbers; nothing in it changes later."""

    def go_to(self, place: Place, state: Mapping[str, Any]) -> Iterator[Any] | None:
        """The batches from there on; None where no epoch is under way. Random numbers of the process stay as they
        are."""


def source_of(loader: Any) -> Source:
    """The first kind that fits."""
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return _Stateful(loader)
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise BadInput(f"Data({type(loader).__name__}): batches come from a loader, a list or an iterator.")
    if hasattr(loader, "__next__") and iter(loader) is loader:
        return _OneShot(loader)
    return _Counted(loader)


def length_of(loader: Any) -> int | None:
    """How many batches an epoch has; None where nobody knows."""
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None  # it is a guess; and who asks is warned by torch when it was wrong
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def set_epoch(loader: Any, epoch: int) -> None:
    """For what is to know it: torch's DistributedSampler, streamed datasets."""
    for part in _parts(loader).values():
        tell = getattr(part, "set_epoch", None)
        if callable(tell):
            tell(epoch)


class _Stateful:
    kind, rewinds = "stateful", True

    def __init__(self, loader: Any) -> None:
        self.unrestored: Sequence[str] = ()
        self._loader = loader
        self._begin: dict[str, Any] | None = None  # of the epoch: samplers without a state draw again from it

    def begin(self, epoch: int) -> Iterator[Any]:
        set_epoch(self._loader, epoch)
        self._begin = _beginning(self._loader)
        return iter(self._loader)

    def state(self, done: int) -> dict[str, Any]:
        # Asked before its first batch, a StatefulDataLoader would begin, and draw random numbers for it.
        unasked = done == 0 and isinstance(self._loader, DataLoader)
        state = None if unasked else copy.deepcopy(self._loader.state_dict())
        return {"loader": state, "begin": self._begin, "generators": states_of(self._loader)}

    def go_to(self, place: Place, state: Mapping[str, Any]) -> Iterator[Any] | None:
        with _making_sense():
            own, begin, generators = state["loader"], state["begin"], state["generators"]
        set_epoch(self._loader, place.epoch)
        with _random_kept():
            if begin is not None:
                _begin_as(self._loader, begin)
            iterator = self._loaded(place, own)
        self.unrestored = _load_states(self._loader, generators)
        self._begin = begin
        return iterator

    def _loaded(self, place: Place, state: Any) -> Iterator[Any] | None:
        try:
            if state is not None:
                self._loader.load_state_dict(copy.deepcopy(state))
            elif self._begin is not None:
                self._loader.load_state_dict({})  # a StatefulDataLoader takes that for its beginning
            if place.over:
                self._use_up()
            return iter(self._loader) if place.done > 0 and not place.over else None
        except Exception as error:  # it is others' code, and says it in its own way
            said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            raise BadInput(f"the {type(self._loader).__name__} does not take its state back ({said}).") from error

    def _use_up(self) -> None:
        """A StatefulDataLoader whose state says that it is over begins twice, and would draw twice for it: once here,
        where it does not count."""
        if isinstance(self._loader, DataLoader):
            iter(self._loader)


class _Counted:
    rewinds = True

    def __init__(self, loader: Any) -> None:
        self.unrestored: Sequence[str] = ()
        self._loader = loader
        self.kind = "loader" if isinstance(loader, DataLoader) else "iterable"
        # Of the epoch under way; and of all before it since workers began that outlive an epoch: theirs go on.
        self._begins: list[dict[str, Any]] = []

    @property
    def _persistent(self) -> bool:
        return isinstance(self._loader, DataLoader) and self._loader.persistent_workers

    def begin(self, epoch: int) -> Iterator[Any]:
        set_epoch(self._loader, epoch)
        if not self._begins:
            self._end_workers()
        before = self._begins if self._persistent else []
        self._begins = [*before, _beginning(self._loader)]
        return iter(self._loader)

    def state(self, done: int) -> dict[str, Any]:
        return {"begins": self._begins, "generators": states_of(self._loader)}

    def go_to(self, place: Place, state: Mapping[str, Any]) -> Iterator[Any] | None:
        with _making_sense():
            begins, generators = list(state["begins"]), state["generators"]
        begins = begins if self._persistent else begins[-1:]
        self._end_workers()
        iterator: Iterator[Any] | None = None
        with _random_kept():
            for ago in reversed(range(len(begins))):
                iterator = self._begun_again(place.epoch - ago, begins[-1 - ago])
                _pass(self._loader, iterator, place.epoch - ago, None if ago else place.done)
        self.unrestored = _load_states(self._loader, generators)
        self._begins = begins
        return None if place.over else iterator

    def _begun_again(self, epoch: int, begin: Mapping[str, Any]) -> Iterator[Any]:
        set_epoch(self._loader, epoch)
        _begin_as(self._loader, begin)
        return iter(self._loader)

    def _end_workers(self) -> None:
        if self._persistent:
            self._loader._iterator = None  # else they would go on with the random numbers that they are at


class _OneShot:
    kind, rewinds = "iterator", False
    unrestored: Sequence[str] = ()

    def __init__(self, loader: Iterator[Any]) -> None:
        self._loader = loader
        self._done = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._loader)
        self._done += 1
        return batch

    def begin(self, epoch: int) -> Iterator[Any]:
        return self

    def state(self, done: int) -> dict[str, Any]:
        return {}

    def go_to(self, place: Place, state: Mapping[str, Any]) -> Iterator[Any] | None:
        with _random_kept():
            _pass(self._loader, self, place.epoch, place.done - self._done)
        return self


# --- passing over --------------------------------------------------------------------------------------------------


def _pass(loader: Any, iterator: Iterator[Any], epoch: int, count: int | None) -> None:
    """Leave out so many batches; None: all of the epoch."""
    advance = _unread(loader, iterator) or iterator.__next__
    patience = _Patience(epoch)
    done = 0
    try:
        while count is None or done < count:
            advance()
            done += 1
            patience.tell(done, count)
    except StopIteration:
        if count is not None:
            raise BadInput(
                f"the data has {done:,} batches now in epoch {epoch}, and the position is after {count:,}: "
                "it is of other data."
            ) from None


def _unread(loader: Any, iterator: Any) -> Any | None:
    """What takes the numbers of the next batch and reads nothing; None where reading is more than that."""
    plain = isinstance(loader, DataLoader) and type(iterator).__name__ == "_SingleProcessDataLoaderIter"
    if not plain or isinstance(loader.dataset, IterableDataset):
        return None
    return getattr(iterator, "_next_index", None)


class _Patience:
    advised = False  # once a process

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._next = time.monotonic() + PATIENCE_S

    def tell(self, done: int, count: int | None) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PATIENCE_S
        of = "" if count is None else f" of {count:,}"
        say("ampwise: going back in the data: {:,}{} batches of epoch {} read", done, of, self._epoch)
        if not _Patience.advised:
            _Patience.advised = True
            say("ampwise: {}", ADVICE)


# --- random numbers ------------------------------------------------------------------------------------------------


@contextmanager
def _random_kept() -> Iterator[None]:
    before = captured(CPU)
    try:
        yield
    finally:
        restore_random(before, CPU)


def _parts(loader: Any) -> dict[str, Any]:
    """The loader and what it is made of, each once."""
    found = {"loader": loader}
    for name in PARTS:
        try:
            part = attrgetter(name)(loader)
        except AttributeError:
            continue
        if part is not None and all(part is not other for other in found.values()):
            found[name] = part
    return found


def _load_states(loader: Any, states: Mapping[str, Any]) -> list[str]:
    with _making_sense():
        return load_states(loader, states)


def _beginning(loader: Any) -> dict[str, Any]:
    """All that an epoch that begins now may draw from."""
    return {"random": captured(CPU), "generators": states_of(loader)}


def _begin_as(loader: Any, beginning: Mapping[str, Any]) -> None:
    with _making_sense():
        restore_random(beginning["random"], CPU)
        generators = beginning["generators"]
    _load_states(loader, generators)  # some come to be only when an epoch begins


@contextmanager
def _making_sense() -> Iterator[None]:
    """Around what is read from a position: it may come from a file."""
    try:
        yield
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadInput(f"this is no position in data: its state makes no sense ({error!r:.200}).") from error
