"""Losses and gradients that are not finite: where, and only when it is not the scaler's ordinary work."""

import math

import pytest

from ampwise.rules.amp6xx_gradients import non_finite_gradients, non_finite_loss
from ampwise.runs.rows import StepRow
from ampwise.watch.gradient_health import BadStep

from ...for_each import for_each
from .runs import NAMES, findings, judged, scaler_rows, stepped


def with_bad_losses(*steps, value=math.nan, n=60, scale=None):
    rows = [{"scale": scale, "loss": value if step in steps else 1.0} for step in range(1, n + 1)]
    for step in steps:
        rows[step - 1] |= {"norm": math.nan, "skipped": scale is not None}
    return stepped(rows, precision="fp16" if scale else "fp32")


def test_the_first_module_is_named():
    health = with_bad_losses(30, 31)
    health.add_bad(BadStep(step=30, loss=math.nan, module="model.decoder.norm"))
    (finding,) = non_finite_loss.check_gradients(health)
    assert (finding.place.module, finding.place.step) == ("model.decoder.norm", 30)
    assert finding.message == (
        "the loss is nan at 2 steps: `model.decoder.norm` is the first module whose output is not finite"
    )
    assert not list(non_finite_gradients.check_gradients(health)), "the loss was first"


@for_each(
    ("healthy", "text"),
    [
        (True, "the weights were finite, so the data or an operation of this step is the cause"),
        (
            False,
            "the weights were not finite before this step, so the cause is an earlier update, or the initialisation",
        ),
        (None, "whether the weights were finite before is unknown"),
    ],
)
def test_without_a_module_it_says_what_is_known(healthy, text):
    health = with_bad_losses(30, value=math.inf)
    health.add_bad(BadStep(step=30, loss=math.inf, healthy_before=healthy))
    (finding,) = non_finite_loss.check_gradients(health)
    assert finding.message == f"the loss is inf: {text}"


def test_without_details_it_is_still_said():
    (finding,) = non_finite_loss.check_gradients(with_bad_losses(7, scale=65536.0))
    assert finding.message == "the loss is nan: its origin is unknown"


BAD = ("layers.1.weight", "layers.5.bias", "layers.3.weight")


def test_without_a_scaler_it_is_real_and_the_last_in_forward_order_is_named():
    health = stepped([{"scale": None}] * 20 + [{"scale": None, "norm": math.inf}], precision="fp32")
    health.add_bad(BadStep(step=21, loss=1.0, parameters=BAD))
    (finding,) = non_finite_gradients.check_gradients(health)
    assert (finding.place.parameter, finding.place.step) == ("layers.5.bias", 21)
    assert finding.message == "3 gradients are not finite while the loss is: no scaler skips the step"


def test_what_persists_down_to_a_scale_of_one_is_real():
    rows = list(scaler_rows(lambda step, scale: step < 19, 30))
    health = stepped(rows)
    for step in range(1, 19):
        health.add_bad(BadStep(step=step, loss=1.0, scale=rows[step - 1]["scale"], parameters=("layers.2.weight",)))
    (finding,) = non_finite_gradients.check_gradients(health)
    assert finding.place.parameter == "layers.2.weight"
    assert finding.message == (
        "only this gradient is not finite while the loss is, at 18 steps: lowering the loss scale from 65536 to 0.5 "
        "does not help"
    )


def test_far_from_overflow_just_before_is_real():
    rows = [{"scale": 1024.0, "norm": 0.01}] * 30
    rows[20] = {"scale": 1024.0, "norm": math.nan, "skipped": True}
    (finding,) = non_finite_gradients.check_gradients(stepped(rows))
    assert "the steps before were far from overflow at the same loss scale of 1024" in finding.message


def test_a_scaler_in_bf16_hides_nothing():
    health = stepped([{"scale": 65536.0}, {"scale": 65536.0, "norm": math.nan, "skipped": True}], precision="bf16")
    (finding,) = non_finite_gradients.check_gradients(health)
    assert "in BF16" in finding.message


def spoiled(after, then=(), precision="bf16"):
    """Without a scaler: one gradient is NaN at step 21, and what came ``after`` that with its weights NaN too."""
    rows = [{"scale": None}] * 20 + [{"scale": None, "norm": math.nan}]
    rows += [{"scale": None, "norm": math.nan, **row} for row in after]
    health = stepped([*rows, *then], precision=precision)
    for step, row in enumerate(rows[20:], start=21):
        parameters = tuple(NAMES) if step > 21 else NAMES[:1]
        health.add_bad(
            BadStep(step=step, loss=row.get("loss", 1.0), parameters=tuple(parameters), healthy_before=step == 21)
        )
    return health


def test_corrupted_weights_are_not_blamed_on_the_loss():
    """Without a scaler, gradients that are not finite go into the weights, and the next loss is not finite."""
    health = spoiled([{"loss": math.nan}] * 9)
    found = findings(health)
    assert "AMP612" not in found
    (finding,) = found["AMP613"]
    assert finding.place.step == 21
    assert finding.message == (
        "only this gradient is not finite while the loss is: no scaler skipped the step, and the weights are not "
        "finite since step 21, nor is any later loss"
    )
    assert judged(health)["AMP613"].count == 1, "one step had a loss that was finite"
    assert "loss scale does not help" not in finding.rule.summary, "there is none"


def test_weights_that_were_fixed_end_what_is_said_of_losses():
    (finding,) = findings(spoiled([{"loss": math.nan}] * 4, then=[{"scale": None}] * 5))["AMP613"]
    assert finding.message.endswith("not finite since step 21, nor were the losses up to step 25")


def test_losses_that_nobody_knows_are_not_taken_for_finite():
    health = spoiled([{"loss": None}] * 4)
    (finding,) = findings(health)["AMP613"]
    assert finding.message.endswith("no scaler skipped the step, and the weights are not finite since step 21")
    assert judged(health)["AMP613"].count == 1


def test_losses_that_stay_finite_count():
    """Of a branch that reaches no loss, or gradients that something has mended before the step."""
    health = spoiled([{"loss": 1.0}] * 4)
    (finding,) = findings(health)["AMP613"]
    assert finding.message.endswith(", at 5 steps: no scaler skips the step")
    assert judged(health)["AMP613"].count == 5


def test_in_fp16_without_a_scaler_one_is_advised():
    (finding,) = findings(spoiled([], precision="fp16"))["AMP613"]
    assert "use a GradScaler with FP32 parameters" in finding.fix
    (finding,) = findings(spoiled([], precision="bf16"))["AMP613"]
    assert "GradScaler" not in finding.fix


def test_losses_are_counted_by_step_and_not_by_streak():
    health = with_bad_losses(30, 31, 32, 40, scale=1024.0)
    assert judged(health)["AMP612"].count == 4
    (finding,) = non_finite_loss.check_gradients(health)
    assert finding.message.startswith("the loss is nan at 4 steps: ")


def test_a_loss_that_breaks_while_the_scaler_searches_is_distinguished_from_its_search():
    """Overflow of gradients is skipped and spoils nothing: a loss that is not finite then has a cause of its own."""
    rows = list(scaler_rows(lambda step, scale: step <= 12, 30))
    for row in rows[3:12]:
        row["loss"] = math.nan
    health = stepped(rows)
    found = findings(health)
    assert "AMP613" not in found, "three skips from 65536 on are ordinary"
    assert found["AMP612"][0].place.step == 4
    assert judged(health)["AMP612"].count == 9


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
    (finding,) = non_finite_gradients.check_gradients(health)
    assert finding.place.parameter == "0.4"
