"""How the scale moves: against torch's own rule, and against a state machine in plain Python."""

import math
from dataclasses import dataclass, replace

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ampwise import BadInput
from ampwise.train.scaler.loss_scale import (
    LARGEST,
    MAX_FORGIVEN,
    CounterField,
    ScaleLimits,
    UpdateField,
    new_counters,
    update_scale_,
)

from ...for_each import for_each

FREE = ScaleLimits(growth=2.0, backoff=0.5, interval=3, floor=1e-30, ceiling=LARGEST, hysteresis=1)


def fp32(number):
    with numpy.errstate(over="ignore"):
        return float(numpy.float32(number))


@dataclass
class Oracle:
    """The rule in words: what a step's overflow does to six numbers."""

    scale: float
    tracker: int = 0
    in_a_row: int = 0
    applied: int = 0
    skipped: int = 0
    bad_losses: int = 0

    def close(self, found, stepped, limits, move, loss=None):
        """Returns whether the scale was stuck."""
        self.skipped += sum(found[:stepped])
        self.applied += stepped - sum(found[:stepped])
        if not any(found):
            self.bad_losses = 0
        elif loss is not None and not math.isfinite(loss):
            self.bad_losses += 1
            if self.bad_losses <= MAX_FORGIVEN:
                return False
        if not move:
            return False
        if not any(found):
            self.in_a_row = 0
            self.tracker += 1
            if self.tracker == limits.interval:
                self.tracker = 0
                self.grow(limits)
            return False
        self.tracker = 0
        self.in_a_row += 1
        return self.in_a_row >= limits.hysteresis and self.lower(limits)

    def grow(self, limits):
        grown = fp32(self.scale * limits.growth)
        if grown != math.inf and self.scale < limits.ceiling:
            self.scale = min(grown, fp32(limits.ceiling))

    def lower(self, limits):
        floor = fp32(limits.floor)
        if self.scale <= floor:
            return True
        self.scale = max(fp32(self.scale * limits.backoff), floor)
        return False


def tensors(scale, tracker=0):
    return torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32), new_counters(torch.device("cpu"))


def outcomes(*found):
    return torch.tensor([[float(index), float(bad)] for index, bad in enumerate(found)])


limits_of_all_kinds = st.builds(
    ScaleLimits,
    growth=st.sampled_from([2.0, 1.1, 3.0, 1e20]),
    backoff=st.sampled_from([0.5, 0.1, 0.99]),
    interval=st.integers(1, 4),
    floor=st.sampled_from([2.0**-14, 0.1, 0.7, 1.0]),
    ceiling=st.sampled_from([LARGEST, 65536.0, 1e6 / 3, 8.0]),
    hysteresis=st.integers(1, 4),
)
# Of each step: who overflowed, how many of them were stepped, whether the scale is to move, what is known of the loss.
losses = st.sampled_from([None, 1.0, math.nan, math.inf, -math.inf])
histories = st.lists(
    st.tuples(st.lists(st.booleans(), min_size=1, max_size=3), st.integers(0, 3), st.booleans(), losses), max_size=30
)


@given(
    limits_of_all_kinds,
    # Where users put the scale: between the limits, on them, and beyond.
    st.sampled_from([1.0, 8.0, 1000.0, 2.0**-14, 2.0**-20, 0.1, 65536.0, 2.0**30, 2.0**127]),
    histories,
)
@example(replace(FREE, floor=0.1), 0.1, [([True], 1, True, None)])
@example(replace(FREE, interval=1), 2.0**127, [([False], 1, True, 1.0)] * 2)
@example(replace(FREE, floor=1.0), 2.0, [([True], 1, True, math.nan)] * (MAX_FORGIVEN + 3))
@example(
    FREE, 8.0, [([True], 1, True, math.nan)] * MAX_FORGIVEN + [([False], 1, True, 1.0), ([True], 1, True, math.nan)]
)
def test_every_history_moves_the_scale_as_the_rule_says(limits, start, history):
    scale, tracker, tally = tensors(start)
    oracle = Oracle(fp32(start))
    for found, stepped, move, loss in history:
        stepped = min(stepped, len(found))
        before = [oracle.scale, oracle.tracker]
        given = None if loss is None else torch.tensor(loss)
        facts = update_scale_(scale, tracker, tally, outcomes(*found), stepped, limits, move=move, loss=given)
        stuck = oracle.close(found, stepped, limits, move, loss)
        expected = [oracle.scale, oracle.tracker, oracle.in_a_row, oracle.applied, oracle.skipped, stuck, *before]
        length = len(expected) + 2 * len(found)
        assert facts[:length].tolist() == expected + outcomes(*found).flatten().tolist()
        assert facts[length:].isnan().tolist() == ([] if loss is None else [math.isnan(loss)])
        assert (scale.item(), tracker.item()) == (oracle.scale, oracle.tracker)
        assert tally.tolist() == [oracle.in_a_row, oracle.applied, oracle.skipped, oracle.bad_losses]


@given(
    st.floats(2.0**-20, 2.0**120, width=32),
    st.floats(1.0001, 1e3),
    st.floats(1e-3, 0.9999),
    st.integers(1, 5),
    st.lists(st.booleans(), max_size=20),
)
@example(2.0**127, 16.0, 0.5, 1, [False, False, True, False])  # growth past FP32 is none
def test_without_limits_it_is_torchs_rule_bit_for_bit(start, growth, backoff, interval, history):
    limits = replace(FREE, growth=growth, backoff=backoff, interval=interval, floor=1e-37)
    ours, theirs = tensors(start), tensors(start)
    for bad in history:
        if theirs[0] * backoff < 1e-36:
            break  # torch would go on to zero
        update_scale_(*ours, outcomes(bad), 1, limits)
        torch._amp_update_scale_(*theirs[:2], torch.tensor(float(bad)), growth, backoff, interval)
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
    assert (ours[0].dtype, ours[1].dtype) == (torch.float32, torch.int32)


@pytest.mark.parametrize("bad", [True, False])
def test_a_scale_set_beyond_a_limit_is_left_where_the_user_put_it(bad):
    limits = replace(FREE, floor=1.0, ceiling=8.0, interval=1)
    for start in (0.25, 32.0):
        scale, tracker, tally = tensors(start)
        facts = update_scale_(scale, tracker, tally, outcomes(bad), 1, limits)
        moved = start * (0.5 if bad and start > 1 else 2.0 if not bad and start < 8 else 1.0)
        assert scale.item() == moved
        assert facts[UpdateField.STUCK] == (bad and start < 1)


def test_one_step_never_passes_a_limit():
    limits = replace(FREE, growth=100.0, backoff=0.01, interval=1, floor=0.7, ceiling=1000.0)
    for start, bad, reached in ((1.0, True, fp32(0.7)), (500.0, False, 1000.0)):
        scale, *rest = tensors(start)
        assert not update_scale_(scale, *rest, outcomes(bad), 1, limits)[UpdateField.STUCK]
        assert scale.item() == reached


def test_an_overflow_below_the_hysteresis_restarts_the_wait_for_growth_and_moves_nothing():
    scale, tracker, tally = tensors(4.0, tracker=2)
    update_scale_(scale, tracker, tally, outcomes(True), 1, replace(FREE, hysteresis=2))
    assert (scale.item(), tracker.item(), tally[CounterField.IN_A_ROW].item()) == (4.0, 0, 1)


def test_a_tally_starts_from_what_was_saved():
    tally = new_counters(torch.device("cpu"), 1, 2, 3)
    assert (tally.tolist(), tally.dtype) == ([1, 2, 3, 0], torch.int64)
    assert (tally[CounterField.IN_A_ROW], tally[CounterField.APPLIED], tally[CounterField.SKIPPED]) == (1, 2, 3)


def checked(init_scale=65536.0, floor=1.0, ceiling=None, hysteresis=1, interval=9):
    return ScaleLimits.checked(init_scale, floor, ceiling, hysteresis, growth=2.0, backoff=0.5, interval=interval)


def test_limits_that_make_sense_are_kept():
    assert checked() == ScaleLimits(growth=2.0, backoff=0.5, interval=9, floor=1.0, ceiling=LARGEST, hysteresis=1)
    assert checked(ceiling=math.inf) == checked()
    assert checked(4.0, 4.0, 4.0, 7) == replace(checked(), floor=4.0, ceiling=4.0, hysteresis=7)


@for_each("wrong", [0.0, -1.0, math.nan, True, "4"])
@for_each(("argument", "name"), [("init_scale", "init_scale"), ("floor", "min_scale"), ("ceiling", "max_scale")])
def test_limits_are_positive_and_finite(argument, name, wrong):
    with pytest.raises(BadInput) as error:
        checked(**{argument: wrong})
    assert str(error.value) == f"GradScaler({name}={wrong!r}): expected a positive, finite number."


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (0.5, "a scale of 0.5 is below min_scale=1. Set min_scale lower."),
        (16.0, "a scale of 16 is above max_scale=8. Set max_scale higher."),
    ],
)
def test_a_scale_outside_of_the_limits_is_refused(scale, text):
    with pytest.raises(BadInput) as error:
        checked(scale, 1.0, 8.0)
    assert str(error.value) == f"GradScaler(init_scale={scale:g}): {text}"
    with pytest.raises(BadInput) as error:
        checked(4.0, 1.0, 8.0).checked_scale(scale)
    assert str(error.value) == f"update(): {text}"


def test_a_scale_to_be_set_is_a_number_between_the_limits_or_a_tensor_that_nobody_looks_at():
    limits, tensor = checked(4.0, 1.0, 8.0), torch.tensor(99.0)
    assert [limits.checked_scale(scale) for scale in (1, 4.0, 8.0)] == [1.0, 4.0, 8.0]
    assert limits.checked_scale(tensor) is tensor
    for wrong in (0.0, math.nan, math.inf, "4", True, None):
        with pytest.raises(BadInput) as error:
            limits.checked_scale(wrong)
        assert str(error.value) == f"update(): expected a positive, finite scale, got {wrong!r}."


@for_each("wrong", [0, -1, 1.5, True, "2", None])
@for_each("name", ["hysteresis", "growth_interval"])
def test_steps_are_counted_in_whole_numbers(name, wrong):
    with pytest.raises(BadInput) as error:
        checked(**{name.removeprefix("growth_"): wrong})
    assert str(error.value) == f"GradScaler({name}={wrong!r}): expected a whole number of steps, 1 or more."


@pytest.mark.parametrize(("floor", "ceiling"), [(1e-50, None), (1.0, 1e39)])
def test_limits_are_numbers_that_fp32_can_hold(floor, ceiling):
    with pytest.raises(BadInput):
        checked(65536.0, floor, ceiling)
