"""The row of integers that every way of measuring fills in, and how a row becomes a Census.

The C loop, the Triton kernel and the reference in torch operations all leave the same row for a tensor, so
that tests can hold them equal to the last count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ampwise.census.algebra import Census

__all__ = ["BINADES", "DOUBLE", "INFS", "LARGEST", "NANS", "SINGLE", "SMALLEST", "ZEROS", "Layout"]

# Columns of a row. LARGEST holds the bits of the largest finite magnitude. SMALLEST holds how far the bits of
# the smallest one, less one, are below the layout's top: so that zero means "none" and merging is a maximum.
ZEROS, INFS, NANS, LARGEST, SMALLEST, BINADES = range(6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a float dtype's bits are laid out, as far as counting is concerned."""

    mantissa_bits: int
    bias: int
    magnitude_mask: int

    @property
    def infinity_bits(self) -> int:
        return (2 * self.bias + 1) << self.mantissa_bits

    @property
    def lowest_binade(self) -> int:
        """The binade of the smallest subnormal, which is a power of two and so the top of the one below it."""
        return -self.bias - self.mantissa_bits

    @property
    def binades(self) -> int:
        return self.bias - self.lowest_binade + 1

    @property
    def columns(self) -> int:
        return BINADES + self.binades

    def census(self, row: Sequence[int], sum_squares: float, skipped: int = 0) -> Census:
        """The census a row stands for; its binades may start ``skipped`` after the lowest, and end early."""
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


SINGLE = Layout(mantissa_bits=23, bias=127, magnitude_mask=2**31 - 1)
DOUBLE = Layout(mantissa_bits=52, bias=1023, magnitude_mask=2**63 - 1)
