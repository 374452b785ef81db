"""Which tests `make test` leaves to `make nightly`, which sets AMPWISE_NIGHTLY.

A test marked ``nightly``, or a ``pytest.param`` with that mark, is not run by day. Of a test marked ``half_by_day``
every second combination of its parameters is run, as the black fields of a chessboard: each value still meets every
second one of another axis, and where there are three axes, all of them. Of one marked ``few_by_day(4)`` it is every
fourth, so that each value is run if another axis has four values or more.

Where the same path is tested with other dtypes, sizes, ranks or seeds, one is for the day and the others for the night.
"""

import itertools
import os

import pytest

NIGHTLY = "AMPWISE_NIGHTLY" in os.environ
ATTACK = "AMPWISE_ATTACK" in os.environ  # `make attack`, which runs the attacks in full and nothing else


def is_for_the_day(numbers, every=2):
    """Whether the combination of value ``numbers[0]`` of one axis, ``numbers[1]`` of the next, ... is run by day.

    >>> [(row, column) for row in range(2) for column in range(3) if is_for_the_day((row, column))]
    [(0, 0), (0, 2), (1, 1)]
    """
    return sum(numbers) % every == 0


def chessboard(*axes):
    """The combinations to go through now: all of them at night."""
    fields = [zip(*field, strict=True) for field in itertools.product(*(enumerate(axis) for axis in axes))]
    return [values for numbers, values in fields if NIGHTLY or is_for_the_day(numbers)]


def by_night(*values):
    """Values of a ``parametrize`` that are left to the night; a tuple is a value for each of several names."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=pytest.mark.nightly) for row in rows]


def is_left_to_the_night(item):
    """Whether it is day and the marks of pytest's item leave it to the night."""
    if NIGHTLY or ATTACK:
        return False
    if item.get_closest_marker("nightly") is not None:
        return True
    thinned = [2 for _ in item.iter_markers("half_by_day")] + [mark.args[0] for mark in item.iter_markers("few_by_day")]
    if not thinned:
        return False
    axes = list(item.iter_markers("parametrize"))
    numbers = [_number(axis, item.callspec.params) for axis in axes]
    named = {name for axis in axes for name in _names(axis)}
    numbers += [number for name, number in item.callspec.indices.items() if name not in named]  # those of fixtures
    return not is_for_the_day(numbers, max(thinned))


def _names(axis):
    names = axis.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else names


def _number(axis, given):
    """Which of the values of a ``parametrize`` these are; pytest numbers the combinations, not the values."""
    names, rows = _names(axis), axis.args[1]
    for number, row in enumerate(rows):
        values = row.values if isinstance(row, type(pytest.param())) else row if len(names) > 1 else (row,)
        if all(given[name] is value for name, value in zip(names, values, strict=True)):
            return number
    raise LookupError(f"{given} is not among {rows}")
