"""Split a batch into pieces, which need less memory one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampwise.errors import BadInput
from ampwise.train.accumulator import Weight

__all__ = ["BatchPiece", "batch_length", "split_batch"]


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
    lengths = {len(tensor) for tensor in _tensors((args, dict(kwargs))) if tensor.dim()}
    if len(lengths) != 1:
        found = ", ".join(map(str, sorted(lengths))) or "no tensors at all"
        raise BadInput(f"cannot split the batch: its tensors must share their first dimension, got {found}.")
    return lengths.pop()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


def _cut(value: Any, begin: int, end: int) -> Any:
    if isinstance(value, Tensor):
        return value[begin:end] if value.dim() else value
    if isinstance(value, Mapping):
        cut = {key: _cut(inner, begin, end) for key, inner in value.items()}
        return cut if type(value) is dict else _alike(value, cut)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(inner, begin, end) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(_cut(inner, begin, end) for inner in value)
    return value


def _alike(value: Any, cut: dict[Any, Any]) -> Any:
    """Return a mapping of the batch's own class, such as a tokenizer's, if it can be made from a dict."""
    try:
        return type(value)(cut)
    except TypeError as error:
        raise BadInput(f"a batch of {type(value).__name__} cannot be split into pieces: {error}.") from error
