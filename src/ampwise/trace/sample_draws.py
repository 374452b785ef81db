"""Draw samples of a bad batch from their dataset again: which line of the dataset made the NaN?

The script must not notice: see ``Observation``. A sample that is cropped or augmented at random is drawn with the
random numbers that it had, where they are known, and else a few more times.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from io import IOBase
from itertools import count
from logging import Logger
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, dataloader, default_collate

from ampwise.trace.batch_origin import Observation
from ampwise.trace.call_arguments import outer_variables
from ampwise.trace.call_site import code_owner
from ampwise.trace.diagnosis import NAMED_SAMPLES
from ampwise.trace.failure import Failure
from ampwise.trace.failure_facts import DataOrigin
from ampwise.trace.numpy_errors import is_bad
from ampwise.trace.python_state import generator_restorer
from ampwise.trace.value_ranges import bytes_of, readable_values, version_of
from ampwise.train.random_state import capture_random, restore_random

__all__ = [
    "DrawnBatch",
    "Path",
    "draw_again",
    "generators_of",
    "is_safe_to_draw",
    "next_random_numbers",
    "note_floats",
    "reachable",
    "with_origin_in_loader",
]

MOST_DEPTH = 5
MOST_PARTS = 1000  # of a list in a batch, which may be strings
MOST_SECONDS = 10.0  # to draw samples
SECONDS_AGAIN = (
    3.0  # of this thread's CPU time, to draw a batch with the random numbers that it had, or samples with others
)
SLOWER = 5  # times that recording may slow down a dataset
MOST_TRIES = 1000
FEW_SAMPLES = 3  # bad samples of a batch to draw
MOST_OBJECTS = 1000  # of a dataset, in which to look for open iterators
CPU = torch.device("cpu")

Path = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class DrawnBatch:
    """A batch that a DataLoader has returned."""

    dataset: Any
    collate: Callable[[Any], Any]
    index: Any  # of its samples in the dataset: a list, or one index where the loader does not batch
    is_batched: bool
    tensors: list[tuple[Path, Tensor, int]]  # floating-point tensors with their versions
    bytes: int
    restores: Sequence[Callable[[], Any]] = ()  # set generators to where they were before it was drawn
    seconds: float = 0.0  # that it took

    @property
    def indices(self) -> list[Any]:
        return list(self.index) if self.is_batched else [self.index]

    def fetch(self, indices: Sequence[Any]) -> list[Any]:
        """Return these samples, as torch's fetcher does."""
        if self.is_batched and getattr(self.dataset, "__getitems__", None):
            return list(self.dataset.__getitems__(list(indices)))
        return [self.dataset[index] for index in indices]

    def collated(self, samples: list[Any]) -> Any:
        return self.collate(samples if self.is_batched else samples[0])

    @property
    def collates_by_default(self) -> bool:
        return self.collate is default_collate


def draw_again(batch: DrawnBatch, path: Path, bad: Tensor) -> DataOrigin | None:
    """Draw the bad samples of a batch again; None if they are finite now."""
    indices, values = batch.indices, readable_values(bad)
    rows: list[int] = []
    if batch.is_batched and values is not None and values.dim() and len(values) == len(indices):
        rows = values.isfinite().logical_not().reshape(len(values), -1).any(-1).nonzero().flatten().tolist()
    few = rows[:FEW_SAMPLES] or list(range(len(indices)))
    every = list(range(len(indices)))
    own = generators_of(batch.dataset, batch.collate)
    with Observation([batch.dataset, batch.collate, *own]) as seen:
        samples: dict[int, Any] = {}
        began, seconds = time.thread_time(), 0.0

        def draw(rows: Sequence[int]) -> Tensor | None:
            """Return what a batch of these samples has there; None if they take too long."""
            missing = [row for row in rows if row not in samples]
            if len(missing) * seconds > MOST_SECONDS:
                return None
            if missing:
                drawn = seen.run(lambda: batch.fetch([indices[row] for row in missing]))
                samples.update(zip(missing, drawn, strict=True))
            collated = seen.run(lambda: batch.collated([samples[row] for row in rows]), collates=True)
            return _at(collated, path)

        value, whole, tries = None, False, 1
        if batch.restores and batch.seconds * SLOWER < SECONDS_AGAIN:
            with suppress(Exception):
                for restore in batch.restores:
                    restore()
                value, whole = draw(every), True
        if value is None or not is_bad(value):
            began, whole = time.thread_time(), False
            samples.clear()
            seen.forget()
            samples |= zip(few[:1], seen.run(lambda: batch.fetch([indices[few[0]]])), strict=True)
            seconds = time.thread_time() - began
            with suppress(Exception):  # a custom function may need the whole batch
                value = draw(few)
        if (value is None or not is_bad(value)) and not batch.collates_by_default:
            value, whole = draw(every), True
        before = value
        while value is not None and not is_bad(value) and tries < MOST_TRIES:
            samples.clear()
            seen.forget()
            value, tries = draw(every if whole else few), tries + 1
            is_same = value is not None and before is not None and torch.equal(value, before)
            if (tries == 2 and is_same) or time.thread_time() > began + SECONDS_AGAIN:
                break
        if value is None or not is_bad(value):
            return None
        order = every if whole else few
        first = next((row for row in few if len(value) == len(order) and is_bad(value[order.index(row)])), few[0])
        if not rows:  # the samples cannot be told apart in the batch
            first = next((row for row in order if is_bad(samples[row])), first)
        dataset, index = _without_subsets(batch.dataset, indices[first])
        found = seen.origin_of(value, dataset, index, samples[first], path, batch.collate)
    named = [_without_subsets(batch.dataset, indices[row])[1] for row in rows[:NAMED_SAMPLES]]
    return replace(found, indices=tuple(map(repr, named)), tries=tries)


def with_origin_in_loader(failure: Failure, batch: Mapping[str, Tensor]) -> Failure:
    """Return the failure of a bad batch with a sample like it, if a DataLoader that is being read gives one.

    The indices of the batch are unknown, so all samples are drawn for a few seconds. Never raises.
    """
    source = failure.source
    tensor = None if source is None or source.what != "batch" else batch.get(source.name)
    if source is None or source.drawn is not None or source.made_at.file or tensor is None or not tensor.dim():
        return failure
    kinds = (dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter)
    loaders = [each for each in gc.get_objects() if type(each) in kinds]
    maps = [each for each in loaders if each._dataset_kind == dataloader._DatasetKind.Map and each._auto_collation]
    for loader in {id(each._dataset): each for each in maps}.values():
        with suppress(Exception, SystemExit):
            if is_safe_to_draw(loader._dataset, loader._collate_fn):
                drawn = _first_bad_sample(loader._dataset, loader._collate_fn, tensor)
                if drawn is not None:
                    return failure.but(source=replace(source, drawn=drawn))
    return failure


def _first_bad_sample(dataset: Any, collate: Any, like: Tensor) -> DataOrigin | None:
    """Draw samples until one is bad, in a tensor with as many dimensions; None if there is none."""
    generators = generators_of(dataset, collate)

    def bad_value(drawn: Any) -> tuple[Path, Tensor] | None:
        found: list[tuple[Path, Tensor, int]] = []
        note_floats(drawn, (), found)
        return next(((path, value) for path, value, _ in found if value.dim() == like.dim() and is_bad(value)), None)

    # Recorded from the first: what a dataset writes into its own tensors is restored with the record.
    with Observation([dataset, collate, *generators]) as seen:
        began, before = time.thread_time(), next_random_numbers(generators)
        for tries in count(1):
            for index in range(len(dataset)):
                seen.forget()
                sample = seen.run(lambda index=index: dataset[index])  # type: ignore[misc]
                drawn = bad_value(seen.run(lambda sample=sample: collate([sample]), collates=True))  # type: ignore[misc]
                if drawn is not None:
                    inner, at = _without_subsets(dataset, index)
                    origin = seen.origin_of(drawn[1], inner, at, sample, drawn[0], collate)
                    return replace(origin, is_example=True, tries=tries)
                if time.thread_time() > began + SECONDS_AGAIN:
                    return None
            if next_random_numbers(generators) == before:
                return None  # nothing is drawn at random
    return None


def _restores(generators: Sequence[Any]) -> list[Callable[[], Any]]:
    """Return functions that set these generators, and the global ones, to their present state."""
    own = [each for each in map(generator_restorer, generators) if each is not None]
    return [*own, partial(restore_random, capture_random(CPU), CPU)]


def next_random_numbers(generators: Sequence[Any]) -> list[float]:
    """Return the next random number of these generators and the global ones, which stay unchanged."""
    restores, numpy = _restores(generators), sys.modules.get("numpy")
    numbers = [random.random(), float(torch.rand(())), *([] if numpy is None else [float(numpy.random.random())])]
    for each in generators:
        is_torch = isinstance(each, torch.Generator)
        numbers.append(float(torch.rand((), generator=each)) if is_torch else float(each.random()))
    for restore in restores:
        restore()
    return numbers


def _without_subsets(dataset: Any, index: Any) -> tuple[Any, Any]:
    """Return the dataset inside of torch's subsets and concatenations, and the index there."""
    if isinstance(index, Tensor):
        index = index.item()
    while isinstance(dataset, Subset | ConcatDataset):
        if isinstance(dataset, Subset):
            dataset, index = dataset.dataset, dataset.indices[index]
        else:
            number = bisect_right(dataset.cumulative_sizes, index)
            dataset, index = dataset.datasets[number], index - [0, *dataset.cumulative_sizes][number]
    return dataset, index


def note_floats(value: Any, path: Path, found: list[tuple[Path, Tensor, int]]) -> int:
    """Add the floating-point tensors in a batch, each with the keys that lead to it. Return their bytes."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return 0
        found.append((path, value, version_of(value)))
        return bytes_of(value)
    pairs: Any = ()
    if len(path) < MOST_DEPTH:
        if isinstance(value, list | tuple):
            pairs = enumerate(value) if len(value) <= MOST_PARTS else ()
        elif isinstance(value, Mapping):
            pairs = value.items()
    size = 0
    for key, each in pairs:
        size += note_floats(each, (*path, key), found)
    return size


def _at(value: Any, path: Path) -> Tensor | None:
    for key in path:
        value = value[key]
    return value if isinstance(value, Tensor) else None


def is_safe_to_draw(dataset: Any, collate: Any) -> bool:
    """Return whether drawing from a dataset advances no iterator, open file or queue that the script reads.

    They are looked for among the attributes of both, and the variables that their functions use.
    """
    every = reachable(dataset, collate)
    return not any(isinstance(each, Iterator | IOBase) or hasattr(type(each), "get_nowait") for each in every)


def generators_of(dataset: Any, collate: Any) -> list[Any]:
    """Return the random generators that a dataset has for itself."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds = (*kinds, numpy.random.Generator, numpy.random.RandomState)
    return [each for each in reachable(dataset, collate) if isinstance(each, kinds)]


def reachable(dataset: Any, collate: Any) -> Iterator[Any]:
    """Yield the attributes of both, what these hold, and the variables that their functions use."""
    seen: set[int] = set()
    pending = [dataset, collate, *(each for kind in type(dataset).__mro__ for each in vars(kind).values())]
    while pending and len(seen) < MOST_OBJECTS:
        each = pending.pop(0)
        if id(each) in seen or any(each is stream for stream in (sys.stdout, sys.stderr)):
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, list | tuple | dict | set):
            inner = list(each.values() if isinstance(each, dict) else each) if len(each) <= MOST_OBJECTS else []
            pending += inner
        elif isinstance(each, MethodType | BuiltinMethodType):
            pending.append(each.__self__)
        elif isinstance(each, FunctionType):
            pending += list(outer_variables(each).values()) if code_owner(each.__code__.co_filename) == "own" else []
        elif hasattr(each, "__dict__") and not isinstance(each, type | ModuleType | Tensor | Logger):
            pending += list(vars(each).values())
