"""One table of names: what is known is sent under them, and what is not known never is."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.finding import Place
from ampwise.finding.registry import find_rule
from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.underflow import underflow
from ampwise.runs.events import LoggedEvent
from ampwise.runs.rows import SKIP_RATE_STEPS, CountedFinding, LayerSample, StepRow
from ampwise.runs.sinks.metrics import PREFIX, STEP, MetricRows, SkipCounter, TimedEvent

FACTS = {"loss": "loss", "loss_scale": "scale", "grad_norm": "norm", "lr": "lr"}
ORDER = ("loss", "loss_scale", "grad_norm", "skipped", "lr", "skip_rate")
numbers = st.none() | st.floats()
# Under a scale of 2**8, FP16's smallest number is 2**-32: the counts fall off towards it, among many zeros.
FALLING = Census(
    binades={-33: 400, -32: 400, -31: 800, -30: 1600, -29: 1600}, zeros=100_000, amax=2**-28.5, amin=2**-32
)
CLEAN = Census(binades={-4: 1000}, amax=2**-3.5, amin=2**-4)


def sample(scale, **layers):
    return LayerSample(first=7, last=7, scale=scale, layers=layers)


def found(*codes):
    return [CountedFinding(finding=find_rule(code).at(Place(), "here")) for code in codes]


def test_the_page_has_the_whole_table():
    page = (Path(__file__).parents[3] / "docs" / "sinks.md").read_text()
    listed = [PREFIX + name for name in re.findall(rf"^\| `{PREFIX}([\w/]+)` \|", page, re.MULTILINE)]
    metrics, sent = MetricRows(), []
    step = StepRow(step=3, loss=1.0, scale=2.0, norm=1.0, lr=0.1)
    for told in (step, sample(2.0**8, one=CLEAN), found("AMP101"), LoggedEvent(name="x", level="error", message="y")):
        sent += row_of(metrics, told).metrics
    assert listed == sent
    assert STEP not in sent


def row_of(metrics, told, skips=None):
    rate = (skips or SkipCounter()).rate(told) if isinstance(told, StepRow) else None
    return metrics.row(TimedEvent(1_700_000_000.0, told, rate))


@given(numbers, numbers, numbers, numbers, st.booleans(), st.integers(0, 3))
def test_a_row_has_what_the_step_knows_and_nothing_else(loss, scale, norm, lr, skipped, optimizer):
    step = StepRow(optimizer=optimizer, step=3, loss=loss, scale=scale, norm=norm, lr=lr, skipped=skipped)
    row = row_of(MetricRows(), step)
    prefix = PREFIX if optimizer == 0 else f"{PREFIX}optimizer{optimizer}/"
    known = {name: getattr(step, fact) for name, fact in FACTS.items() if getattr(step, fact) is not None}
    expected = {**known, "skipped": float(skipped), "skip_rate": float(skipped)}
    assert row.step == 3
    assert repr(dict(row.metrics)) == repr(  # in which a NaN is a NaN
        {prefix + name: expected[name] for name in ORDER if name in expected}
    )


@given(st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=3 * SKIP_RATE_STEPS))
def test_the_rate_of_skips_is_over_the_last_steps_of_each_optimizer(taken):
    metrics, skips, before = MetricRows(), SkipCounter(), {0: [], 1: []}
    for optimizer, skipped in taken:
        before[optimizer].append(skipped)
        row = row_of(metrics, StepRow(optimizer=optimizer, step=len(before[optimizer]), skipped=skipped), skips)
        recent = before[optimizer][-SKIP_RATE_STEPS:]
        prefix = PREFIX + ("optimizer1/" if optimizer else "")
        assert row.metrics[f"{prefix}skip_rate"] == pytest.approx(sum(recent) / len(recent))


def test_underflow_is_the_share_over_all_layers():
    row = row_of(MetricRows(), sample(256.0, a=FALLING, b=CLEAN))
    lost = underflow(FALLING, 256.0)
    assert lost.lost > 100
    assert (row.step, dict(row.metrics)) == (7, {"ampwise/underflow_share": lost.lost / (lost.values + CLEAN.count)})


def test_underflow_is_unknown_without_a_scale_and_where_nothing_is_counted():
    metrics = MetricRows()
    assert row_of(metrics, sample(None, a=CLEAN)) is None  # nobody has said FP16
    assert row_of(metrics, sample(256.0, a=CLEAN)).metrics == {"ampwise/underflow_share": 0.0}
    assert (
        row_of(metrics, sample(256.0, a=Census(binades={-60: 5}, amax=2**-60, amin=2**-60))) is None
    )  # never was FP16
    assert row_of(metrics, sample(256.0, a=Census(binades={0: 5}, nans=1, amax=1.0, amin=1.0))) is None
    assert row_of(metrics, sample(256.0)) is None


def test_findings_are_counted_by_severity_when_their_number_changes():
    metrics = MetricRows()
    row_of(metrics, StepRow(step=12))
    row_of(metrics, StepRow(optimizer=1, step=99))
    row = row_of(metrics, found("AMP101", "AMP103", "AMP810"))
    assert row.step == 12  # of the first optimizer
    assert dict(row.metrics) == {
        "ampwise/findings/errors": 2.0,
        "ampwise/findings/warnings": 1.0,
        "ampwise/findings/info": 0.0,
    }
    assert row_of(metrics, found("AMP101", "AMP103", "AMP810")) is None
    assert row_of(metrics, []).metrics["ampwise/findings/errors"] == 0.0


def test_events_are_counted_by_level():
    metrics = MetricRows()
    row_of(metrics, StepRow(step=12))
    for level, expected in (("warning", (0.0, 1.0, 0.0)), ("info", (0.0, 1.0, 1.0)), ("warning", (0.0, 2.0, 1.0))):
        row = row_of(metrics, LoggedEvent(name="rolled-back", level=level, message="rolled back"))
        assert row.step == 12
        names = ("ampwise/events/errors", "ampwise/events/warnings", "ampwise/events/info")
        assert dict(row.metrics) == dict(zip(names, expected, strict=True))


def test_numbers_are_floats():
    row = row_of(MetricRows(), StepRow(step=1, loss=2, scale=1024, norm=math.inf, skipped=True))
    assert {type(value) for value in row.metrics.values()} == {float}
