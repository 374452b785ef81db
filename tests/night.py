"""What the day leaves to the night, for which AMPWISE_NIGHTLY stands.

Of a test marked ``half_by_day`` every second combination of its parameters is run, as the black fields of a chessboard:
each value still meets every second one of another axis, and where there are three axes, all of them.
"""

import itertools
import os

import pytest

NIGHTLY = "AMPWISE_NIGHTLY" in os.environ


def is_for_the_day(numbers):
    """Whether the combination of an axis' value number ``numbers[0]``, of another's ``numbers[1]``, ... is run by day.

    >>> [(row, column) for row in range(2) for column in range(3) if is_for_the_day((row, column))]
    [(0, 0), (0, 2), (1, 1)]
    """
    return sum(numbers) % 2 == 0


def chessboard(*axes):
    """The combinations to go through now: all of them at night."""
    fields = [zip(*field, strict=True) for field in itertools.product(*(enumerate(axis) for axis in axes))]
    return [values for numbers, values in fields if NIGHTLY or is_for_the_day(numbers)]


def is_left_to_the_night(item):
    """Whether pytest's item is one of the white fields, and it is day."""
    if NIGHTLY or item.get_closest_marker("half_by_day") is None:
        return False
    return not is_for_the_day([_number(axis, item.callspec.params) for axis in item.iter_markers("parametrize")])


def _number(axis, given):
    """Which of the values of a ``parametrize`` these are; pytest numbers the combinations, not the values."""
    names, rows = axis.args[:2]
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    for number, row in enumerate(rows):
        values = row.values if isinstance(row, type(pytest.param())) else row if len(names) > 1 else (row,)
        if all(given[name] is value for name, value in zip(names, values, strict=True)):
            return number
    raise LookupError(f"{given} is not among {rows}")
