"""Curves in text: decoded again dot by dot, by the names that Unicode has for them."""

import math
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from ampwise.report.curves import thin_out
from ampwise.report.live.frame import ASCII, BAD, CurveAxis, axis_of, columns_in, draw
from ampwise.runs.rows import NO_STATS, NumberStats, StepBucket, StepRow

# The dots of a braille character have had their numbers since before computers; from below, by column.
NUMBERS = ((7, 3, 2, 1), (8, 6, 5, 4))

finite = st.floats(allow_nan=False, allow_infinity=False)
spreads = st.builds(lambda *ends: NumberStats(min(ends), min(ends), max(ends), 2), finite, finite)
columns = st.lists(spreads | st.just(NO_STATS) | st.just(NumberStats(nans=1)), min_size=1, max_size=40)


def heights(lines, column):
    """The dots that are set in a column, counted from below; None where a mark hides them."""
    found = []
    for row, line in enumerate(reversed(lines)):
        cell = line[column // 2] if column // 2 < len(line) else " "
        if cell == BAD:
            return None
        name = "" if cell == " " else unicodedata.name(cell).rpartition("-")[2]
        found += [row * 4 + dot for dot, number in enumerate(NUMBERS[column % 2]) if str(number) in name]
    return found


@given(columns, st.integers(1, 3))
def test_a_column_goes_from_its_lowest_to_its_highest(spreads, rows):
    axis = axis_of(spreads)
    lines = draw(spreads, axis, rows=rows, braille=True)
    assert [len(line) for line in lines] == [math.ceil(len(spreads) / 2)] * rows
    for number, spread in enumerate(spreads):
        dots = heights(lines, number)
        if dots is None:
            continue
        if spread.low is None:
            assert dots == []
            continue
        assert dots == list(range(dots[0], dots[-1] + 1))  # no gap
        if axis.low < axis.high:
            assert (spread.low != axis.low) or dots[0] == 0
            assert (spread.high != axis.high) or dots[-1] == 4 * rows - 1


@given(st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=300), st.integers(1, 20), st.booleans())
def test_of_a_long_run_no_extreme_is_lost(values, cells, braille):
    line = [StepBucket.of(StepRow(step=step, loss=value)) for step, value in enumerate(values, 1)]
    shown = [bucket.loss for bucket in thin_out(line, columns_in(cells, braille=braille))]
    axis = axis_of(shown)
    assert (axis.low, axis.high) == (min(values), max(values))
    lines = draw(shown, axis, rows=2, braille=braille)
    assert max(map(len, lines)) <= cells
    if axis.low < axis.high and braille:
        dots = [dot for column in range(2 * cells) for dot in heights(lines, column)]
        assert (min(dots), max(dots)) == (0, 7)
    elif axis.low < axis.high:
        assert ASCII[-1] in lines[-1]


def test_what_is_not_finite_is_marked():
    spreads = [
        NumberStats.of(1.0),
        NumberStats.of(2.0),
        NumberStats.of(math.inf),
        NumberStats.of(1.0),
        NumberStats.of(-math.inf),
    ]
    assert [line.count(BAD) for line in draw(spreads, axis_of(spreads), rows=2, braille=True)] == [2, 0]
    assert draw(spreads, axis_of(spreads), rows=1, braille=False) == ["_@!_!"]
    nowhere = [NumberStats.of(math.nan)]
    assert axis_of(nowhere) is None
    assert draw(nowhere, None, rows=1, braille=True) == [BAD]


def test_an_axis_is_logarithmic_where_the_rest_would_be_flat():
    assert axis_of([NumberStats.of(1.0), NumberStats.of(1e6)]) == CurveAxis(1.0, 1e6, True)
    assert axis_of([NumberStats.of(1.0), NumberStats.of(2.0)]) == CurveAxis(1.0, 2.0, False)
    assert axis_of([NumberStats.of(0.0), NumberStats.of(1e6)]) == CurveAxis(0.0, 1e6, False)  # zero has no logarithm
    assert CurveAxis(1.0, 1e6, True).height(1e3) == 0.5
    assert CurveAxis(-1.7e308, 1.7e308, False).height(0.0) == 0.5  # a difference that no float holds
    assert CurveAxis(3.0, 3.0, False).height(3.0) == 0.5
