"""The row of integers that every counter fills in, how a row becomes a Census, and the counter that defines it.

The C extension, the Triton kernel and the reference here, in plain torch operations, all produce the same row for a
tensor, so that tests can compare them exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ampwise.numbers.census.algebra import Census

PIECE = 1 << 22  # values at a time: the integers of the reference take eight times the memory of FP32

# Columns of a row. LARGEST holds the bits of the largest finite magnitude. SMALLEST holds magnitude_mask - (bits - 1)
# of the smallest magnitude above zero: so zero means "none", and merging is a maximum.
ZEROS, INFS, NANS, LARGEST, SMALLEST, BINADES = range(6)


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatLayout:
    """Bit layout of a float dtype, as needed for counting."""

    mantissa_bits: int
    bias: int
    magnitude_mask: int

    @property
    def infinity_bits(self) -> int:
        return (2 * self.bias + 1) << self.mantissa_bits

    @property
    def lowest_binade(self) -> int:
        """Binade of the smallest subnormal: a power of two, so it is the upper end of the binade below it."""
        return -self.bias - self.mantissa_bits

    @property
    def binades(self) -> int:
        return self.bias - self.lowest_binade + 1

    @property
    def columns(self) -> int:
        return BINADES + self.binades

    def census(self, row: Sequence[int], sum_squares: float, skipped: int = 0) -> Census:
        """Return the census of a row; its binades may start ``skipped`` after the lowest, and end early."""
        counts = enumerate(row[BINADES:], start=self.lowest_binade + skipped)
        smallest = self.magnitude_mask - row[SMALLEST] + 1
        return Census(
            binades={exponent: count for exponent, count in counts if count},
            zeros=row[ZEROS],
            infs=row[INFS],
            nans=row[NANS],
            amax=self._value(row[LARGEST]),
            amin=self._value(smallest) if row[SMALLEST] else 0.0,
            sum_squares=sum_squares,
        )

    def _value(self, bits: int) -> float:
        field, mantissa = divmod(bits, 1 << self.mantissa_bits)
        implicit = 1 << self.mantissa_bits if field else 0
        return math.ldexp(mantissa + implicit, max(field, 1) - self.bias - self.mantissa_bits)


SINGLE = FloatLayout(mantissa_bits=23, bias=127, magnitude_mask=2**31 - 1)
DOUBLE = FloatLayout(mantissa_bits=52, bias=1023, magnitude_mask=2**63 - 1)


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
    field = below >> layout.mantissa_bits
    # A subnormal's exponent is the position of its highest bit. frexp gives that position, and 0 for 0, the predecessor
    # of the smallest subnormal.
    bit_length = torch.frexp(below.clamp(min=0, max=2**layout.mantissa_bits).double())[1].long()
    binade = torch.where(field > 0, field - layout.bias, bit_length + layout.lowest_binade)
    counted = torch.where(finite & ~zero, binade - layout.lowest_binade, layout.binades)
    row = torch.zeros(layout.columns, dtype=torch.int64, device=values.device)
    row[ZEROS] = zero.sum()
    row[INFS] = (magnitude == layout.infinity_bits).sum()
    row[NANS] = (magnitude > layout.infinity_bits).sum()
    if values.numel():
        row[LARGEST] = torch.where(finite, magnitude, 0).amax()
        row[SMALLEST] = torch.where(finite & ~zero, layout.magnitude_mask - below, 0).amax()
    row[BINADES:] = torch.bincount(counted, minlength=layout.binades + 1)[: layout.binades]
    return row
