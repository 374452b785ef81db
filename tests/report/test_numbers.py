"""The few numbers at the top of a page."""

import math

import pytest

from ampwise.report.run_facts import headline_numbers_of
from ampwise.runs.rows import StepBucket, StepRow, merge_buckets


def told(run):
    return {one.name: (one.value, one.note) for one in headline_numbers_of(run)}


def losses(*values, scale=None):
    return [StepBucket.of(StepRow(step=step, loss=value, scale=scale)) for step, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ((4.0, 3.0, 2.0), "4 → 2"),
        ((4.0,), "4"),
        ((None, 4.0, None), "4"),
        ((4.0, math.nan), "4 → NaN"),
        ((4.0, 3.0, math.inf, None), "4 → inf"),
        ((4.0, -math.inf), "4 → -inf"),
        ((math.nan, 2.0), "NaN → 2"),
        ((4.0, math.nan, 2.0), "4 → 2"),
        ((math.nan,), "NaN"),
    ],
)
def test_the_loss_from_its_first_to_its_last(make_run, values, shown):
    assert told(make_run(steps=losses(*values)))["loss"][0] == shown


@pytest.mark.parametrize(("bad", "shown"), [(1, "4 → 2"), (10, "4 → NaN")])
def test_merged_steps_are_what_most_of_them_were(make_run, bad, shown):
    steps = losses(4.0, *[2.0] * 5, *[math.nan] * bad)
    assert told(make_run(steps=[steps[0], merge_buckets(steps[1:])]))["loss"][0] == shown


def test_without_a_loss_there_is_none(make_run):
    assert "loss" not in told(make_run(steps=losses(None, None)))


@pytest.mark.parametrize(("scale", "shown"), [(65536.0, "65,536"), (2.0**20, "2^20"), (3000.5, "3000.5")])
def test_the_scale_as_the_layers_have_it(make_run, scale, shown):
    from ampwise.report.layers import describe_layers, layers_of

    run = make_run(steps=losses(1.0, scale=scale))
    assert told(run)["loss scale"][0] == shown
    assert describe_layers(layers_of(run)).endswith(f"at the last loss scale, {shown}")


def test_skips_are_of_the_steps_of_all_optimizers(make_run):
    steps = [StepBucket.of(StepRow(optimizer=o, step=n, skipped=n <= 16)) for o in (0, 1) for n in range(1, 41)]
    found = told(make_run({"steps": 40}, steps=steps))
    assert found["steps"] == ("40", "")
    assert found["skipped"] == ("32", "40.0% over all optimizers")
    assert told(make_run({"steps": 40}, steps=steps[:40]))["skipped"] == ("16", "40.0%")
