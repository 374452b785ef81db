"""Narrow formats as lists of their values, and rounding by a search in them."""

import math
from bisect import bisect_right

# As the OCP specifications have them: exponent bits, mantissa bits, bias, largest value.
SHAPES = {
    "e5m2": (5, 2, 15, 57344.0),
    "e4m3fn": (4, 3, 7, 448.0),
    "e3m2": (3, 2, 3, 28.0),
    "e2m3": (2, 3, 1, 7.5),
    "e2m1": (2, 1, 1, 6.0),
}


def magnitudes(name: str) -> list[float]:
    """The values from zero up to the largest; a value's place in the list is its code."""
    exponent_bits, mantissa_bits, bias, largest = SHAPES[name]
    steps = range(2**mantissa_bits)
    values = [step / 2**mantissa_bits * 2.0 ** (1 - bias) for step in steps]
    for exponent in range(1, 2**exponent_bits):
        values += [(1 + step / 2**mantissa_bits) * 2.0 ** (exponent - bias) for step in steps]
    return [value for value in values if value <= largest]


GRIDS = {name: magnitudes(name) for name in SHAPES}


def nearest(value: float, name: str) -> float:
    grid = GRIDS[name]
    place = bisect_right(grid, abs(value)) - 1
    if place < len(grid) - 1:
        tie = (grid[place] + grid[place + 1]) / 2
        if abs(value) > tie or (abs(value) == tie and place % 2 == 1):
            place += 1
    return math.copysign(grid[place], value)
