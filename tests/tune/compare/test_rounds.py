"""Turns, medians and noise, by a clock that says what it is told."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampwise.tune.compare.lineup import Lineup
from ampwise.tune.compare.rounds import RoundPlan, noise_between, plan_rounds, ratios, run_rounds, warm_up

from .compare_toys import Clock, fielded, mlp

CPU = torch.device("cpu")
TIMES = st.lists(st.floats(1e-3, 10), min_size=1, max_size=12)


def nothing(*_):
    pass


def lineup_of(*entries, make=mlp):
    _, made = fielded(make, *entries)
    return Lineup(made, CPU)


def test_turns_alternate_and_begin_with_a_step_that_is_not_timed():
    lineup, clock, steps = lineup_of("fp32", "bf16"), Clock(), []
    for contender in lineup:
        plain = contender.step
        contender.step = Counted(plain, steps, contender.label)
    times = run_rounds(lineup, clock, RoundPlan(3, {"fp32": 2, "bf16": 1}), nothing, nothing)
    assert [label for label, _ in clock.turns] == ["fp32", "bf16", "bf16", "fp32", "fp32", "bf16"]
    assert steps.count("fp32") == 3 * (2 + 1)
    assert steps.count("bf16") == 3 * (1 + 1)
    assert {label: len(taken) for label, taken in times.items()} == {"fp32": 3, "bf16": 3}


class Counted:
    def __init__(self, step, log, label):
        self.step, self.log, self.label = step, log, label

    def __getattr__(self, name):
        return getattr(self.step, name)

    def __call__(self):
        self.log.append(self.label)
        return self.step()


def test_ratios_are_paired_by_rounds():
    # The machine gets three times slower in the second half: a ratio of medians would be off, the pairs are not.
    times = {"fp32": [1.0, 1.0, 3.0, 3.0], "bf16": [0.5, 0.5, 1.5, 1.5]}
    found = ratios(times, "bf16", "fp32")
    assert (found.median, found.low, found.high) == (2.0, 2.0, 2.0)
    assert ratios(times, "bf16", "tf32") is None
    assert ratios(times, "fp16", "fp32") is None


@given(TIMES, st.floats(0.1, 10))
def test_a_machine_that_is_slower_as_a_whole_changes_nothing(times, factor):
    slower = [factor * each for each in times]
    plain = ratios({"fp32": times, "bf16": [each / 2 for each in times]}, "bf16", "fp32")
    again = ratios({"fp32": slower, "bf16": [each / 2 for each in slower]}, "bf16", "fp32")
    assert plain.median == pytest.approx(again.median)
    assert plain.median == pytest.approx(2.0)


@given(TIMES)
def test_two_equal_runs_have_no_noise(times):
    assert noise_between({"a": times, "b": times}, "a", "b") == pytest.approx(0.0, abs=1e-12)


@given(st.lists(st.tuples(st.floats(0.5, 2), st.floats(0.5, 2)), min_size=1, max_size=12))
def test_noise_does_not_mind_which_of_the_two_came_first(pairs):
    one, other = zip(*pairs, strict=True)
    noise = noise_between({"a": list(one), "b": list(other)}, "a", "b")
    assert noise == pytest.approx(noise_between({"a": list(other), "b": list(one)}, "a", "b"), rel=1e-9)
    assert noise >= abs(math.exp(abs(_median([math.log(b / a) for a, b in pairs]))) - 1) - 1e-12


def _median(values):
    import statistics

    return statistics.median(values)


def test_one_held_up_round_is_not_noise():
    steady = [1.0, 1.01, 0.99, 1.0, 1.0]
    assert noise_between({"a": [1.0] * 5, "b": [*steady[:4], 9.0]}, "a", "b") < 0.05
    assert noise_between({"a": [1.0] * 5, "b": [1.0, 1.5, 0.7, 1.4, 0.8]}, "a", "b") > 0.3
    assert noise_between({"a": [1.0]}, "a", "b") is None


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"a": 1e-5}, RoundPlan(15, {"a": 50})),  # no more than so many
        ({"a": 0.05, "b": 0.01}, RoundPlan(15, {"a": 2, "b": 10})),
        ({"a": 1.6, "b": 0.4}, RoundPlan(7, {"a": 1, "b": 1})),  # of 4 s each
        ({"a": 30.0}, RoundPlan(5, {"a": 1})),  # no fewer than so many
        ({"a": 0.0}, RoundPlan(15, {"a": 50})),
    ],
)
def test_the_pace_follows_the_time_of_a_step(seconds, expected):
    assert plan_rounds(seconds) == expected


def test_what_is_asked_for_is_done():
    assert plan_rounds({"a": 30.0}, rounds=40, steps=7) == RoundPlan(40, {"a": 7})


def test_warming_up_says_how_long_a_step_takes():
    told = []
    seconds = warm_up(lineup_of("fp32", "bf16"), Clock({"fp32": 0.5, "bf16": 0.25}), told.append, nothing)
    assert seconds == {"fp32": 0.5, "bf16": 0.25}
    assert told == ["fp32", "bf16"]
