"""Measure how far two tensors differ; results stay on the device until all are read at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampwise.numbers.census.kernels import has_kernels
from ampwise.tune.diff.tensor_difference import TensorDifference

__all__ = ["Factors", "Ledger", "PendingComparison", "compare_tensors"]

PIECE = 2**23  # values at a time: their FP64 copies take 64 MiB for each of three tensors
PIECE_ON_CPU = 2**17  # chosen to fit the cache
WITHOUT_FP64 = ("mps",)
COLUMNS = 13

Factors = tuple[float, float]
UNSCALED: Factors = (1.0, 1.0)


class PendingComparison(NamedTuple):
    """A comparison whose numbers are still on the device: a row for each piece, and where the pieces begin."""

    shape: tuple[int, ...]
    order: tuple[int, ...]  # of the dimensions in memory, in which values are counted
    rows: list[Tensor]
    starts: list[int]
    whole: bool  # integers, for which only counts are meaningful


class Ledger:
    """Comparisons by key, read all at once."""

    def __init__(self) -> None:
        self._waiting: dict[Any, PendingComparison] = {}

    def __contains__(self, key: Any) -> bool:
        return key in self._waiting

    def add(self, key: Any, a: Tensor, b: Tensor, factors: Factors = UNSCALED) -> None:
        """Compare b with a, each times its factor, without syncing."""
        self._waiting[key] = compare_tensors(a, b, factors)

    def settled(self) -> dict[Any, TensorDifference]:
        """Return all results. Syncs the device once."""
        rows = [row for each in self._waiting.values() for row in each.rows]
        read = iter(_read(rows))
        return {key: _measured(each, [next(read) for _ in each.rows]) for key, each in self._waiting.items()}


@torch.no_grad()
def compare_tensors(a: Tensor, b: Tensor, factors: Factors = UNSCALED) -> PendingComparison:
    """Compare tensors of one shape, which may be on two devices. Sums are in FP64."""
    device = torch.device("cpu") if b.device.type in WITHOUT_FP64 else b.device
    order = _memory_order(a, b)
    one, other = a.permute(order), b.permute(order)
    row_of = _fused if device.type == "cuda" and has_kernels() else _row
    most = PIECE_ON_CPU if device.type == "cpu" else PIECE
    if row_of is _fused and a.device == b.device and one.is_contiguous() and other.is_contiguous():
        most = max(a.numel(), 1)  # the kernel needs no temporary memory
    rows, starts = [], []
    for start, piece_a, piece_b in _pieces(one, other, most):
        rows.append(row_of(piece_a.to(device), piece_b.to(device), factors))
        starts.append(start)
    return PendingComparison(tuple(a.shape), order, rows, starts, not a.is_floating_point())


def _memory_order(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """Return an order of dimensions in which both tensors are contiguous, if there is one."""
    if not a.is_contiguous() or not b.is_contiguous():
        order = tuple(sorted(range(b.ndim), key=b.stride, reverse=True))
        if a.permute(order).is_contiguous() and b.permute(order).is_contiguous():
            return order
    return tuple(range(a.ndim))


def _pieces(a: Tensor, b: Tensor, most: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield pieces of both in index order, and the index at which each begins."""
    if not a.numel():
        return
    if a.is_contiguous() and b.is_contiguous():
        pairs = zip(a.view(-1).split(most), b.view(-1).split(most), strict=True)
        yield from ((number * most, one, other) for number, (one, other) in enumerate(pairs))
        return
    # Non-contiguous tensors are copied slice by slice, not as a whole.
    each = a.numel() // a.shape[0]
    together = max(1, most // each)
    for number, (one, other) in enumerate(zip(a.split(together), b.split(together), strict=True)):
        start = number * together * each
        if one.numel() <= most:
            yield start, one, other
        else:
            for inner, piece_a, piece_b in _pieces(one[0], other[0], most):
                yield start + inner, piece_a, piece_b


def _fused(a: Tensor, b: Tensor, factors: Factors) -> Tensor:
    """Compute the same row as ``_row``, with a kernel that reads both tensors once."""
    from ampwise.tune.diff.statistics_kernel import READ, launch_row

    return launch_row(a.contiguous(), b.contiguous(), factors) if {a.dtype, b.dtype} <= READ else _row(a, b, factors)


def _row(a: Tensor, b: Tensor, factors: Factors) -> Tensor:
    """Compute the columns that ``_measured`` reads. The reference for the kernel."""
    wide_a, wide_b = _finite(a, factors[0]), _finite(b, factors[1])
    error = wide_b - wide_a
    squares = [torch.dot(each, each) for each in (wide_a, wide_b, error)]
    nothing = squares[0].new_zeros(())
    changed = nothing if a.is_floating_point() else error.count_nonzero()
    largest, at = error.abs_().max(0)
    return torch.stack(
        [
            *squares,
            largest,
            *(each.double() for each in (at, changed)),
            *(_largest(each) for each in (wide_a, wide_b)),
            *(each.count_nonzero().double() for each in (a, b)),
            *_not_finite(a, b),
        ]
    )


def _not_finite(a: Tensor, b: Tensor) -> list[Tensor]:
    """Count non-finite values in a, in b, and positions where they differ: +inf and −inf, inf and NaN, inf and 3."""
    if not a.is_floating_point():
        return [torch.zeros((), dtype=torch.float64, device=a.device)] * 3
    bad_a, bad_b = ~a.isfinite(), ~b.isfinite()
    same = (a == b) | (a.isnan() & b.isnan())
    return [each.count_nonzero().double() for each in (bad_a, bad_b, (bad_a | bad_b) & ~same)]


def _largest(values: Tensor) -> Tensor:
    low, high = torch.aminmax(values)
    return torch.maximum(-low, high)


def _finite(tensor: Tensor, factor: float) -> Tensor:
    """Return an FP64 copy with 0 for values that are not finite."""
    wide = tensor.to(torch.float64, copy=True).reshape(-1)
    if factor != 1.0:
        wide.mul_(factor)
    return wide.nan_to_num_(0.0, 0.0, 0.0) if tensor.is_floating_point() else wide


def _read(rows: Sequence[Tensor]) -> list[list[float]]:
    """Read rows from several devices, one transfer per device."""
    found: list[list[float]] = [[]] * len(rows)
    for device in {row.device for row in rows}:
        places = [place for place, row in enumerate(rows) if row.device == device]
        for place, values in zip(places, torch.stack([rows[place] for place in places]).tolist(), strict=True):
            found[place] = values
    return found


def _measured(waiting: PendingComparison, rows: list[list[float]]) -> TensorDifference:
    columns = list(zip(*rows, strict=True)) or [()] * COLUMNS
    norms = [math.sqrt(math.fsum(column)) for column in columns[:3]]
    largest = max(columns[3], default=0.0)
    worst = columns[3].index(largest) if rows else 0
    at = waiting.starts[worst] + int(columns[4][worst]) if rows else 0
    places = dict(zip(waiting.order, _unravelled(at, [waiting.shape[each] for each in waiting.order]), strict=True))
    values = math.prod(waiting.shape)
    present = [int(sum(column)) for column in columns[8:10]]
    return TensorDifference(
        shape=waiting.shape,
        norm_a=norms[0],
        norm_b=norms[1],
        norm_error=norms[2],
        largest_error=largest,
        largest_at=tuple(places[dimension] for dimension in range(len(waiting.shape))),
        largest_a=max(columns[6], default=0.0),
        largest_b=max(columns[7], default=0.0),
        zeros_a=values - present[0],
        zeros_b=values - present[1],
        bad_a=int(sum(columns[10])),
        bad_b=int(sum(columns[11])),
        bad_apart=int(sum(columns[12])),
        changed=int(sum(columns[5])) if waiting.whole else None,
    )


def _unravelled(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Convert a flat index to an index per dimension.

    >>> _unravelled(7, (2, 3, 2)), _unravelled(0, ())
    ((1, 0, 1), ())
    """
    found = []
    for size in reversed(shape):
        index, place = divmod(index, size) if size else (index, 0)
        found.append(place)
    return tuple(reversed(found))
