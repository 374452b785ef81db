"""Steps as a notebook shows them, which must not wait for the device."""

import pytest
import torch
from torch import nn

from ampwise import Engine
from ampwise.train.scaler.step_result import StepResult
from ampwise.train.step import Step, StepHistory


class Pending:
    """Numbers that are on their way, and that nobody may ask for."""

    numbers = None
    arrived = captured = False

    def read(self):
        raise AssertionError("waited for the device")


def pending(number):
    return Step(number, "fp16", result=StepResult(numbers=None, posted=Pending(), scaled=True), lrs=[0.1])


def one_step(value=1.0, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.25), precision="bf16", **options)
    return engine.step(lambda x: model(x).float().square().mean(), torch.full((3, 4), value))


def test_a_step_that_is_known():
    step = one_step()
    markup = step._repr_html_()
    for told in ("Step 1", "applied", "bf16", f"{step.loss:.4g}", f"{step.grad_norm:.4g}", "0.25"):
        assert told in markup


def test_a_step_that_was_skipped():
    markup = one_step(float("nan"))._repr_html_()
    assert "skipped" in markup
    assert ">nan<" in markup


def test_what_is_on_its_way_is_not_waited_for():
    markup = pending(7)._repr_html_()
    assert "Step 7" in markup
    assert "pending" in markup
    with pytest.raises(AssertionError, match="waited"):
        _ = pending(7).loss


def test_a_window_that_is_open():
    assert "accumulating" in one_step(accumulate=2)._repr_html_()


def test_a_history_is_a_table_of_its_last_steps():
    history = StepHistory(100)
    for number in range(1, 31):
        history.append(pending(number))
    markup = history._repr_html_()
    assert "30 steps, the last 20" in markup
    assert markup.count("<tr>") == 21
    assert markup.count("pending") == 20 * 5
    assert ">11<" in markup
    assert ">10<" not in markup
    assert "0 steps" in StepHistory(3)._repr_html_()
