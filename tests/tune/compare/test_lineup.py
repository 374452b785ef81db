"""One precision that fails does not take the others with it."""

import gc
import weakref

import pytest
import torch

from ampwise.errors import BadInput
from ampwise.tune.compare.lineup import Lineup
from ampwise.tune.compare.rounds import RoundPlan, run_rounds

from .compare_toys import Clock, fails_in_half, fielded, mlp, runs_out_of_memory

CPU = torch.device("cpu")
CPU_ALLOCATOR = RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: 12")


def nothing(*_):
    pass


def lineup_of(make, *entries):
    _, made = fielded(make, *entries)
    return Lineup(made, CPU)


@pytest.mark.half_by_day
@pytest.mark.parametrize("error", [None, MemoryError(), CPU_ALLOCATOR])
def test_out_of_memory_is_caught_and_the_others_go_on(error):
    lineup = lineup_of(runs_out_of_memory(error=error), "fp32", "bf16", "fp16")
    times = run_rounds(lineup, Clock(), RoundPlan(2, dict.fromkeys(("fp32", "bf16", "fp16"), 1)), nothing, nothing)
    assert lineup.problems == {"bf16": "out of memory"}
    assert set(times) == {"fp32", "fp16"}
    assert [contender.label for contender in lineup] == ["fp32", "fp16"]


def test_what_the_failed_step_held_is_let_go_of():
    lineup = lineup_of(mlp, "fp32", "bf16")
    held = []

    def fails():
        activation = torch.zeros(10)
        held.append(weakref.ref(activation))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    _, failing = lineup
    assert lineup.attempt(failing, fails) is None
    gc.collect()
    assert held[0]() is None


def test_another_failure_is_reported_with_its_line():
    lineup = lineup_of(fails_in_half, "fp32", "bf16")
    fp32, bf16 = lineup
    assert lineup.attempt(fp32, fp32) is not None
    assert lineup.attempt(bf16, bf16) is None
    assert lineup.problems["bf16"].startswith("failed: RuntimeError: mat1 and mat2 must have the same dtype")
    assert "compare_toys.py:" in lineup.problems["bf16"]


def test_fp32_has_to_run():
    lineup = lineup_of(mlp, "fp32")
    (fp32,) = lineup
    with pytest.raises(BadInput, match=r"mlp: a step in FP32 fails: ZeroDivisionError: division by zero"):
        lineup.attempt(fp32, lambda: 1 / 0)


def test_fp32_may_run_out_of_memory():
    lineup = lineup_of(mlp, "fp32", "bf16")
    fp32, _ = lineup

    def no_room():
        raise torch.OutOfMemoryError

    assert lineup.attempt(fp32, no_room) is None
    assert [contender.label for contender in lineup] == ["bf16"]


def test_our_own_errors_are_not_a_precisions_fault():
    lineup = lineup_of(mlp, "fp32", "bf16")
    _, bf16 = lineup

    def refuses():
        raise BadInput("the loss is a tensor of shape (8,), not one number")

    with pytest.raises(BadInput, match="not one number"):
        lineup.attempt(bf16, refuses)


def test_gradients_of_a_failed_step_do_not_reach_the_next():
    lineup = lineup_of(mlp, "fp32", "bf16")
    _, bf16 = lineup

    def half_a_step():
        bf16.step.forward_and_backward()
        raise torch.OutOfMemoryError

    lineup.attempt(bf16, half_a_step)
    assert all(parameter.grad is None for parameter in bf16.step.case.parameters)
