"""Batches of DataLoaders, to draw a bad one again when it is explained: which line of the dataset made the NaN?

Of the last few batches the indices of their samples are kept, and their tensors by reference. Only a map-style dataset
can be drawn from again. The script must not notice: see ``observe``.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import IOBase
from logging import Logger
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, dataloader, default_collate

from ampwise.trace.call_arguments import outer_variables
from ampwise.trace.call_site import code_owner, own_files
from ampwise.trace.diagnosis import NAMED_SAMPLES
from ampwise.trace.failure import Failure
from ampwise.trace.failure_facts import BadTensor, DataOrigin
from ampwise.trace.op_inspection import values_of
from ampwise.trace.value_ranges import bytes_of, readable_values
from ampwise.watch.batch_origin import GUARD, Observation
from ampwise.watch.inspection import version_of
from ampwise.watch.numpy_errors import KINDS, NumpyWarnings, is_bad
from ampwise.watch.patches import Patches
from ampwise.watch.spread_division import with_spread_division

__all__ = ["BatchDraws", "is_safe_to_draw"]

MOST = 8  # batches to keep
MOST_BYTES = 2**28  # of their tensors: they stay in memory a little longer
MOST_DEPTH = 5
MOST_PARTS = 1000  # of a list in a batch, which may be strings
MOST_DRAWS = 2  # in a run
MOST_SECONDS = 10.0  # to draw samples
FEW_SAMPLES = 3  # bad samples of a batch to draw
MOST_OBJECTS = 1000  # of a dataset, in which to look for open iterators
SORTED = 2**22  # values

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


class BatchDraws:
    """The last batches of DataLoaders in this process, and what drawing a bad one again has shown."""

    def __init__(self) -> None:
        self._asked: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()  # indices, by iterator
        self._batches: deque[DrawnBatch] = deque()
        self._known: dict[tuple[int, Path], DataOrigin] = {}  # by dataset and tensor
        self._draws = 0
        self._numpy = NumpyWarnings()

    def __bool__(self) -> bool:
        """Whether DataLoaders have given batches."""
        return bool(self._batches)

    def install(self, patches: Patches) -> None:
        self._numpy.install(patches)
        patches.wrap(dataloader._BaseDataLoaderIter, "_next_index", self.index_taken)

    def forget(self) -> None:
        self._batches.clear()
        self._asked.clear()

    # At each batch

    def index_taken(self, original: Callable[..., Any], iterator: Any) -> Any:
        if iterator._num_yielded == 0 and getattr(iterator, "_send_idx", 0) == 0:
            self._asked[iterator] = deque()  # an iterator of persistent workers begins again
        index = original(iterator)
        asked = self._asked.get(iterator)
        if asked is not None:
            asked.append(index)
        return index

    def batch_returned(self, iterator: Any, batch: Any) -> None:
        """Keep what ``__next__`` has returned; None if it failed."""
        asked = self._asked.get(iterator)
        index = asked.popleft() if asked else None
        if index is not None:
            try:
                self._keep(iterator, index, batch)
            except Exception:  # from a class of the script's own
                self._batches.clear()

    def _keep(self, iterator: Any, index: Any, data: Any) -> None:
        is_map = iterator._dataset_kind == dataloader._DatasetKind.Map
        if not is_map or not getattr(iterator, "_in_order", True):
            return
        tensors: list[tuple[Path, Tensor, int]] = []
        size = _note_floats(data, (), tensors)
        batches, dataset = self._batches, iterator._dataset
        batches.append(DrawnBatch(dataset, iterator._collate_fn, index, iterator._auto_collation, tensors, size))
        # Shared memory of worker processes may be scarce.
        most = 1 if iterator._num_workers and not iterator._pin_memory else MOST
        while len(batches) > most or (len(batches) > 1 and sum([each.bytes for each in batches]) > MOST_BYTES):
            batches.popleft()

    # Explaining

    def explained(self, failure: Failure, batch: Mapping[str, Tensor]) -> Failure:
        """Return the failure with where a bad tensor of the batch came from, if that can be found. Never raises.

        batch: the tensors of the step by name.
        """
        source = failure.source
        if source is None or source.what not in ("batch", "other"):
            return failure
        drawn = None
        with suppress(Exception, SystemExit):
            drawn = self._origin(source, batch.get(source.name))
        if not self._numpy.sites and (drawn is None or drawn.how != "computed"):
            known = failure if drawn is None else failure.but(source=replace(source, drawn=drawn))
            with suppress(Exception):
                return with_spread_division(known, own_files())
        if len(self._numpy.sites) == 1 and (drawn is None or drawn.how != "computed"):
            ((site, kind),) = self._numpy.sites.items()
            if drawn is None:
                return failure.but(source=replace(source, made_at=site))
            cause = "; ".join(filter(None, (f"NumPy has warned of {KINDS[kind]}", drawn.cause)))
            drawn = replace(drawn, how="computed", cause=cause, fix=GUARD, site=site)
        return failure if drawn is None else failure.but(source=replace(source, drawn=drawn))

    def _origin(self, source: BadTensor, tensor: Tensor | None) -> DataOrigin | None:
        for batch in reversed(self._batches):
            for path, given, version in batch.tensors:
                if version_of(given) != version or not _is_same(given, tensor, source):
                    continue
                key = id(batch.dataset), path
                if self._draws >= MOST_DRAWS:
                    return self._known.get(key)
                self._draws += 1
                if is_safe_to_draw(batch.dataset, batch.collate):
                    found = _draw(batch, path, given)
                    if found is not None:
                        self._known[key] = found
                        return found
                return None
        return None


def _draw(batch: DrawnBatch, path: Path, bad: Tensor) -> DataOrigin | None:
    """Draw the bad samples of a batch again; None if they are finite now."""
    indices, values = batch.indices, readable_values(bad)
    rows: list[int] = []
    if batch.is_batched and values is not None and values.dim() and len(values) == len(indices):
        rows = values.isfinite().logical_not().reshape(len(values), -1).any(-1).nonzero().flatten().tolist()
    few = rows[:FEW_SAMPLES] or list(range(len(indices)))
    with Observation([batch.dataset, batch.collate]) as seen:
        began = time.monotonic()
        samples = dict(zip(few[:1], seen.run(lambda: batch.fetch([indices[few[0]]])), strict=True))
        seconds = time.monotonic() - began

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

        value = None
        with suppress(Exception):  # a custom function may need the whole batch
            value = draw(few)
        whole = (value is None or not is_bad(value)) and not batch.collates_by_default
        if whole:
            value = draw(range(len(indices)))
        if value is None or not is_bad(value):
            return None
        order = list(range(len(indices))) if whole else few
        first = next((row for row in few if len(value) == len(order) and is_bad(value[order.index(row)])), few[0])
        if not rows:  # the samples cannot be told apart in the batch
            first = next((row for row in order if is_bad(samples[row])), first)
        dataset, index = _without_subsets(batch.dataset, indices[first])
        found = seen.origin_of(value, dataset, index, samples[first], path, batch.collate)
    named = [_without_subsets(batch.dataset, indices[row])[1] for row in rows[:NAMED_SAMPLES]]
    return replace(found, indices=tuple(map(repr, named)))


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


def _is_same(given: Tensor, tensor: Tensor | None, source: BadTensor) -> bool:
    """Return whether the bad tensor of a step is one that a loader gave, perhaps on another device or in another order.

    tensor: None where only its summary is known.
    """
    values = readable_values(given)
    if values is None or bool(values.isfinite().all()):
        return False
    if tensor is None:
        summary = source.values
        return summary is not None and values_of(given) == replace(summary, name="")
    if tensor.layout == torch.strided and given.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        return True
    if given.numel() != tensor.numel():
        return False
    one, other = given.detach().to(tensor.device, tensor.dtype).flatten(), tensor.detach().flatten()
    if one.numel() <= SORTED and given.shape != tensor.shape:
        one, other = one.sort().values, other.sort().values
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _note_floats(value: Any, path: Path, found: list[tuple[Path, Tensor, int]]) -> int:
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
        size += _note_floats(each, (*path, key), found)
    return size


def _at(value: Any, path: Path) -> Tensor | None:
    for key in path:
        value = value[key]
    return value if isinstance(value, Tensor) else None


def is_safe_to_draw(dataset: Any, collate: Any) -> bool:
    """Return whether drawing from a dataset advances no iterator, open file or queue that the script reads.

    They are looked for among the attributes of both, and the variables that their functions use.
    """
    seen: set[int] = set()
    pending = [dataset, collate, *(each for kind in type(dataset).__mro__ for each in vars(kind).values())]
    while pending and len(seen) < MOST_OBJECTS:
        each = pending.pop(0)
        if id(each) in seen or any(each is stream for stream in (sys.stdout, sys.stderr)):
            continue
        seen.add(id(each))
        if isinstance(each, Iterator | IOBase) or hasattr(type(each), "get_nowait"):
            return False
        if isinstance(each, list | tuple | dict | set):
            inner = list(each.values() if isinstance(each, dict) else each) if len(each) <= MOST_OBJECTS else []
            pending += inner
        elif isinstance(each, FunctionType):
            pending += list(outer_variables(each).values()) if code_owner(each.__code__.co_filename) == "own" else []
        elif hasattr(each, "__dict__") and not isinstance(each, type | ModuleType | Tensor | Logger):
            pending += list(vars(each).values())
    return True
