"""Batches of DataLoaders, to draw a bad one again when it is explained: which line of the dataset made the NaN?

Of the last few batches the indices of their samples are kept, and their tensors by reference. Only a map-style dataset
can be drawn from again. The script must not notice: see ``observe``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import dataloader

from ampwise.trace.batch_origin import GUARD
from ampwise.trace.call_site import own_files
from ampwise.trace.failure import Failure
from ampwise.trace.failure_facts import BadTensor, DataOrigin
from ampwise.trace.numpy_errors import KINDS
from ampwise.trace.op_inspection import values_of
from ampwise.trace.python_state import generator_restorer
from ampwise.trace.sample_draws import DrawnBatch, Path, draw_again, generators_of, is_safe_to_draw, note_floats
from ampwise.trace.value_ranges import readable_values, version_of
from ampwise.train.random_state import HostRandomUse, restore_random
from ampwise.watch.numpy_warnings import NumpyWarnings
from ampwise.watch.patches import Patches
from ampwise.watch.spread_division import with_spread_division

__all__ = ["BatchDraws"]

MOST = 8  # batches to keep
MOST_BYTES = 2**28  # of their tensors: they stay in memory a little longer
MOST_DRAWS = 2  # in a run
SORTED = 2**22  # values
CPU = torch.device("cpu")
BY_NUMPY = "numpy computed an invalid value"


class _Asked:
    """Batches that a loader was asked for and has not returned yet."""

    def __init__(self, iterator: Any) -> None:
        self._draws_here = not iterator._num_workers
        self._generators = generators_of(iterator._dataset, iterator._collate_fn) if self._draws_here else []
        self._host = HostRandomUse()
        self._pending: deque[tuple[Any, dict[str, Any], list[Callable[[], Any]], float]] = deque()

    def add(self, index: Any) -> None:
        """Note the samples of the next batch, and the random numbers that they will be drawn with."""
        state = self._host.begin(CPU) if self._draws_here else {}
        restores = [each for each in map(generator_restorer, self._generators) if each is not None]
        self._pending.append((index, state, restores, time.monotonic()))

    def take(self) -> tuple[Any, Sequence[Callable[[], Any]], float] | None:
        """Return the samples of the next batch, functions that restore its random numbers, and the seconds it took."""
        if not self._pending:
            return None
        index, state, restores, began = self._pending.popleft()
        if state:
            self._host.end(state)
            restores.append(partial(restore_random, state, CPU))
        return index, restores, time.monotonic() - began


class BatchDraws:
    """The last batches of DataLoaders in this process, and what drawing a bad one again has shown."""

    def __init__(self) -> None:
        self._asked: WeakKeyDictionary[Any, _Asked] = WeakKeyDictionary()  # by iterator
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
            self._asked[iterator] = _Asked(iterator)  # an iterator of persistent workers begins again
        index = original(iterator)
        asked = self._asked.get(iterator)
        if asked is not None:
            asked.add(index)
        return index

    def batch_returned(self, iterator: Any, batch: Any) -> None:
        """Keep what ``__next__`` has returned; None if it failed."""
        asked = self._asked.get(iterator)
        taken = None if asked is None else asked.take()
        if taken is not None:
            try:
                self._keep(iterator, *taken, batch)
            except Exception:  # from a class of the script's own
                self._batches.clear()

    def _keep(
        self, iterator: Any, index: Any, restores: Sequence[Callable[[], Any]], seconds: float, data: Any
    ) -> None:
        is_map = iterator._dataset_kind == dataloader._DatasetKind.Map
        if not is_map or not getattr(iterator, "_in_order", True):
            return
        tensors: list[tuple[Path, Tensor, int]] = []
        size = note_floats(data, (), tensors)
        batches, from_dataset = self._batches, (iterator._dataset, iterator._collate_fn)
        drawn = DrawnBatch(*from_dataset, index, iterator._auto_collation, tensors, size, restores, seconds)
        batches.append(drawn)
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
        if source is None:
            return failure
        if source.what not in ("batch", "other"):
            if failure.step != 1 or len(self._numpy.sites) != 1:
                return failure
            (site,) = self._numpy.sites  # before the first step
            return failure.but(source=replace(source, made_at=site, made_by=BY_NUMPY))
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

    def origin_of(self, tensor: Tensor) -> DataOrigin | None:
        """Return where a bad tensor came from, if a loader has given it."""
        return self._origin(BadTensor(what="batch", values=values_of(tensor)), tensor) if self else None

    def dataset_of(self, tensor: Tensor) -> Any:
        """Return the dataset that a loader has drawn a bad tensor from; None if no loader has."""
        source = BadTensor(what="batch", values=values_of(tensor))
        for batch in reversed(self._batches):
            for _, given, version in batch.tensors:
                if version_of(given) == version and _is_same(given, tensor, source):
                    return batch.dataset
        return None

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
                    found = draw_again(batch, path, given)
                    if found is not None:
                        self._known[key] = found
                        return found
                return None
        return None


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
