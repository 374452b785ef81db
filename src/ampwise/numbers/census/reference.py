"""Count with plain torch operations, on any device: the definition that the faster counters are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from ampwise.numbers.census.count_row import BINADES, DOUBLE, INFS, LARGEST, NANS, SINGLE, SMALLEST, ZEROS, FloatLayout

__all__ = ["count_in_torch"]

PIECE = 1 << 22  # values at a time: the integers below take eight times the memory of FP32


def count_in_torch(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row of counts (int64) and the sum of squares (float64) of a flat FP32 or FP64 tensor."""
    layout = DOUBLE if flat.dtype == torch.float64 else SINGLE
    row = torch.zeros(layout.columns, dtype=torch.int64, device=flat.device)
    sum_squares = torch.zeros((), dtype=torch.float64, device=flat.device)
    for piece in flat.split(PIECE):
        counted = _count_piece(piece, layout)
        row = merge_rows(row, counted)
        sum_squares += torch.where(piece.isfinite(), piece, 0.0).double().square().sum()
    return row, sum_squares


def merge_rows(one: Tensor, other: Tensor) -> Tensor:
    """Merge two rows: counts add, extremes are maxima."""
    merged = one + other
    extremes = slice(LARGEST, SMALLEST + 1)
    merged[extremes] = torch.maximum(one[extremes], other[extremes])
    return merged


def _count_piece(values: Tensor, layout: FloatLayout) -> Tensor:
    integer = torch.int64 if layout is DOUBLE else torch.int32
    magnitude = values.view(integer).long() & layout.magnitude_mask
    zero, finite = magnitude == 0, magnitude < layout.infinity_bits
    below = magnitude - 1  # binades are closed above: a power of two belongs with its predecessor
    counted = torch.where(finite & ~zero, _binade(below, layout) - layout.lowest_binade, layout.binades)
    row = torch.zeros(layout.columns, dtype=torch.int64, device=values.device)
    row[ZEROS] = zero.sum()
    row[INFS] = (magnitude == layout.infinity_bits).sum()
    row[NANS] = (magnitude > layout.infinity_bits).sum()
    if values.numel():
        row[LARGEST] = torch.where(finite, magnitude, 0).amax()
        row[SMALLEST] = torch.where(finite & ~zero, layout.magnitude_mask - below, 0).amax()
    row[BINADES:] = torch.bincount(counted, minlength=layout.binades + 1)[: layout.binades]
    return row


def _binade(below: Tensor, layout: FloatLayout) -> Tensor:
    """Return the binade of a magnitude, from the bits of its predecessor."""
    field = below >> layout.mantissa_bits
    # A subnormal's exponent is the position of its highest bit. frexp gives that position, and 0 for 0, the predecessor
    # of the smallest subnormal.
    bit_length = torch.frexp(below.clamp(min=0, max=2**layout.mantissa_bits).double())[1].long()
    return torch.where(field > 0, field - layout.bias, bit_length + layout.lowest_binade)
