"""By day a marked test has half of its combinations or fewer, and no value of any axis is left out."""

from itertools import product

import pytest

from .night import NIGHTLY, chessboard


@pytest.mark.half_by_day
@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize(("column", "twice"), [(0, 0), (1, 2), (2, 4)])
def test_white_fields_are_left_to_the_night(row, column, twice):
    assert NIGHTLY or (row + column) % 2 == 0
    assert twice == 2 * column


def test_black_fields_are_all_there(request):
    marked = [each for each in request.session.items if getattr(each, "originalname", "").startswith("test_white")]
    found = {(each.callspec.params["row"], each.callspec.params["column"]) for each in marked}
    assert not found or found == set(chessboard(range(3), range(3)))


def test_with_three_axes_every_pair_meets():
    fields = chessboard("abc", "de", (1, 2, 3, 4))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        axes = ("abc", "de", (1, 2, 3, 4))
        assert {(field[one], field[other]) for field in fields} == set(product(axes[one], axes[other]))


@pytest.mark.nightly
def test_a_test_for_the_night_is_not_run_by_day():
    assert NIGHTLY


@pytest.mark.parametrize("time", ["day", pytest.param("night", marks=pytest.mark.nightly)])
def test_a_value_for_the_night_is_not_run_by_day(time):
    assert NIGHTLY or time == "day"


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize("row", [0, 1, 2, 3])
@pytest.mark.parametrize("column", [0, 1, 2])
def test_two_of_three_combinations_are_left_to_the_night(row, column):
    assert NIGHTLY or (row + column) % 3 == 0
