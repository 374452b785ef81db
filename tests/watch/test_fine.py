"""What is said to be fine did happen, was judged, and nothing was found about it."""

import math
from types import SimpleNamespace

import pytest

from ampwise.numbers.census.algebra import Census
from ampwise.runs.rows import LayerSample, StepRow
from ampwise.watch.findings import list_passed_checks
from ampwise.watch.gradient_health import GradientHealth
from ampwise.watch.run_events import CheckpointSaved, ForwardCall, RunEvents, ScalerCreated

EVERYTHING = {"Backward": 30, "OptimizerStep": 30}
SCALED = {"Backward": 30, "ScalerStep": 30, "ScalerUpdate": 30, "Clip": 30, "SchedulerStep": 30, "Accumulation": 10}

CLIPPED = "Gradients were unscaled when they were clipped (30 times)."
SCALED_FOR_FP16 = "Losses were scaled, as FP16 needs (30 backward passes)."
NOT_SCALED_IN_BF16 = "Losses were not scaled, which BF16 does not need (30 backward passes)."
OUTSIDE = "Backward passes ran outside of autocast (30 times)."
IN_ORDER = "The scaler's methods were called in the right order (30 updates)."
THROUGH = "Every step went through the scaler (30 steps)."
SCHEDULE = "The scheduler did not advance on skipped steps."
DIVIDED = "No mean loss was left undivided where gradients were accumulated (10 steps)."
SAVED = "Checkpoints contain the scaler's state."
EVALUATED = "Evaluation ran in the precision of training."
WITHIN = "Gradients stayed within their format's range."
WITHIN_BUT = "Gradients stayed within their format's range, except for overflows that the scaler handled."


def conduct(*precisions, scaler=None, evaluation=None, **parts):
    forwards = {ForwardCall(training=True, precision=each, device="cuda", model="Net"): 30 for each in precisions}
    if evaluation is not None:
        forwards[ForwardCall(training=False, precision=evaluation, device="cuda", model="Net")] = 5
    scalers = [] if scaler is None else [ScalerCreated(enabled=scaler, precisions=precisions)]
    return RunEvents(steps=30, forwards=forwards, scalers=scalers, **parts)


def health(*, samples=1, scale=None, skips=0, precision="fp32"):
    made = GradientHealth(precision=precision)
    for step in range(1, 31):
        skipped = step <= skips
        made.add_step(StepRow(step=step, scale=scale, skipped=skipped, norm=math.inf if skipped else 1.0, loss=1.0))
    for step in range(samples):
        made.add_sample(LayerSample(first=step, last=step, scale=scale, layers={"w": Census(binades={-3: 9})}))
    return made


def seen(*codes):
    return [SimpleNamespace(finding=SimpleNamespace(rule=SimpleNamespace(code=code))) for code in codes]


def test_a_run_in_fp32_is_not_praised_for_what_it_did_not_do():
    assert list_passed_checks(conduct("fp32"), EVERYTHING, [], {0: health()}) == [WITHIN]


def test_a_run_in_bf16():
    said = list_passed_checks(conduct("bf16"), EVERYTHING, [], {0: health()})
    assert said == [NOT_SCALED_IN_BF16, OUTSIDE, WITHIN]


def test_a_run_in_fp16_that_does_all_of_it():
    run = conduct("fp16", scaler=True, evaluation="fp16", saves={CheckpointSaved(optimizer=True, scaler=True): 1})
    said = list_passed_checks(run, SCALED, [], {0: health(scale=1024.0, skips=3)})
    assert said == [
        CLIPPED, SCALED_FOR_FP16, OUTSIDE, IN_ORDER, THROUGH, SCHEDULE, DIVIDED, SAVED, EVALUATED, WITHIN_BUT
    ]  # fmt: skip


@pytest.mark.parametrize("code", ["AMP301", *(f"AMP6{number:02}" for number in range(1, 14))])
@pytest.mark.parametrize("skips", [0, 3])
def test_any_finding_about_gradients_is_one_too_many(code, skips):
    said = list_passed_checks(conduct("fp16"), {}, seen(code), {0: health(scale=1024.0, skips=skips)})
    assert not {WITHIN, WITHIN_BUT}.intersection(said)


def test_gradients_that_were_not_looked_at_are_not_praised():
    assert not list_passed_checks(conduct("fp32"), EVERYTHING, [], {0: health(), 1: health(samples=0)})
    assert not list_passed_checks(conduct("fp32"), EVERYTHING, [], {})


@pytest.mark.parametrize("code", ["AMP108", "AMP109", "AMP301", "AMP302", "AMP304", "AMP308"])
def test_losses_were_not_scaled_as_they_need(code):
    assert SCALED_FOR_FP16 not in list_passed_checks(conduct("fp16", scaler=True), SCALED, seen(code), {})


def test_a_scaler_in_bf16_is_not_praised_for_its_scale():
    said = list_passed_checks(conduct("bf16", scaler=True), SCALED, seen("AMP302"), {})
    assert said == [CLIPPED, OUTSIDE, IN_ORDER, THROUGH, DIVIDED]


@pytest.mark.parametrize(("half", "code"), [("fp16", "AMP301"), ("fp16", "AMP304"), ("bf16", "AMP306")])
def test_parameters_in_half_need_no_autocast_to_be_outside_of(half, code):
    assert OUTSIDE not in list_passed_checks(conduct(half), EVERYTHING, seen(code), {})


def test_a_scaler_that_is_off_does_nothing():
    run = conduct("fp16", scaler=False, saves={CheckpointSaved(optimizer=True, scaler=True): 1})
    assert list_passed_checks(run, SCALED, [], {}) == [OUTSIDE, DIVIDED]


def test_precisions_that_differ_are_not_spoken_of_as_one():
    said = list_passed_checks(conduct("fp16", "fp32", scaler=True), SCALED, [], {})
    assert SCALED_FOR_FP16 not in said
    assert NOT_SCALED_IN_BF16 not in list_passed_checks(conduct("bf16", "fp32"), SCALED, [], {})


def test_not_every_step_went_through_the_scaler():
    assert THROUGH not in list_passed_checks(conduct("fp16", scaler=True), {**SCALED, "OptimizerStep": 1}, [], {})


def test_a_schedule_shows_nothing_where_no_step_was_skipped():
    said = list_passed_checks(conduct("fp16", scaler=True), SCALED, [], {0: health(scale=1024.0)})
    assert SCHEDULE not in said
    assert WITHIN in said


@pytest.mark.parametrize(
    ("trained", "evaluated", "codes", "said"),
    [
        ("fp16", "fp16", (), True),
        ("fp16", "fp32", ("AMP501",), False),
        ("fp32", "fp32", (), False),
        ("fp32", "bf16", (), False),
    ],
)
def test_evaluation_is_compared_with_training_in_half(trained, evaluated, codes, said):
    run = conduct(trained, evaluation=evaluated)
    assert (EVALUATED in list_passed_checks(run, EVERYTHING, seen(*codes), {})) is said


def test_without_a_step_nothing_was_fine():
    run = conduct("fp16", scaler=True, evaluation="fp16")
    run.steps = 0
    assert not list_passed_checks(run, SCALED, [], {0: health()})
