"""Batches held back: what fails there is made wider, the cause first, and no more than that."""

import math

from ampwise.tune.search.arrangement import parse_formats
from ampwise.tune.search.descent import FormatLadder
from ampwise.tune.search.search import verify
from ampwise.tune.search.trials import SearchTrial, TrialsSpent
from ampwise.tune.search.units import SearchUnit

UNITS = [SearchUnit(name=name, module=None, kind="Linear", flops=1.0) for name in "abc"]
TOLERANCE = 0.01
LADDER = FormatLadder(
    formats=2,
    lowest=(0, 0, 0),
    costs=((1.0, 2.0),) * 3,
    scores=((0.005, 0.0), (0.004, 0.0), (0.001, 0.0)),  # by which the last one is the least of all
)


class Numbers:
    """Trials that are only numbers."""

    def __init__(self, error, batches=(None,), limit=math.inf):
        self.batches, self.limit, self.choices = batches, limit, parse_formats(("bf16", "fp32"))
        self.seen, self._error = {}, error

    def of(self, assignment, tolerance):
        if assignment not in self.seen and len(self.seen) >= self.limit:
            raise TrialsSpent
        return self.whole(assignment)

    def whole(self, assignment):
        error = self._error(assignment)
        self.seen[assignment] = SearchTrial(assignment=assignment, loss=0.0, gradient=error, worst="norm")
        return self.seen[assignment]

    def passed(self, tolerance):
        return [each for each, trial in self.seen.items() if trial.error <= tolerance]


def additive(a, b, c):
    return lambda assignment: sum(error for error, at in zip((a, b, c), assignment, strict=True) if not at)


def verified(held, best=(0, 0, 0), trials=None):
    trials = trials or Numbers(lambda assignment: 0.0)
    return verify(held, trials, LADDER, best, UNITS, TOLERANCE, lambda batches: {})


def test_what_passes_is_left_as_it_is():
    held = Numbers(additive(0.001, 0.001, 0.001))
    checked = verified(held)
    assert (checked.best, checked.verified.raised, len(held.seen)) == ((0, 0, 0), (), 1)
    assert verified(Numbers(lambda assignment: 1.0), best=(1, 1, 1)).best == (1, 1, 1)
    assert verified(Numbers(lambda assignment: 1.0, batches=())).verified is None


def test_what_is_measured_counts_and_not_what_was_thought():
    """Raising both that were thought worse would do as well, but one is enough, and is the cause."""
    checked = verified(Numbers(additive(0.004, 0.004, 0.008)))
    assert checked.best == (0, 0, 1)
    assert (checked.verified.raised, checked.verified.worst) == (("c",), "norm")
    assert checked.verified.error_after <= TOLERANCE < checked.verified.error
    assert {unit: (place, trial.error) for unit, (place, trial) in checked.alone.items()} == {2: (0, 0.008)}


def test_it_has_to_pass_on_the_other_batches_as_well():
    other = Numbers(lambda assignment: 0.02 if assignment == (0, 0, 1) else 0.0)
    checked = verified(Numbers(additive(0.004, 0.004, 0.008)), trials=other)
    assert checked.best != (0, 0, 1)
    assert other.of(checked.best, TOLERANCE).error <= TOLERANCE


def test_where_the_trials_are_spent_it_is_the_cheapest_that_passed_or_wide():
    checked = verified(Numbers(additive(0.02, 0.02, 0.02), limit=3))
    assert (checked.best, checked.spent) == ((1, 1, 1), True)
