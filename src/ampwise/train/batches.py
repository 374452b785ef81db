"""Batches of a loader by accumulation window, and pieces of a batch, which need less memory one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampwise.errors import BadInput
from ampwise.train.accumulator import Accumulator, Weight

__all__ = ["BatchPiece", "WindowedBatches", "batch_length", "split_batch"]


class WindowedBatches:
    """Batches of a loader, fetched one accumulation window at a time, so that the end of the data is known early."""

    def __init__(self, loader: Iterable[Any], window: Accumulator, flush: Callable[[], Any]) -> None:
        self._loader, self._window, self._flush = loader, window, flush

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True  # without calling len(), which the loader may not have

    def __iter__(self) -> Iterator[Any]:
        source, window = iter(self._loader), self._window
        seen, length = window.seen, window.length
        try:
            while batches := list(islice(source, window.remaining)):
                window.expect(len(batches))
                yield from batches
        finally:
            trained = window.seen != seen  # else batches were only read, maybe within an open window
            window.length = window.size if trained else length  # the loop may have ended early
        if trained:
            self._flush()  # in case a batch was skipped


class BatchPiece(NamedTuple):
    """Part of a batch, and its share of the whole."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    share: Weight

    def weighed(self, weight: Weight | None, total: Weight | None) -> BatchPiece:
        """Return the piece with its share by weight; share 0 in a batch of weight 0, unchanged without weights."""
        if weight is None or total is None:
            return self
        if isinstance(weight, Tensor) or isinstance(total, Tensor):
            share: Weight = torch.nan_to_num(torch.as_tensor(weight / total), nan=0.0)
        else:
            share = weight / total if total else 0.0
        return self._replace(share=share)

    def counted(self, loss: Tensor) -> Tensor:
        """Return the piece's part of the loss; 0 for a piece without weight, whose mean is NaN."""
        if isinstance(self.share, Tensor):
            return loss.masked_fill((self.share == 0).to(loss.device), 0.0)
        return loss if self.share else torch.zeros_like(loss)


def split_batch(count: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[BatchPiece]:
    """Split a batch into ``count`` pieces of nearly equal length.

    >>> [piece.args[0].tolist() for piece in split_batch(2, (torch.arange(3),), {})]
    [[0, 1], [2]]
    """
    length = batch_length(args, kwargs)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= length:
        raise BadInput(f"a batch of {length} cannot be split into {count} pieces.")
    ends = [length * place // count + (length * place % count > 0) for place in range(count + 1)]
    return [
        BatchPiece(_cut(args, begin, end), _cut(dict(kwargs), begin, end), (end - begin) / length)
        for begin, end in pairwise(ends)
    ]


def batch_length(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the size of the first dimension, which all tensors with a dimension must share."""
    lengths: set[int] = set()
    held: list[Any] = [*args, *kwargs.values()]
    while held:
        value = held.pop()
        if isinstance(value, Tensor):
            lengths.update(value.shape[:1])
        elif isinstance(value, Mapping | list | tuple):
            held.extend(value.values() if isinstance(value, Mapping) else value)
    if len(lengths) != 1:
        found = ", ".join(map(str, sorted(lengths))) or "no tensors at all"
        raise BadInput(f"cannot split the batch: its tensors must share their first dimension, got {found}.")
    return lengths.pop()


def _cut(value: Any, begin: int, end: int) -> Any:
    if isinstance(value, Tensor):
        return value[begin:end] if value.dim() else value
    if isinstance(value, Mapping):
        cut = {key: _cut(inner, begin, end) for key, inner in value.items()}
        try:
            return type(value)(cut)  # type: ignore[call-arg]
        except TypeError as error:
            raise BadInput(f"a batch of {type(value).__name__} cannot be split into pieces: {error}.") from error
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(inner, begin, end) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(_cut(inner, begin, end) for inner in value)
    return value
