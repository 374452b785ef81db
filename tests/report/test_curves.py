"""Thinning keeps what matters."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ampwise.report.curves import by_optimizer, skip_rates, thin_out
from ampwise.runs.rows import METRICS, SKIP_RATE_STEPS, StepBucket, StepRow

ROWS = st.lists(
    st.builds(
        StepRow,
        optimizer=st.integers(0, 2),
        step=st.integers(1, 10_000),
        loss=st.none() | st.floats(),
        norm=st.none() | st.floats(min_value=0),
        skipped=st.booleans(),
    ),
    max_size=60,
    unique_by=lambda row: (row.optimizer, row.step),
)


@given(ROWS, st.integers(1, 20))
def test_nothing_that_matters_is_lost(rows, most):
    buckets = [StepBucket.of(row) for row in rows]
    thin = thin_out(buckets, most)
    for optimizer, line in by_optimizer(buckets).items():
        kept = by_optimizer(thin)[optimizer]
        assert len(kept) <= most
        assert sum(one.count for one in kept) == len(line)
        assert sum(one.skipped for one in kept) == sum(one.skipped for one in line)
        assert all(before.last < after.first for before, after in itertools.pairwise(kept))
        for metric in METRICS:
            before, after = ([getattr(one, metric) for one in some] for some in (line, kept))
            assert sum(spread.bad for spread in after) == sum(spread.bad for spread in before)
            for end, extreme in (("low", min), ("high", max)):
                ends = [[getattr(s, end) for s in some if getattr(s, end) is not None] for some in (before, after)]
                assert extreme(ends[0], default=None) == extreme(ends[1], default=None)


def test_few_steps_stay_as_they_are(make_steps):
    assert thin_out(make_steps(9), 9) == make_steps(9)


def test_unknown_is_none_and_not_finite_is_counted():
    row = StepBucket.of(StepRow(step=3, loss=float("inf"))).as_dict()
    assert row["norm"] is None
    assert row["loss"] == {"low": None, "mean": None, "high": None, "not_finite": 1}
    assert row["first"] == row["last"] == 3


@given(st.lists(st.booleans(), max_size=400), st.integers(1, 60))
def test_a_skip_rate_is_of_the_last_hundred_steps_or_of_its_own(skips, most):
    buckets = [StepBucket.of(StepRow(step=n, skipped=skipped)) for n, skipped in enumerate(skips, 1)]
    points = thin_out(buckets, most)
    for point, rate in zip(points, skip_rates(points), strict=True):
        until = skips[: point.last]
        spans = [until[start:] for start in {0, *(one.first - 1 for one in points if one.first <= point.first)}]
        looked_at = min((span for span in spans if len(span) >= SKIP_RATE_STEPS), key=len, default=until)
        assert rate == sum(looked_at) / len(looked_at)
