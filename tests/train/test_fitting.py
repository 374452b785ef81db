"""What a precision has besides autocast, and the engine around it."""

from types import SimpleNamespace

import pytest
import torch

from ampwise.train.precision_plugin import PrecisionPlugin

from .engine_toys import train, training

pytestmark = pytest.mark.usefixtures("small_operations_are_cheap")


class Broken(PrecisionPlugin):
    """Fails at the end of its first step."""

    ended = 0

    def step_ended(self):
        self.ended += 1
        if self.ended == 1:
            raise RuntimeError("no room to measure in")


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_is_over_though_what_comes_after_it_fails(accumulate):
    run, twin = (training("bf16", schedule=halving, accumulate=accumulate) for _ in range(2))
    numbers = list(range(2 * accumulate))
    run.engine._plugin = Broken()
    train(run, *numbers[: accumulate - 1])
    with pytest.raises(RuntimeError, match="no room to measure in"):
        train(run, numbers[accumulate - 1])
    assert not run.engine.accumulating
    assert run.engine.applied_steps == len(run.engine.history) == 1
    train(run, *numbers[accumulate:])
    train(twin, *numbers)
    assert run.engine.lr == twin.engine.lr
    assert run.engine.history["loss"] == twin.engine.history["loss"]
    for ours, theirs in zip(run.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_pass_that_is_to_run_as_it_is_written_is_in_no_graph():
    run, replayed = training("bf16"), []

    def replay(one_pass, *_, args, **__):
        replayed.append(run.engine._closed_steps)
        return one_pass(args)

    run.engine._graphs = SimpleNamespace(
        run=replay, clear_gradients=lambda parameters: run.optimizer.zero_grad(set_to_none=True)
    )
    for plain in (False, True, False):
        run.engine._plugin.bypass_graphs = plain
        train(run, 1)
    assert replayed == [0, 2]
