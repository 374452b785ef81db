"""Measure how far two tensors differ; results stay on the device until all are read at once."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampwise.numbers.census.kernels import has_kernels
from ampwise.tune.diff.tensor_difference import TensorDifference

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

    def measured(self, rows: list[list[float]]) -> TensorDifference:
        """Combine the rows, as read from the device."""
        columns = list(zip(*rows, strict=True)) or [()] * COLUMNS
        norms = [math.sqrt(math.fsum(column)) for column in columns[:3]]
        largest, at = max(columns[3], default=0.0), 0
        if rows:
            worst = columns[3].index(largest)
            at = self.starts[worst] + int(columns[4][worst])
        largest_at = [0] * len(self.shape)
        for dimension in reversed(self.order):
            at, largest_at[dimension] = divmod(at, max(self.shape[dimension], 1))
        values = math.prod(self.shape)
        return TensorDifference(
            shape=self.shape,
            norm_a=norms[0],
            norm_b=norms[1],
            norm_error=norms[2],
            largest_error=largest,
            largest_at=tuple(largest_at),
            largest_a=max(columns[6], default=0.0),
            largest_b=max(columns[7], default=0.0),
            zeros_a=values - int(sum(columns[8])),
            zeros_b=values - int(sum(columns[9])),
            bad_a=int(sum(columns[10])),
            bad_b=int(sum(columns[11])),
            bad_apart=int(sum(columns[12])),
            changed=int(sum(columns[5])) if self.whole else None,
        )


class Ledger:
    """Comparisons by key, read all at once."""

    def __init__(self) -> None:
        self._waiting: dict[Any, PendingComparison] = {}

    def __contains__(self, key: Any) -> bool:
        return key in self._waiting

    def add(self, key: Any, a: Tensor, b: Tensor, factors: Factors = UNSCALED) -> None:
        """Compare b with a, each times its factor, without syncing."""
        self._waiting[key] = compare_tensors(a, b, factors)

    def add_rows(
        self, key: Any, shape: tuple[int, ...], first: int, a: Tensor, b: Tensor, factors: Factors = UNSCALED
    ) -> None:
        """Compare some rows, from ``first`` on, of tensors of this shape; the other rows come by other calls."""
        found = compare_tensors(a.contiguous(), b.contiguous(), factors)
        whole = self._waiting.setdefault(key, PendingComparison(shape, tuple(range(len(shape))), [], [], found.whole))
        whole.rows.extend(found.rows)
        whole.starts.extend(first * math.prod(shape[1:]) + start for start in found.starts)

    def settled(self) -> dict[Any, TensorDifference]:
        """Return all results, with one transfer per device."""
        rows = [row for each in self._waiting.values() for row in each.rows]
        values: dict[int, list[float]] = {}
        for device in {row.device for row in rows}:
            own = [row for row in rows if row.device == device]
            values |= zip(map(id, own), torch.stack(own).tolist(), strict=True)
        return {key: each.measured([values[id(row)] for row in each.rows]) for key, each in self._waiting.items()}


@torch.no_grad()
def compare_tensors(a: Tensor, b: Tensor, factors: Factors = UNSCALED) -> PendingComparison:
    """Compare tensors of one shape, which may be on two devices. Sums are in FP64."""
    device = torch.device("cpu") if b.device.type in WITHOUT_FP64 else b.device
    order = tuple(range(a.ndim))
    if not a.is_contiguous() or not b.is_contiguous():  # maybe they are in another order of dimensions
        by_stride = tuple(sorted(order, key=b.stride, reverse=True))
        if a.permute(by_stride).is_contiguous() and b.permute(by_stride).is_contiguous():
            order = by_stride
    one, other = a.permute(order).reshape(-1), b.permute(order).reshape(-1)
    row_of, most = _row, PIECE_ON_CPU if device.type == "cpu" else PIECE
    if device.type == "cuda" and has_kernels():
        row_of = _fused
        if a.device == b.device:
            most = max(a.numel(), 1)  # the kernel needs no temporary memory
    pieces = zip(one.split(most), other.split(most), strict=True) if one.numel() else ()
    rows = [row_of(piece_a.to(device), piece_b.to(device), factors) for piece_a, piece_b in pieces]
    starts = [number * most for number in range(len(rows))]
    return PendingComparison(tuple(a.shape), order, rows, starts, not a.is_floating_point())


def _fused(a: Tensor, b: Tensor, factors: Factors) -> Tensor:
    """Compute the same row as ``_row``, with a kernel that reads both tensors once."""
    from ampwise.tune.diff.statistics_kernel import READ, launch_row

    return launch_row(a.contiguous(), b.contiguous(), factors) if {a.dtype, b.dtype} <= READ else _row(a, b, factors)


def _row(a: Tensor, b: Tensor, factors: Factors) -> Tensor:
    """Compute the columns that ``PendingComparison.measured`` reads. The reference for the kernel."""
    wide_a, wide_b = _finite(a, factors[0]), _finite(b, factors[1])
    error = wide_b - wide_a
    squares = [torch.dot(each, each) for each in (wide_a, wide_b, error)]
    nothing = squares[0].new_zeros(())
    changed = nothing if a.is_floating_point() else error.count_nonzero()
    not_finite = [nothing] * 3
    if a.is_floating_point():
        bad_a, bad_b = ~a.isfinite(), ~b.isfinite()
        same = (a == b) | (a.isnan() & b.isnan())
        # The last counts positions where they differ: +inf and −inf, inf and NaN, inf and 3.
        not_finite = [each.count_nonzero().double() for each in (bad_a, bad_b, (bad_a | bad_b) & ~same)]
    largest, at = error.abs_().max(0)
    return torch.stack(
        [
            *squares,
            largest,
            *(each.double() for each in (at, changed)),
            *(torch.maximum(-low, high) for low, high in map(torch.aminmax, (wide_a, wide_b))),
            *(each.count_nonzero().double() for each in (a, b)),
            *not_finite,
        ]
    )


def _finite(tensor: Tensor, factor: float) -> Tensor:
    """Return an FP64 copy with 0 for values that are not finite."""
    wide = tensor.to(torch.float64, copy=True).reshape(-1)
    if factor != 1.0:
        wide.mul_(factor)
    return wide.nan_to_num_(0.0, 0.0, 0.0) if tensor.is_floating_point() else wide
