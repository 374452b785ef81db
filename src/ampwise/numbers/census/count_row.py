"""The row of integers that every counter fills in, and how a row becomes a Census.

The C extension, the Triton kernel and the reference in torch operations all produce the same row for a tensor, so that
tests can compare them exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ampwise.numbers.census.algebra import Census

__all__ = ["BINADES", "DOUBLE", "INFS", "LARGEST", "NANS", "SINGLE", "SMALLEST", "ZEROS", "FloatLayout"]

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
