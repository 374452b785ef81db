"""How far off a policy can be, by what was shown."""

from types import SimpleNamespace

import pytest

from ampwise.tune.search.build_result import _gap
from ampwise.tune.search.descent import FormatLadder

LADDER = FormatLadder(
    formats=3,
    lowest=(0, 0, 0),
    costs=((0.1, 0.2, 0.4), (0.1, 0.2, 0.4), (0.05, 0.1, 0.2)),
    scores=((0.0,) * 3,) * 3,
)


def gap(found, alone):
    tried = {unit: (place, SimpleNamespace(error=error)) for unit, (place, error) in alone.items()}
    outcomes = SimpleNamespace(ladder=LADDER, best=SimpleNamespace(assignment=found), alone=tried, tolerance=0.02)
    return _gap(outcomes)


def test_where_each_was_shown_to_need_it_there_is_none():
    assert gap((0, 2, 0), {1: (1, 0.03)}) == 0.0
    assert gap((1, 2, 0), {0: (0, 0.5), 1: (1, 0.03)}) == pytest.approx(0.0)
    assert gap((0, 0, 0), {}) == 0.0


def test_what_passes_alone_may_not_have_been_needed():
    """Of 0.1 + 0.4 + 0.05, the 0.3 above the cheapest; but all narrow has failed, so that something costs 0.05 more."""
    assert gap((0, 2, 0), {1: (1, 0.01)}) == pytest.approx((0.3 - 0.05) / 0.55)
    assert gap((1, 2, 0), {0: (0, 0.5), 1: (1, 0.01)}) == pytest.approx(0.3 / 0.65)


def test_one_that_was_raised_later_counts_as_far_as_it_was_shown():
    assert gap((2, 0, 0), {0: (0, 0.5)}) == pytest.approx(0.2 / 0.55)
