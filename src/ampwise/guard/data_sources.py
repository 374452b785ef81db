"""Sources of batches, and how each kind returns to a place: by its own state, or by counting.

A loader with ``state_dict`` and ``load_state_dict`` restores itself. For any other loader, the random state at the
start of the epoch is saved, including generators that the loader and its parts hold: to return, the epoch starts again
with that state, and the batches before the place are skipped, without reading them where possible. Not supported: one
generator that both the data order and the training draw from during an epoch.
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
from ampwise.finding.terminal import log_line
from ampwise.guard.loader_generators import load_states, states_of
from ampwise.train.random_state import capture_random, restore_random

__all__ = ["BatchSource", "DataPlace", "batches_per_epoch", "set_epoch", "source_of"]

CPU = torch.device("cpu")
PARTS = ("sampler", "batch_sampler", "batch_sampler.sampler", "dataset")  # of a loader, that may also have set_epoch
PATIENCE_S = 5.0  # after which progress is printed
ADVICE = "torchdata.stateful_dataloader.StatefulDataLoader saves its position and returns to it at once."


class DataPlace(NamedTuple):
    """Place in the data: after ``done`` batches of an epoch. ``over``: the epoch has ended."""

    epoch: int
    done: int
    over: bool


class BatchSource(Protocol):
    """Interface to a kind of loader."""

    kind: str
    rewinds: bool
    unrestored: Sequence[str]  # generators found only in the loader or only in the last position

    def begin(self, epoch: int) -> Iterator[Any]:
        """Start a new epoch."""

    def state(self, done: int) -> dict[str, Any]:
        """Return the state to save in a position; it does not change later."""

    def go_to(self, place: DataPlace, state: Mapping[str, Any]) -> Iterator[Any] | None:
        """Return the batches from a place on; None between epochs. The random state of the process does not change."""


def source_of(loader: Any) -> BatchSource:
    """Return the source for a loader: the first kind that fits."""
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return _Stateful(loader)
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise BadInput(f"Data({type(loader).__name__}): expected a loader, a list or an iterator.")
    if hasattr(loader, "__next__") and iter(loader) is loader:
        return _OneShot(loader)
    return _Counted(loader)


def batches_per_epoch(loader: Any) -> int | None:
    """Return the number of batches in an epoch; None if unknown."""
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None  # len() is a guess there, and torch warns if it was wrong
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def set_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` on the loader's parts that have it: torch's DistributedSampler, streamed datasets."""
    for part in _parts(loader).values():
        method = getattr(part, "set_epoch", None)
        if callable(method):
            method(epoch)


class _Stateful:
    kind, rewinds = "stateful", True

    def __init__(self, loader: Any) -> None:
        self.unrestored: Sequence[str] = ()
        self._loader = loader
        self._begin: dict[str, Any] | None = (
            None  # random state at the epoch's start: samplers without a state redraw from it
        )

    def begin(self, epoch: int) -> Iterator[Any]:
        set_epoch(self._loader, epoch)
        self._begin = _capture_start(self._loader)
        return iter(self._loader)

    def state(self, done: int) -> dict[str, Any]:
        # Before its first batch, state_dict() would start a StatefulDataLoader and draw random numbers.
        not_started = done == 0 and isinstance(self._loader, DataLoader)
        state = None if not_started else copy.deepcopy(self._loader.state_dict())
        return {"loader": state, "begin": self._begin, "generators": states_of(self._loader)}

    def go_to(self, place: DataPlace, state: Mapping[str, Any]) -> Iterator[Any] | None:
        with _invalid_as_bad_input():
            own, begin, generators = state["loader"], state["begin"], state["generators"]
        set_epoch(self._loader, place.epoch)
        with _random_state_kept():
            if begin is not None:
                _restore_start(self._loader, begin)
            iterator = self._loaded(place, own)
        self.unrestored = _load_states(self._loader, generators)
        self._begin = begin
        return iterator

    def _loaded(self, place: DataPlace, state: Any) -> Iterator[Any] | None:
        try:
            if state is not None:
                self._loader.load_state_dict(copy.deepcopy(state))
            elif self._begin is not None:
                self._loader.load_state_dict({})  # resets a StatefulDataLoader to its start
            if place.over:
                self._use_up()
            return iter(self._loader) if place.done > 0 and not place.over else None
        except Exception as error:  # third-party code may raise anything
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            raise BadInput(f"the {type(self._loader).__name__} cannot load its saved state ({reason}).") from error

    def _use_up(self) -> None:
        """Start a StatefulDataLoader whose epoch is over once, here, where its random draws do not count: it starts
        twice."""
        if isinstance(self._loader, DataLoader):
            iter(self._loader)


class _Counted:
    rewinds = True

    def __init__(self, loader: Any) -> None:
        self.unrestored: Sequence[str] = ()
        self._loader = loader
        self.kind = "loader" if isinstance(loader, DataLoader) else "iterable"
        # Random state at the start of the current epoch; with persistent workers, of all epochs since they started.
        self._begins: list[dict[str, Any]] = []

    @property
    def _persistent(self) -> bool:
        return isinstance(self._loader, DataLoader) and self._loader.persistent_workers

    def begin(self, epoch: int) -> Iterator[Any]:
        set_epoch(self._loader, epoch)
        if not self._begins:
            self._end_workers()
        before = self._begins if self._persistent else []
        self._begins = [*before, _capture_start(self._loader)]
        return iter(self._loader)

    def state(self, done: int) -> dict[str, Any]:
        return {"begins": self._begins, "generators": states_of(self._loader)}

    def go_to(self, place: DataPlace, state: Mapping[str, Any]) -> Iterator[Any] | None:
        with _invalid_as_bad_input():
            begins, generators = list(state["begins"]), state["generators"]
        begins = begins if self._persistent else begins[-1:]
        self._end_workers()
        iterator: Iterator[Any] | None = None
        with _random_state_kept():
            for ago in reversed(range(len(begins))):
                iterator = self._restart_epoch(place.epoch - ago, begins[-1 - ago])
                _skip_batches(self._loader, iterator, place.epoch - ago, None if ago else place.done)
        self.unrestored = _load_states(self._loader, generators)
        self._begins = begins
        return None if place.over else iterator

    def _restart_epoch(self, epoch: int, begin: Mapping[str, Any]) -> Iterator[Any]:
        set_epoch(self._loader, epoch)
        _restore_start(self._loader, begin)
        return iter(self._loader)

    def _end_workers(self) -> None:
        if self._persistent:
            self._loader._iterator = None  # else the workers would continue with their current random state


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

    def go_to(self, place: DataPlace, state: Mapping[str, Any]) -> Iterator[Any] | None:
        with _random_state_kept():
            _skip_batches(self._loader, self, place.epoch, place.done - self._done)
        return self


# --- skipping batches ----------------------------------------------------------------------------------------------


def _skip_batches(loader: Any, iterator: Iterator[Any], epoch: int, count: int | None) -> None:
    """Skip ``count`` batches; None: the whole epoch."""
    advance = _skip_function(loader, iterator) or iterator.__next__
    progress = _Progress(epoch)
    done = 0
    try:
        while count is None or done < count:
            advance()
            done += 1
            progress.report(done, count)
    except StopIteration:
        if count is not None:
            raise BadInput(
                f"the data has {done:,} batches in epoch {epoch}, and the position is after {count:,}: "
                "it belongs to other data."
            ) from None


def _skip_function(loader: Any, iterator: Any) -> Any | None:
    """Return a function that advances the sampler without reading a batch; None if that is not possible."""
    plain = isinstance(loader, DataLoader) and type(iterator).__name__ == "_SingleProcessDataLoaderIter"
    if not plain or isinstance(loader.dataset, IterableDataset):
        return None
    return getattr(iterator, "_next_index", None)


class _Progress:
    """Prints progress while batches are skipped, if that takes long."""

    advised = False  # once per process

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._next = time.monotonic() + PATIENCE_S

    def report(self, done: int, count: int | None) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PATIENCE_S
        of = "" if count is None else f" of {count:,}"
        log_line(
            "ampwise: skipping to the saved position in the data: {:,}{} batches of epoch {}", done, of, self._epoch
        )
        if not _Progress.advised:
            _Progress.advised = True
            log_line("ampwise: {}", ADVICE)


# --- random numbers ------------------------------------------------------------------------------------------------


@contextmanager
def _random_state_kept() -> Iterator[None]:
    before = capture_random(CPU)
    try:
        yield
    finally:
        restore_random(before, CPU)


def _parts(loader: Any) -> dict[str, Any]:
    """Return the loader and its parts by name, each once."""
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
    with _invalid_as_bad_input():
        return load_states(loader, states)


def _capture_start(loader: Any) -> dict[str, Any]:
    """Capture the random state that an epoch starting now would draw from."""
    return {"random": capture_random(CPU), "generators": states_of(loader)}


def _restore_start(loader: Any, start: Mapping[str, Any]) -> None:
    with _invalid_as_bad_input():
        restore_random(start["random"], CPU)
        generators = start["generators"]
    _load_states(loader, generators)  # some generators are created only when an epoch starts


@contextmanager
def _invalid_as_bad_input() -> Iterator[None]:
    """Turn errors from an invalid position, which may come from a file, into BadInput."""
    try:
        yield
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadInput(f"not a position in data: its state is invalid ({error!r:.200}).") from error
