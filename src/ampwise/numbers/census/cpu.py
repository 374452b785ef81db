"""Count on a CPU: by the C extension on as many threads as torch uses, or by torch operations if it was not built."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from types import ModuleType

import torch
from torch import Tensor

from ampwise.numbers.census.count_row import LARGEST, SINGLE, SMALLEST, count_in_torch, merge_rows
from ampwise.numbers.census.flat_values import DTYPE_CODES

_native: ModuleType | None
try:
    _native = importlib.import_module("ampwise.numbers.census._native")
except ImportError:  # there was no compiler at installation
    _native = None

CountedRows = tuple[Tensor, Tensor]  # a row of counts and a sum of squares, or as many of both as there are tensors
CountPiece = tuple[int, int, int, int]  # for the C extension: address, number of values, kind, and the row to fill

BYTES = {kind: dtype.itemsize for dtype, kind in DTYPE_CODES.items()}
SHARE = 1 << 18  # values per thread, below which another thread costs more than it saves
COLUMNS = SINGLE.columns
SHARES_PER_THREAD = 4  # so that threads finish at about the same time
WIDENED = 1 << 20  # values at a time if they must be converted to FP32 first


def count_all_on_cpu(flats: Sequence[Tensor], factor: float = 1.0) -> CountedRows:
    """Return rows of counts (int64) and sums of squares (float64) of contiguous CPU tensors of any dtype but FP64.

    Counts ``flat.float() * factor``: values are multiplied in FP32, and round as in torch.
    """
    if _native is None or not {flat.dtype for flat in flats} <= DTYPE_CODES.keys():
        rows, sums = _new_table(len(flats))
        for row, flat in enumerate(flats):
            rows[row], sums[row] = _count_widened(flat, factor)
        return rows, sums
    return _count_natively(_native, flats, factor)


def count_on_cpu(flat: Tensor) -> tuple[Tensor, float]:
    """Return the row of counts and the sum of squares of a flat CPU tensor of any float dtype."""
    if flat.dtype == torch.float64:
        row, sum_squares = count_in_torch(flat)
        return row, sum_squares.item()
    rows, sums = count_all_on_cpu([flat])
    return rows[0], sums.item()


def _count_widened(flat: Tensor, factor: float) -> CountedRows:
    """Count a tensor a piece at a time, so that converting it to FP32 takes little memory."""
    rows, sums = [], []
    for piece in flat.reshape(-1).split(WIDENED):
        values = piece.float()
        if _native is None:
            row, sum_squares = count_in_torch(values if factor == 1.0 else values * factor)
        else:
            (row,), (sum_squares,) = _count_natively(_native, [values], factor)
        rows.append(row)
        sums.append(sum_squares)
    return reduce(merge_rows, rows), torch.stack(sums).sum()


def _count_natively(native: ModuleType, flats: Sequence[Tensor], factor: float) -> CountedRows:
    whole = [(flat.data_ptr(), flat.numel(), DTYPE_CODES[flat.dtype], row) for row, flat in enumerate(flats)]
    total = sum(map(Tensor.numel, flats))
    threads = min(torch.get_num_threads(), total // SHARE)
    if threads <= 1:
        rows, sums = _new_table(len(whole))
        native.count_floats(whole, factor, rows.data_ptr(), sums.data_ptr())
        return rows, sums
    shares, owners = _shared_out(whole, share_size=total // min(threads * SHARES_PER_THREAD, total // SHARE) + 1)
    rows, sums = _new_table(len(whole) + len(owners))

    def count(share: list[CountPiece]) -> None:
        native.count_floats(share, factor, rows.data_ptr(), sums.data_ptr())

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(count, shares))  # a list, so that errors are raised
    return _joined(rows, sums, owners)


def _shared_out(whole: Sequence[CountPiece], share_size: int) -> tuple[list[list[CountPiece]], list[int]]:
    """Split tensors into shares of ``share_size`` values each.

    The later parts of a split tensor go to additional rows. Returns the shares, and the tensor of each additional row.
    """
    shares: list[list[CountPiece]] = [[]]
    owners: list[int] = []
    left = share_size
    for address, size, kind, owner in whole:
        row = owner
        while size > left:
            shares[-1].append((address, left, kind, row))
            shares.append([])
            row = len(whole) + len(owners)
            owners.append(owner)
            address, size, left = address + left * BYTES[kind], size - left, share_size
        shares[-1].append((address, size, kind, row))
        left -= size
    return shares, owners


def _joined(rows: Tensor, sums: Tensor, owners: Sequence[int]) -> CountedRows:
    """Merge additional rows into the rows of their tensors, like ``merge_rows``: counts add, extremes are maxima."""
    rows, more_rows = rows.tensor_split([len(rows) - len(owners)])
    sums, more_sums = sums.tensor_split([len(rows)])
    extremes = slice(LARGEST, SMALLEST + 1)
    places = torch.tensor(owners, dtype=torch.int64, device="cpu")
    highest = rows[:, extremes].scatter_reduce(0, places[:, None].expand(-1, 2), more_rows[:, extremes], "amax")
    rows.index_add_(0, places, more_rows)
    rows[:, extremes] = highest
    return rows, sums.index_add_(0, places, more_sums)


def _new_table(rows: int) -> CountedRows:
    table = torch.empty((rows, COLUMNS), dtype=torch.int64, device="cpu")
    return table, torch.empty(rows, dtype=torch.float64, device="cpu")
