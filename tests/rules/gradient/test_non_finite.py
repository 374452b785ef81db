"""Losses and gradients that are not finite: where, and only when it is not the scaler's ordinary work."""

import math

import pytest

from ampwise.evidence.streaks import BadStep
from ampwise.record.rows import StepRow
from ampwise.rules.gradient import non_finite_gradients, non_finite_loss

from .runs import NAMES, findings, scaler_rows, stepped


def with_bad_losses(*steps, value=math.nan, n=60, scale=None):
    rows = [{"scale": scale, "loss": value if step in steps else 1.0} for step in range(1, n + 1)]
    for step in steps:
        rows[step - 1] |= {"norm": math.nan, "skipped": scale is not None}
    return stepped(rows, precision="fp16" if scale else "fp32")


def test_the_first_module_is_named():
    health = with_bad_losses(30, 31)
    health.add_bad(BadStep(step=30, loss=math.nan, module="model.decoder.norm"))
    (finding,) = non_finite_loss.check(health)
    assert (finding.place.module, finding.place.step) == ("model.decoder.norm", 30)
    assert finding.message == (
        "the loss is nan: `model.decoder.norm` is the first module whose output is not finite, "
        "and the weights were finite before; 2 steps in all"
    )
    assert not list(non_finite_gradients.check(health)), "the loss was first"


@pytest.mark.parametrize(
    ("healthy", "text"),
    [
        (True, "the weights were finite before, so it arose in this forward pass, from the data or an operation"),
        (False, "the weights were not finite before this step, so the cause lies further back"),
    ],
)
def test_without_a_module_it_says_what_is_known(healthy, text):
    health = with_bad_losses(30, value=math.inf)
    health.add_bad(BadStep(step=30, loss=math.inf, healthy_before=healthy))
    (finding,) = non_finite_loss.check(health)
    assert finding.message == f"the loss is inf: {text}"
    assert finding.evidence["weights_finite_before"] is healthy


def test_without_details_it_is_still_said():
    (finding,) = non_finite_loss.check(with_bad_losses(7, scale=65536.0))
    assert finding.message == "the loss is nan: where it arose is not known"


BAD = ("layers.1.weight", "layers.5.bias", "layers.3.weight")


def test_without_a_scaler_it_is_real_and_the_last_in_forward_order_is_named():
    health = stepped([{"scale": None}] * 20 + [{"scale": None, "norm": math.inf}], precision="fp32")
    health.add_bad(BadStep(step=21, loss=1.0, parameters=BAD))
    (finding,) = non_finite_gradients.check(health)
    assert (finding.place.parameter, finding.place.step) == ("layers.5.bias", 21)
    assert finding.message == (
        "3 gradients are not finite while the loss is; the backward pass reached this one first, "
        "and no scaler skips the step"
    )


def test_what_persists_down_to_a_scale_of_one_is_real():
    rows = list(scaler_rows(lambda step, scale: step < 19, 30))
    health = stepped(rows)
    for step in range(1, 19):
        health.add_bad(BadStep(step=step, loss=1.0, scale=rows[step - 1]["scale"], parameters=("layers.2.weight",)))
    (finding,) = non_finite_gradients.check(health)
    assert finding.place.parameter == "layers.2.weight"
    assert finding.message == (
        "this gradient alone is not finite while the loss is, and a loss scale lowered from 65536 to 0.5 does not help"
        "; 18 such steps in all"
    )


def test_far_from_overflow_just_before_is_real():
    rows = [{"scale": 1024.0, "norm": 0.01}] * 30
    rows[20] = {"scale": 1024.0, "norm": math.nan, "skipped": True}
    (finding,) = non_finite_gradients.check(stepped(rows))
    assert "though the steps before were far from overflow at the same loss scale of 1024" in finding.message


def test_a_scaler_in_bf16_hides_nothing():
    health = stepped([{"scale": 65536.0}, {"scale": 65536.0, "norm": math.nan, "skipped": True}], precision="bf16")
    (finding,) = non_finite_gradients.check(health)
    assert "in BF16" in finding.message


def test_spoiled_weights_are_not_blamed_on_the_loss():
    """Without a scaler, gradients that are not finite go into the weights, and the next loss is not finite."""
    rows = [{"scale": None}] * 9 + [{"scale": None, "norm": math.nan}]
    rows += [{"scale": None, "loss": math.nan, "norm": math.nan}] * 5
    health = stepped(rows, precision="fp32")
    found = findings(health)
    assert "AMP612" not in found
    assert found["AMP613"][0].place.step == 10


@pytest.mark.parametrize("start", [16, 24])
@pytest.mark.parametrize("details_first", [True, False])
def test_ordinary_overflow_is_silent(start, details_first):
    health = stepped([])
    for step, row in enumerate(scaler_rows(lambda step, scale: scale > 512, 4500, init_scale=2.0**start), start=1):
        bad = BadStep(step=step, loss=1.0, scale=row["scale"], parameters=tuple(NAMES))
        if row["skipped"] and details_first:
            health.add_bad(bad)
        health.add_step(StepRow(step=step, loss=1.0, **row))
        if row["skipped"] and not details_first:
            health.add_bad(bad)
    assert health.streaks.total > 2
    assert not findings(health)


def test_names_that_are_unknown_are_taken_in_the_order_given():
    health = stepped([{"scale": None, "norm": math.nan}], precision="fp32")
    health.names = ()
    health.add_bad(BadStep(step=1, loss=1.0, parameters=("0.1", "0.4")))
    (finding,) = non_finite_gradients.check(health)
    assert finding.place.parameter == "0.4"
