"""Rules about the loss scale and skipped steps."""

import pytest

from ampwise.rules.amp6xx_gradients import scale_collapse, scale_oscillation, skip_rate

from ...for_each import for_each
from .runs import findings, judged, scaler_rows, stepped


def run(overflows, steps=300, **settings):
    interval = settings.get("growth_interval", 2000)
    return stepped(scaler_rows(overflows, steps, **settings), growth_interval=interval)


def test_a_nan_at_every_step_is_a_collapse():
    health = run(lambda step, scale: step >= 100)
    (finding,) = scale_collapse.check_gradients(health)
    assert finding.place.step == 100
    assert judged(health)["AMP607"].count == 201
    assert finding.message.startswith("201 steps in a row were skipped, and the loss scale fell from 65536 to ")
    assert "AMP609" not in findings(health), "said once"


def test_a_collapse_goes_on_when_the_loss_breaks_too():
    rows = list(scaler_rows(lambda step, scale: step >= 100, 120))
    for row in rows[103:]:
        row["loss"] = float("nan")
    (finding,) = scale_collapse.check_gradients(stepped(rows))
    assert finding.place.step == 100
    assert finding.message.startswith("21 steps in a row were skipped, and the loss scale fell from 65536 to ")


@pytest.mark.parametrize(("skips", "found"), [(7, 0), (8, 1)])
def test_eight_in_a_row_after_a_good_start(skips, found):
    health = run(lambda step, scale: 100 <= step < 100 + skips)
    assert len(list(scale_collapse.check_gradients(health))) == found


@pytest.mark.parametrize("start", [2.0**24, 2.0**16])
def test_the_search_is_no_collapse_until_below_one(start):
    assert not list(scale_collapse.check_gradients(run(lambda step, scale: scale > 1, 80, init_scale=start)))
    (finding,) = scale_collapse.check_gradients(run(lambda step, scale: scale > 0.1, 80, init_scale=start))
    assert finding.place.step == 1


def test_single_skips_to_below_one_are_a_collapse():
    health = run(lambda step, scale: step % 20 == 0, 400, init_scale=64.0)
    (finding,) = scale_collapse.check_gradients(health)
    assert finding.message == "20 of 381 steps were skipped, and the loss scale fell from 64 to 2**-13"


@for_each("interval", [1, 2, 5, 15])
def test_alternating_is_oscillation(interval):
    health = run(lambda step, scale: scale > 65536, growth_interval=interval)
    (finding,) = scale_oscillation.check_gradients(health)
    share = int(finding.message.rsplit("% of", 1)[0].rsplit(" ", 1)[1]) / 100
    assert share == pytest.approx(1 / (interval + 1), abs=0.03)
    assert f"with growth_interval={interval}:" in finding.message
    assert set(findings(health)) == {"AMP608"}


def test_a_growth_that_takes_many_skips_to_undo_is_oscillation():
    health = run(lambda step, scale: scale > 65536, 2000, growth_interval=30, growth_factor=2.0**8)
    assert list(scale_oscillation.check_gradients(health))


def test_skips_that_follow_no_growth_are_a_rate():
    # Every eleventh batch overflows whatever the scale is; the scale grows in between.
    health = run(lambda step, scale: step % 11 == 0, 400, growth_interval=5, init_scale=2.0**20)
    assert not list(scale_oscillation.check_gradients(health))
    (finding,) = skip_rate.check_gradients(health)
    assert finding.message == "18 of the last 200 steps were skipped (9%)"
    assert judged(health)["AMP609"].count == 18


def test_few_skips_or_a_short_run_are_fine():
    assert not list(skip_rate.check_gradients(run(lambda step, scale: step % 25 == 0, 400, init_scale=2.0**40)))
    assert not list(skip_rate.check_gradients(run(lambda step, scale: step % 5 == 0, 80, init_scale=2.0**40)))
    assert not list(skip_rate.check_gradients(run(lambda step, scale: step < 20, 100, init_scale=2.0**24)))


def test_without_a_scaler_there_is_nothing_to_say():
    health = stepped([{"scale": None}] * 300, precision="bf16")
    assert not findings(health)
