"""News that arrive late, as they do from a GPU: nobody waits for them who need not, and nothing is missed."""

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from ampwise.train.scaler.step_result import StepCounts
from ampwise.train.schedulers import SchedulerSet
from ampwise.train.step import Step, StepHistory


class Late:
    """The outcome of a step that is still on its way, and who has waited for it."""

    norm, scale = 2.0, 8.0

    def __init__(self, skipped=False):
        self._skipped, self.known, self.waits = skipped, False, 0

    @property
    def is_skip_known(self):
        return self.known

    is_read = is_skip_known

    @property
    def skipped(self):
        self.waits += not self.known
        return self._skipped

    def values(self):
        return self.skipped, self.norm, self.scale, 1.0


@pytest.fixture
def moving():
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    schedules = SchedulerSet(ExponentialLR(optimizer, 0.5), [optimizer])
    optimizer.step()  # or a scheduler that moves warns
    return schedules, optimizer


def rate(optimizer):
    return optimizer.param_groups[0]["lr"]


def test_a_scheduler_follows_at_once_what_is_known(moving):
    schedules, optimizer = moving
    outcome = Late()
    outcome.known = True
    schedules.after(outcome, [optimizer])
    assert (rate(optimizer), outcome.waits) == (0.5, 0)


@pytest.mark.parametrize(("skipped", "then"), [(False, 0.5), (True, 1.0)])
@pytest.mark.parametrize("asked", ["settle", "state", "after"])
def test_a_scheduler_follows_late_news_before_the_next_step_and_once(moving, skipped, then, asked):
    schedules, optimizer = moving
    outcome = Late(skipped)
    schedules.after(outcome, [optimizer])
    assert (rate(optimizer), outcome.waits) == (1.0, 0)
    if asked == "state":
        assert schedules.state()[0]["last_epoch"] == 1 - skipped
    elif asked == "settle":
        schedules.settle()
    else:
        schedules.after(Late(), [optimizer])
    assert (rate(optimizer), outcome.waits) == (then, 1)


def test_loading_forgets_news_of_the_run_before(moving):
    schedules, optimizer = moving
    state = schedules.state()
    outcome = Late()
    schedules.after(outcome, [optimizer])
    schedules.load(state)
    schedules.settle()
    assert (rate(optimizer), outcome.waits) == (1.0, 0)


def test_without_a_scheduler_nobody_waits():
    schedules, outcome = SchedulerSet(None, []), Late()
    schedules.after(outcome, [])
    schedules.settle()
    assert (outcome.waits, len(schedules), schedules.state()) == (0, 0, [])


def test_counting_waits_only_when_asked():
    counts, outcomes = StepCounts(5, 1), [Late(), Late(skipped=True), Late()]
    for outcome in outcomes:
        counts.add(outcome)
    assert [outcome.waits for outcome in outcomes] == [0, 0, 0]
    assert (counts.settle().applied, counts.settle().skipped, counts.in_a_row) == (7, 2, 0)


def test_printing_a_step_does_not_wait_and_asking_does():
    outcome = Late()
    step = Step(3, "fp16", torch.tensor(1.5), result=outcome, lrs=[0.1])
    assert repr(step) == "<Step 3, fp16, pending>"
    assert (step.closed, step.number, outcome.waits) == (True, 3, 0)
    assert (step.applied, step.grad_norm, step.scale, outcome.waits) == (True, 2.0, 8.0, 1)
    assert repr(step) == "<Step 3, fp16, loss 1.5, grad_norm 2, scale 8, lr 0.1>"


def test_a_history_settles_what_has_arrived_and_waits_for_nothing():
    history, outcomes = StepHistory(10), [Late() for _ in range(8)]
    for outcome in outcomes:
        history.append(Step(1, "fp16", torch.tensor(1.0), result=outcome))
        outcome.known = outcome is not outcomes[0]
    assert all(outcome.waits == 0 for outcome in outcomes)
    assert [step._result is None for step in history] == [False, True, True, True, False, False, False, False]


def test_a_scheduler_moves_with_its_own_optimizer(moving):
    schedules, optimizer = moving
    outcome = Late()
    outcome.known = True
    schedules.after(outcome, [SGD(nn.Linear(1, 1).parameters(), lr=1.0)])
    assert rate(optimizer) == 1.0


def test_a_scheduler_that_is_moved_by_someone_else_is_reported_of(capsys):
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = ExponentialLR(optimizer, 0.5)
    schedules, outcome = SchedulerSet(scheduler, [optimizer]), Late()
    optimizer.step()
    outcome.known = True
    schedules.after(outcome, [optimizer])
    scheduler.step()
    schedules.after(outcome, [optimizer])
    assert "ampwise: ExponentialLR was stepped outside the engine" in capsys.readouterr().err
