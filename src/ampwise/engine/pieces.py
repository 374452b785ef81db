"""A batch cut into pieces, which need less memory one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampwise.engine.window import Weight
from ampwise.errors import BadInput

__all__ = ["Piece", "length_of", "split"]


class Piece(NamedTuple):
    """A part of a batch, and how much of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    share: Weight

    def weighed(self, weight: Weight | None, total: Weight | None) -> Piece:
        """Its share by weight, where batches are weighed; of a batch that weighs nothing, none."""
        if weight is None or total is None:
            return self
        if isinstance(weight, Tensor) or isinstance(total, Tensor):
            share: Weight = torch.nan_to_num(torch.as_tensor(weight / total), nan=0.0)
        else:
            share = weight / total if total else 0.0
        return self._replace(share=share)

    def counted(self, loss: Tensor) -> Tensor:
        """Its part of the loss: a mean of nothing is NaN, and counts for nothing."""
        if isinstance(self.share, Tensor):
            return loss.masked_fill((self.share == 0).to(loss.device), 0.0)
        return loss if self.share else torch.zeros_like(loss)


def split(count: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Piece]:
    """As many pieces as were asked for, as equal as can be.

    >>> [piece.args[0].tolist() for piece in split(2, (torch.arange(3),), {})]
    [[0, 1], [2]]
    """
    length = length_of(args, kwargs)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= length:
        raise BadInput(f"a batch of {length} cannot be cut into {count} pieces.")
    ends = [length * place // count + (length * place % count > 0) for place in range(count + 1)]
    return [
        Piece(_cut(args, begin, end), _cut(dict(kwargs), begin, end), (end - begin) / length)
        for begin, end in pairwise(ends)
    ]


def length_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The first dimension, which all tensors must share that have any."""
    lengths = {len(tensor) for tensor in _tensors((args, dict(kwargs))) if tensor.dim()}
    if len(lengths) != 1:
        found = ", ".join(map(str, sorted(lengths))) or "no tensors at all"
        raise BadInput(f"to be cut into pieces, tensors of a batch are to have one length: there are {found}.")
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
    """A batch of a class of its own, such as a tokenizer's, if it can be made from a dict."""
    try:
        return type(value)(cut)
    except TypeError as error:
        raise BadInput(f"a batch of {type(value).__name__} cannot be cut into pieces: {error}.") from error
