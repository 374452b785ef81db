"""Bad steps in a row: a scaler's search is ordinary, what no lower scale cures is not."""

import itertools
import math

import pytest

from ampwise.watch.gradient_health import KEPT, KEPT_BAD, BadStep, Streaks


def run(*steps):
    """Steps as (scale, norm): a norm of None is a skipped one."""
    streaks = Streaks()
    for step, (scale, norm) in enumerate(steps, start=1):
        if norm is None:
            streaks.add_bad(step, 1.0, scale)
        else:
            streaks.add_good(step, scale, norm)
    return streaks


@pytest.mark.parametrize("start", [16, 24])
def test_the_search_at_the_start_is_ordinary(start):
    streaks = run(*((2.0**k, None) for k in range(start, 2, -1)), (4.0, 1.0))
    (streak,) = streaks.all
    assert streak.count == start - 2
    assert not streak.is_real("fp16")
    assert streaks.open is None


def test_overflow_of_the_true_gradients_is_real():
    streaks = run(*((2.0**k, None) for k in range(16, -1, -1)), (0.5, 1.0))
    assert streaks.all[0].is_real("fp16")


@pytest.mark.parametrize(("skips", "real"), [(8, False), (9, True)])
def test_many_halvings_below_a_scale_that_worked_are_real(skips, real):
    good = [(2.0**20, 1.0)] * 10
    streaks = run(*good, *((2.0 ** (20 - k), None) for k in range(skips)), (2.0, 1.0))
    assert streaks.all[0].is_real("fp16") is real


def test_without_a_scaler_and_in_bf16_it_is_real():
    assert run((None, 1.0), (None, None)).all[0].is_real("fp16")
    assert run((65536.0, None), (32768.0, 1.0)).all[0].is_real("bf16")


def test_a_jump_of_a_thousand_at_a_scale_that_worked_is_real():
    far = [(1024.0, 0.01)] * 6
    assert run(*far, (1024.0, None), (512.0, 0.01)).all[0].is_real("fp16")
    assert not run(*far, (2048.0, None), (1024.0, 0.01)).all[0].is_real("fp16"), "a growth may find new limits"
    assert not run(*far[:4], (1024.0, None), (512.0, 0.01)).all[0].is_real("fp16"), "too few to know what is usual"
    near = [(1024.0, 10.0)] * 6
    assert not run(*near, (1024.0, None), (512.0, 10.0)).all[0].is_real("fp16")


def test_a_loss_that_is_not_finite_is_real_if_it_came_first():
    streaks = Streaks()
    streaks.add_good(1, 8.0, 1.0)
    streaks.add_bad(2, math.nan, 8.0)
    assert streaks.all[0].bad_loss
    assert streaks.all[0].is_real("fp16")


@pytest.mark.parametrize("details", [None, "after each", "at the end"])
def test_gradients_alone_are_distinguished_from_the_losses_they_spoil(details):
    """Without a scaler: gradients are bad at 2, and the losses from 3 on."""
    streaks = Streaks()
    streaks.add_good(1, None, 1.0)
    losses = {2: 1.0, 3: math.nan, 4: math.nan, 5: math.nan}
    for step, loss in losses.items():
        streaks.add_bad(step, loss, None)
        if details == "after each":
            streaks.add_details(BadStep(step=step, loss=loss, healthy_before=step == 2))
    for step, loss in losses.items() if details == "at the end" else ():
        streaks.add_details(BadStep(step=step, loss=loss, healthy_before=step == 2))
    (streak,) = streaks.all
    assert (streak.count, streak.gradients_alone, streak.bad_losses, streak.corrupted_from) == (4, 1, 3, 3)
    assert not streak.bad_loss


def test_a_loss_that_breaks_after_skipped_steps_begins_a_streak_of_its_own():
    streaks = Streaks()
    for step, (loss, scale) in enumerate([(1.0, 8.0), (1.0, 4.0), (math.nan, 2.0), (1.0, 1.0)], start=1):
        streaks.add_bad(step, loss, scale)
    overflow, broken = streaks.all
    assert (overflow.count, overflow.gradients_alone, overflow.bad_losses) == (2, 2, 0)
    assert (broken.count, broken.gradients_alone, broken.bad_losses) == (2, 0, 1)
    assert streaks.open is broken


CALLS = [("row", 2), ("row", 3), ("bad", 2), ("bad", 3)]
ORDERS = [
    order
    for order in itertools.permutations(CALLS)
    if all(order.index((kind, 2)) < order.index((kind, 3)) for kind in ("row", "bad"))
]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_details_may_come_before_their_row_or_after(order):
    streaks = Streaks()
    streaks.add_good(1, 8.0, 1.0)
    for kind, step in order:
        if kind == "row":
            streaks.add_bad(step, 1.0, 16.0 / step)
        else:
            streaks.add_details(BadStep(step=step, loss=1.0, scale=16.0 / step, parameters=("w",)))
    (streak,) = streaks.all
    assert (streak.first, streak.last, streak.count) == (2, 3, 2)
    assert streaks.details(streak).step == 2


@pytest.mark.parametrize("first", ["row", "bad"])
def test_details_know_more_than_a_row_that_looks_good(first):
    """Without a scaler and a norm, a row cannot tell."""
    streaks = Streaks()
    for step in (1, 2):
        calls = [lambda step=step: streaks.add_good(step, None, None)]
        calls.insert(0 if first == "bad" else 1, lambda step=step: streaks.add_details(BadStep(step=step)))
        for call in calls:
            call()
    (streak,) = streaks.all
    assert streak.count == 2
    assert streaks.open is streak
    assert streaks.good == (0 if first == "bad" else 2)
    streaks.add_good(3, None, None)
    assert streaks.open is None


def test_memory_is_flat_and_what_is_real_is_kept():
    streaks = Streaks()
    for step in range(1, 20_001):
        if step == 777:
            streaks.add_bad(step, math.inf, 64.0)
        elif step % 3 == 0:
            streaks.add_details(BadStep(step=step, scale=64.0))
        else:
            streaks.add_good(step, 64.0, 100.0)
    assert len(streaks.all) == KEPT
    assert len(streaks.bad) == 2 * KEPT_BAD
    assert streaks.total > 6000
    assert any(streak.bad_loss and streak.first == 777 for streak in streaks.all)


def test_a_scale_that_stays_is_no_collapse():
    """The engine keeps the loss scale where the loss itself is bad: twelve bad batches do not lower it."""
    good = [(2.0**15, 1.0)] * 10
    assert run(*good, *[(2.0**15, None)] * 12).collapse() is None
    assert run(*good, *((2.0 ** (15 - k), None) for k in range(12))).collapse().count == 12
