"""Counting on a CPU: the C loop on as many threads as torch uses, or torch operations where it was not built."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from ampwise.census.flat import KINDS
from ampwise.census.layout import SINGLE
from ampwise.census.reference import count_in_torch, merge_rows

_native: ModuleType | None
try:
    _native = importlib.import_module("ampwise.census._native")
except ImportError:  # there was no compiler when it was installed
    _native = None

__all__ = ["count_on_cpu"]

# fields, subnormals, infs, nans, bits of amax, bits of amin less one, sum of squares
Counted = tuple[list[int], list[int], int, int, int, int, float]
SHARE = 1 << 18  # values below which another thread costs more than it brings
PIECE = 1 << 20  # values at a time where they must be widened first


def count_on_cpu(flat: Tensor) -> tuple[Tensor, float]:
    """The row of counts and the sum of squares of a flat CPU tensor of any float dtype."""
    if flat.element_size() == 1:  # FP8
        return _merge(count_on_cpu(piece.float()) for piece in flat.split(PIECE))
    if _native is None or flat.dtype not in KINDS:
        return _merge(_count_widened(piece) for piece in flat.split(PIECE))
    count = partial(_count_natively, _native.count_floats)
    threads = min(torch.get_num_threads(), max(1, flat.numel() // SHARE))
    if threads == 1:
        return count(flat)
    with ThreadPoolExecutor(threads) as pool:
        return _merge(pool.map(count, flat.tensor_split(threads)))


def _count_widened(piece: Tensor) -> tuple[Tensor, float]:
    row, sum_squares = count_in_torch(piece if piece.dtype == torch.float64 else piece.float())
    return row, sum_squares.item()


def _count_natively(count_floats: Callable[[int, int, int], Counted], flat: Tensor) -> tuple[Tensor, float]:
    return _row(count_floats(flat.data_ptr(), flat.numel(), KINDS[flat.dtype]))


def _row(counted: Counted) -> tuple[Tensor, float]:
    """What the C loop counted, in the shared layout; see _native.c for the meaning of its fields."""
    fields, subnormals, infs, nans, largest, below_smallest, sum_squares = counted
    zeros = fields[255] - nans
    normal = fields[1:255]
    normal[-1] -= infs
    smallest = SINGLE.magnitude_mask - below_smallest
    return torch.tensor([zeros, infs, nans, largest, smallest, *subnormals, *normal], device="cpu"), sum_squares


def _merge(parts: Iterable[tuple[Tensor, float]]) -> tuple[Tensor, float]:
    rows, sums = zip(*parts, strict=True)
    total = rows[0]
    for row in rows[1:]:
        total = merge_rows(total, row)
    return total, sum(sums)
