"""One precision that fails does not stop the others; turns and noise, by a clock that says what it is told."""

import gc
import math
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampwise.errors import BadInput
from ampwise.tune.bench.lineup import taking_part
from ampwise.tune.bench.measurement import RoundPlan, noise_between, plan_rounds, ratios, run_rounds, warm_up

from ...for_each import for_each
from .bench_toys import Clock, fails_in_half, fielded, mlp, runs_out_of_memory

CPU = torch.device("cpu")
CPU_ALLOCATOR = RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: 12")


def nothing(*_):
    pass


def lineup_of(make, *entries):
    return fielded(make, *entries)[1]


@pytest.mark.half_by_day
@pytest.mark.parametrize("error", [None, MemoryError(), CPU_ALLOCATOR])
def test_out_of_memory_is_caught_and_the_others_go_on(error):
    lineup = lineup_of(runs_out_of_memory(error=error), "fp32", "bf16", "fp16")
    times = run_rounds(lineup, Clock(), RoundPlan(2, dict.fromkeys(("fp32", "bf16", "fp16"), 1)), nothing, nothing)
    assert [contender.problem for contender in lineup] == [None, "out of memory", None]
    assert set(times) == {"fp32", "fp16"}
    assert [contender.label for contender in taking_part(lineup)] == ["fp32", "fp16"]


def test_what_the_failed_step_held_is_let_go_of():
    lineup = lineup_of(mlp, "fp32", "bf16")
    held = []

    def fails():
        activation = torch.zeros(10)
        held.append(weakref.ref(activation))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    _, failing = lineup
    assert failing.attempt(fails) is None
    gc.collect()
    assert held[0]() is None


def test_another_failure_is_reported_with_its_line():
    lineup = lineup_of(fails_in_half, "fp32", "bf16")
    fp32, bf16 = lineup
    assert fp32.attempt(fp32) is not None
    assert bf16.attempt(bf16) is None
    assert bf16.problem.startswith("failed: RuntimeError: mat1 and mat2 must have the same dtype")
    assert "bench_toys.py:" in bf16.problem


def test_fp32_has_to_run():
    lineup = lineup_of(mlp, "fp32")
    (fp32,) = lineup
    with pytest.raises(BadInput, match=r"mlp: a step in FP32 fails: ZeroDivisionError: division by zero"):
        fp32.attempt(lambda: 1 / 0)


def test_fp32_may_run_out_of_memory():
    lineup = lineup_of(mlp, "fp32", "bf16")
    fp32, _ = lineup

    def no_room():
        raise torch.OutOfMemoryError

    assert fp32.attempt(no_room) is None
    assert [contender.label for contender in taking_part(lineup)] == ["bf16"]


def test_our_own_errors_are_not_a_precisions_fault():
    lineup = lineup_of(mlp, "fp32", "bf16")
    _, bf16 = lineup

    def refuses():
        raise BadInput("the loss is a tensor of shape (8,), not one number")

    with pytest.raises(BadInput, match="not one number"):
        bf16.attempt(refuses)


def test_gradients_of_a_failed_step_do_not_reach_the_next():
    lineup = lineup_of(mlp, "fp32", "bf16")
    _, bf16 = lineup

    def half_a_step():
        bf16.step.forward_and_backward()
        raise torch.OutOfMemoryError

    bf16.attempt(half_a_step)
    assert all(parameter.grad is None for parameter in bf16.step.case.parameters)


TIMES = st.lists(st.floats(1e-3, 10), min_size=1, max_size=12)


def test_turns_alternate_and_begin_with_a_step_that_is_not_timed():
    lineup, clock, steps = lineup_of(mlp, "fp32", "bf16"), Clock(), []
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


@for_each(
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
    seconds = warm_up(lineup_of(mlp, "fp32", "bf16"), Clock({"fp32": 0.5, "bf16": 0.25}), told.append, nothing)
    assert seconds == {"fp32": 0.5, "bf16": 0.25}
    assert told == ["fp32", "bf16"]
