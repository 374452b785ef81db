"""Sources of batches, and how each kind returns to a place: by its own state, or by counting.

A loader with ``state_dict`` and ``load_state_dict`` restores itself. For any other loader, the random state at the
start of the epoch is saved, including generators that the loader and its parts hold: to return, the epoch starts again
with that state, and the batches before the place are skipped, without reading them where possible. Not supported: one
generator that both the data order and the training draw from during an epoch.
"""

from __future__ import annotations

import copy
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from ampwise.errors import BadInput
from ampwise.finding.log import log
from ampwise.train.random_state import capture_random, restore_random

CPU = torch.device("cpu")
PARTS = ("sampler", "batch_sampler", "batch_sampler.sampler", "dataset")  # of a loader, that may also have set_epoch
PATIENCE_S = 5.0  # after which progress is printed
ADVICE = "torchdata.stateful_dataloader.StatefulDataLoader saves its position and returns to it at once."

# The search for generators.
DEEPEST = 8  # levels of attributes
MOST_OBJECTS = 2_000  # objects visited
LONGEST = 100  # items of a list or dict: longer ones hold samples
RUNNING = "_iterator"  # attribute of a DataLoader with its workers and queues
POSITIONS = {"pos": 624, "buffer_pos": 4}  # limits in numpy's states: numpy reads memory at any number given
LEAVES = (str, bytes, int, float, complex, bool, torch.Tensor, ModuleType, type)


class DataPlace(NamedTuple):
    """Place in the data: after ``done`` batches of an epoch. ``over``: the epoch has ended."""

    epoch: int
    done: int
    over: bool


class BatchSource:
    """A kind of loader. This base is for one-shot iterators, which cannot go back."""

    kind = "iterator"
    rewinds = False

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._done = 0
        self.unrestored: Sequence[str] = ()  # generators found only in the loader or only in the last position

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._loader)
        self._done += 1
        return batch

    def begin(self, epoch: int) -> Iterator[Any]:
        """Start a new epoch."""
        return self

    def state(self, done: int) -> dict[str, Any]:
        """Return the state to save in a position; it does not change later."""
        return {}

    def go_to(self, place: DataPlace, state: Mapping[str, Any]) -> Iterator[Any] | None:
        """Return the batches from a place on; None between epochs. The random state of the process does not change."""
        with _random_state_kept():
            _skip_batches(self._loader, self, place.epoch, place.done - self._done)
        return self


class _Stateful(BatchSource):
    kind, rewinds = "stateful", True

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        # Random state at the epoch's start: samplers without a state redraw from it.
        self._begin: dict[str, Any] | None = None

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
            try:
                if own is not None:
                    self._loader.load_state_dict(copy.deepcopy(own))
                elif self._begin is not None:
                    self._loader.load_state_dict({})  # resets a StatefulDataLoader to its start
                if place.over and isinstance(self._loader, DataLoader):
                    # A StatefulDataLoader whose epoch is over starts twice: once here, where its draws do not count.
                    iter(self._loader)
                iterator = iter(self._loader) if place.done > 0 and not place.over else None
            except Exception as error:  # third-party code may raise anything
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                raise BadInput(f"the {type(self._loader).__name__} cannot load its saved state ({reason}).") from error
        self.unrestored = _load_states(self._loader, generators)
        self._begin = begin
        return iterator


class _Counted(BatchSource):
    rewinds = True

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.kind = "loader" if isinstance(loader, DataLoader) else "iterable"
        self._persistent = isinstance(loader, DataLoader) and loader.persistent_workers
        # Random state at the start of the current epoch; with persistent workers, of all epochs since they started.
        self._begins: list[dict[str, Any]] = []

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
                epoch = place.epoch - ago
                set_epoch(self._loader, epoch)
                _restore_start(self._loader, begins[-1 - ago])
                iterator = iter(self._loader)
                _skip_batches(self._loader, iterator, epoch, None if ago else place.done)
        self.unrestored = _load_states(self._loader, generators)
        self._begins = begins
        return None if place.over else iterator

    def _end_workers(self) -> None:
        if self._persistent:
            self._loader._iterator = None  # else the workers would continue with their current random state


def source_of(loader: Any) -> BatchSource:
    """Return the source for a loader: the first kind that fits."""
    inner = getattr(loader, "base_dataloader", loader)  # Accelerate's wrapper has methods that its loader may lack
    if callable(getattr(inner, "state_dict", None)) and callable(getattr(inner, "load_state_dict", None)):
        return _Stateful(loader)
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise BadInput(f"Data({type(loader).__name__}): expected a loader, a list or an iterator.")
    if hasattr(loader, "__next__") and iter(loader) is loader:
        return BatchSource(loader)
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
    """Call ``set_epoch`` on the loader and its parts that have it: torch's DistributedSampler, streamed datasets."""
    seen: list[Any] = []
    for name in ("", *PARTS):
        try:
            part = attrgetter(name)(loader) if name else loader
        except AttributeError:
            continue
        if part is None or any(part is other for other in seen):
            continue
        seen.append(part)
        if callable(method := getattr(part, "set_epoch", None)):
            method(epoch)


# --- skipping batches ----------------------------------------------------------------------------------------------


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
        log("info", "skipping to the saved position in the data: {:,}{} batches of epoch {}", done, of, self._epoch)
        if not _Progress.advised:
            _Progress.advised = True
            log("info", "{}", ADVICE)


def _skip_batches(loader: Any, iterator: Iterator[Any], epoch: int, count: int | None) -> None:
    """Skip ``count`` batches; None: the whole epoch."""
    advance: Any = iterator.__next__
    is_plain = isinstance(loader, DataLoader) and type(iterator).__name__ == "_SingleProcessDataLoaderIter"
    if is_plain and not isinstance(loader.dataset, IterableDataset):
        advance = getattr(iterator, "_next_index", advance)  # advances the sampler without reading a batch
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


# --- random numbers ------------------------------------------------------------------------------------------------


@contextmanager
def _random_state_kept() -> Iterator[None]:
    before = capture_random(CPU)
    try:
        yield
    finally:
        restore_random(before, CPU)


@contextmanager
def _invalid_as_bad_input() -> Iterator[None]:
    """Turn errors from an invalid position, which may come from a file, into BadInput."""
    try:
        yield
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadInput(f"not a position in data: its state is invalid ({error!r:.200}).") from error


def _capture_start(loader: Any) -> dict[str, Any]:
    """Capture the random state that an epoch starting now would draw from."""
    return {"random": capture_random(CPU), "generators": states_of(loader)}


def _restore_start(loader: Any, start: Mapping[str, Any]) -> None:
    with _invalid_as_bad_input():
        restore_random(start["random"], CPU)
        generators = start["generators"]
    _load_states(loader, generators)  # some generators are created only when an epoch starts


# --- generators that a loader's parts hold: samplers, datasets, transforms, collators ------------------------------
#
# They are found by walking attributes, so that a sampler with ``self.rng = random.Random(0)`` continues exactly in a
# resumed run. The global generators of Python, numpy and torch are saved with the engine's state.


def states_of(loader: Any) -> dict[str, Any]:
    """Return the state of each generator, by its attribute path such as "sampler.rng"."""
    states: dict[str, Any] = {}
    for name, generator in _saveable(loader).items():
        if isinstance(generator, torch.Generator):
            states[name] = generator.get_state()
        elif isinstance(generator, random.Random):
            states[name] = generator.getstate()
        elif hasattr(generator, "bit_generator"):
            states[name] = generator.bit_generator.state
        else:
            states[name] = generator.get_state(legacy=False)
    return states


def unsaveable(loader: Any) -> list[str]:
    """Return the paths of generators that draw from the operating system and cannot be restored."""
    return [name for name, each in _generators(loader).items() if isinstance(each, random.SystemRandom)]


def _load_states(loader: Any, states: Mapping[str, Any]) -> list[str]:
    """Restore generators from ``states``; return the names found only in the loader or only in ``states``."""
    with _invalid_as_bad_input():
        found = _saveable(loader)
        for name, generator in found.items():
            if name not in states:
                continue
            state = states[name]
            if isinstance(generator, torch.Generator):
                generator.set_state(state)
                continue
            if isinstance(generator, random.Random):
                generator.setstate(state)
                continue
            for key, value in [*state.items(), *state["state"].items()]:
                if key in POSITIONS and not 0 <= value <= POSITIONS[key]:
                    raise ValueError("invalid state of a numpy generator")
            if hasattr(generator, "bit_generator"):
                generator.bit_generator.state = state
            else:
                generator.set_state(state)
        return sorted(found.keys() ^ states.keys())


def _saveable(loader: Any) -> dict[str, Any]:
    return {name: each for name, each in _generators(loader).items() if not isinstance(each, random.SystemRandom)}


def _generators(loader: Any) -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (random.Random, torch.Generator)
    known = {id(random._inst), id(torch.default_generator)}
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
        known.add(id(numpy.random.mtrand._rand))
    found: dict[str, Any] = {}
    pending: deque[tuple[str, Any, int]] = deque([("", loader, 0)])
    seen = 0
    while pending and seen < MOST_OBJECTS:
        name, value, depth = pending.popleft()
        if id(value) in known:
            continue
        known.add(id(value))
        seen += 1
        if isinstance(value, kinds):
            found[name] = value
        elif depth < DEEPEST:
            pending.extend((f"{name}.{key}".lstrip("."), each, depth + 1) for key, each in _held_by(value))
    return found


def _held_by(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object without running any of its code."""
    if isinstance(value, Mapping):
        items: Any = value.items() if type(value) is dict and len(value) <= LONGEST else ()
    elif isinstance(value, list | tuple):
        items = enumerate(value) if len(value) <= LONGEST else ()
    elif isinstance(value, MethodType):
        items = [("self", value.__self__)]
    elif isinstance(value, partial):
        items = [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    elif isinstance(value, FunctionType):
        names = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        items = [(key, _content(cell)) for key, cell in names]
    else:
        held = getattr(value, "__dict__", None)
        items = [(key, each) for key, each in held.items() if key != RUNNING] if type(held) is dict else ()
    return ((str(key), each) for key, each in items if not isinstance(each, LEAVES) and each is not None)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
