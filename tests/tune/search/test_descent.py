"""Few trials find what must stay wide: laws, over models that are only numbers."""

import itertools
import math
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from ampwise.tune.search.descent import FormatLadder, cheapest_passing, minimal_subset, raise_until_passing

from ...for_each import for_each

BITS = (8.0, 16.0, 32.0)


def ladder_of(scores, weights=None, lowest=None):
    count = len(scores)
    weights = weights or [1.0] * count
    return FormatLadder(
        formats=3,
        lowest=lowest or (0,) * count,
        costs=tuple(tuple(weight * bits for bits in BITS) for weight in weights),
        scores=tuple(scores),
    )


class Counted:
    """A predicate that counts the assignments it was asked about."""

    def __init__(self, passes):
        self.seen, self._passes = set(), passes

    def __call__(self, assignment):
        self.seen.add(assignment)
        return self._passes(assignment)


@st.composite
def planted(draw, most=60):
    """Units that need a format, among many that need none, and scores that know nothing of it."""
    count = draw(st.integers(2, most))
    needs = draw(st.dictionaries(st.integers(0, count - 1), st.integers(1, 2), max_size=min(5, count)))
    scores = draw(st.lists(st.tuples(*[st.floats(0, 1)] * 2, st.just(0.0)), min_size=count, max_size=count))
    return count, needs, scores


@given(planted())
def test_what_is_needed_is_found_in_any_order_and_nothing_else(case):
    count, needs, scores = case
    passes = Counted(lambda assignment: all(assignment[unit] >= place for unit, place in needs.items()))
    found = cheapest_passing(ladder_of(scores), passes)
    assert found == tuple(needs.get(unit, 0) for unit in range(count))
    assert len(passes.seen) <= max(2, 4 * math.log2(count) * len(needs)) + 2  # all narrow; all in the next format


@for_each("needed", [1, 2, 3])
def test_among_48_it_takes_few_trials_even_where_the_order_is_the_worst(needed):
    """Those that matter come last."""
    bad = {7, 23, 41} if needed == 3 else {7, 41} if needed == 2 else {23}
    scores = [(0.0 if unit in bad else 1.0 + unit, 0.0, 0.0) for unit in range(48)]
    passes = Counted(lambda assignment: all(assignment[unit] > 0 for unit in bad))
    found = cheapest_passing(ladder_of(scores), passes)
    assert {unit for unit, place in enumerate(found) if place} == bad
    assert len(passes.seen) <= 4 * math.log2(48) * needed


def test_where_the_order_is_right_three_trials_do():
    scores = [(1.0 if unit == 30 else 0.1, 0.0, 0.0) for unit in range(192)]
    passes = Counted(lambda assignment: assignment[30] > 0)
    assert cheapest_passing(ladder_of(scores), passes)[30] == 1
    assert len(passes.seen) == 3  # all narrow, all in the middle, all narrow but one


@st.composite
def additive(draw):
    """Errors that add up, and a tolerance."""
    count = draw(st.integers(1, 5))
    error = st.floats(0.001, 1)
    scores = [(first, first * draw(st.floats(0, 1)), 0.0) for first in (draw(error) for _ in range(count))]
    weights = draw(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=count, max_size=count))
    return scores, weights, draw(st.floats(0, 2))


@given(additive())
def test_nothing_that_was_found_can_be_narrower(case):
    scores, weights, tolerance = case
    ladder = ladder_of(scores, weights)

    def passes(assignment):
        return sum(each[place] for each, place in zip(scores, assignment, strict=True)) <= tolerance

    found = cheapest_passing(ladder, passes)
    assert passes(found)
    for unit, place in enumerate(found):
        assert not place or not passes((*found[:unit], place - 1, *found[unit + 1 :]))
    best = min(filter(passes, itertools.product(range(3), repeat=len(scores))), key=ladder.cost)
    assert ladder.cost(best) <= ladder.cost(found) <= ladder.cost(ladder.widest)


@given(st.integers(1, 12), st.integers(0, 2**32))
def test_what_is_found_passes_even_where_wider_is_sometimes_worse(count, seed):
    drawn, random = {}, Random(seed)
    ladder = ladder_of([(1.0, 0.5, 0.0)] * count)

    def passes(assignment):
        return assignment == ladder.widest or drawn.setdefault(assignment, random.random() < 0.4)

    found = cheapest_passing(ladder, passes)
    assert found == ladder.widest or drawn[found]  # it was tried


def test_a_unit_is_never_below_its_lowest():
    found = cheapest_passing(ladder_of([(1.0, 0.5, 0.0)] * 3, lowest=(0, 1, 0)), lambda assignment: True)
    assert found == (0, 1, 0)


@given(planted(most=20))
def test_what_fails_later_is_raised_until_it_passes(case):
    count, needs, scores = case
    ladder = ladder_of(scores)

    def passes(assignment):
        return all(assignment[unit] >= place for unit, place in needs.items())

    raised = raise_until_passing(ladder, (0,) * count, passes)
    assert passes(raised)


@given(st.sets(st.integers(0, 30)), st.permutations(range(31)))
def test_the_least_kept_are_the_ones_needed(needed, order):
    assert set(minimal_subset(order, lambda kept: needed <= set(kept))) == needed
