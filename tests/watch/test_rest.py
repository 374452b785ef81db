"""Skipped steps: the cost of following is measured, and what goes wrong in skipped steps is found."""

import itertools
import math
import sys

import pytest
import torch
from torch import nn

from ampwise.watch import overhead as rest
from ampwise.watch.overhead import StepSkipper
from ampwise.watch.watch import Watch

X = torch.ones(2, 4)


class Clock:
    """Clock that is set by the test."""

    now = 0.0

    def __call__(self):
        return self.now


def steps_of(cost, plain, count):
    """Return how many steps to skip after each of ``count`` steps. cost: of following; plain: of the step itself."""
    clock = Clock()
    one = StepSkipper(clock=clock)
    to_skip = []
    for _ in range(count):
        one.spent += cost
        clock.now += cost + plain
        to_skip.append(one.step_followed())
    return to_skip


def test_more_steps_are_skipped_the_more_following_costs():
    assert steps_of(cost=0.001, plain=0.03, count=500) == [0] * 500  # an ordinary model
    to_skip = steps_of(cost=0.001, plain=0.001, count=200)
    assert not any(to_skip[: rest.IN_FULL - 1])
    assert all(100 <= each <= 103 for each in to_skip[rest.IN_FULL :])  # a hundredth of the time
    assert max(steps_of(cost=1.0, plain=0.0001, count=200)) <= rest.LONGEST + 2


def test_no_step_is_skipped_if_that_is_not_allowed():
    clock = Clock()
    one = StepSkipper(allowed=False, clock=clock)
    for _ in range(300):
        one.spent += 1.0
        clock.now += 1.5
        assert one.step_followed() == 0


@pytest.fixture
def expensive(monkeypatch):
    """Make following seem so expensive that nearly all steps are skipped, after the first few."""
    monkeypatch.setattr(rest, "IN_FULL", 8)
    monkeypatch.setattr(rest, "SHARE", 1e-9)
    monkeypatch.setattr(rest, "TOO_EXPENSIVE", 0.0)


class Training:
    def __init__(self, model=None, kind=torch.optim.SGD):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1) if model is None else model
        self.optimizer = kind(self.model.parameters(), lr=0.01)

    def step(self, x=X):
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()

    def run(self, steps):
        for _ in range(steps):
            self.step()
        return self


def rules_of(watch):
    return {seen.finding.rule.code: seen for seen in watch.findings}


def test_skipped_steps_are_counted(expensive):
    plain = Training().run(1300)
    with Watch(timing=False) as watch:
        watched = Training().run(1300)
    assert torch.equal(plain.model.weight, watched.model.weight)
    assert watch.failures == []
    assert watch.facts()["steps"] == 1300
    assert list(watch.findings) == []


def calls_of(training):
    """Return the number of calls of Python and C functions in the cheapest of some steps."""
    counts = []
    for _ in range(5):
        count = itertools.count()
        sys.setprofile(lambda frame, event, arg, count=count: event.endswith("call") and next(count))
        training.step()
        sys.setprofile(None)
        counts.append(next(count))
    return min(counts)


def test_a_skipped_step_costs_a_few_calls(expensive):
    plain = calls_of(Training().run(20))
    with Watch(timing=False):
        watched = calls_of(Training().run(20))
    assert watched - plain <= 33


def test_a_loss_that_is_not_finite_is_found_at_its_step_and_replayed(expensive):
    with Watch(timing=False) as watch:
        training = Training(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)))
        training.run(200)
        training.step(torch.full((2, 4), math.inf))
        training.run(3)
    assert watch.failures == []
    assert {code: seen.first_step for code, seen in rules_of(watch).items()} == {"AMP612": 201, "AMP901": 201}


def test_an_evaluation_in_another_precision_is_found(expensive):
    with Watch(timing=False) as watch:
        training = Training()
        for _ in range(4):
            for _ in range(30):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = training.model(X).float().square().mean()
                training.optimizer.zero_grad()
                loss.backward()
                training.optimizer.step()
            training.model.eval()
            with torch.no_grad():
                training.model(X)
            training.model.train()
    assert watch.failures == []
    assert "AMP501" in rules_of(watch)


def test_no_step_is_skipped_after_a_scaler_was_used(expensive):
    with Watch(timing=False) as watch:
        training = Training().run(50)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for _ in range(20):
            training.optimizer.zero_grad()
            scaler.scale(training.model(X).square().mean()).backward()
            scaler.step(training.optimizer)
            scaler.update()
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    assert watch.failures == []
    assert watch.facts()["steps"] == 70
    assert list(watch.findings) == []


def test_optimizers_that_share_a_backward_pass_are_skipped_together(expensive):
    def train():
        torch.manual_seed(0)
        models = [nn.Linear(4, 1) for _ in range(3)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for _ in range(400):
            sum(model(X).mean() for model in models).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [model.weight.sum().item() for model in models]

    plain = train()
    with Watch(timing=False) as watch:
        assert train() == plain
    assert watch.failures == []
    assert list(watch.findings) == []
    assert watch.facts()["steps"] == 400


def test_optimizers_that_come_and_go(expensive):
    with Watch(timing=False) as watch:
        for _ in range(30):
            Training().run(20)
    assert watch.failures == []
    assert list(watch.findings) == []


@pytest.mark.parametrize("many", [3, 12])
def test_of_many_optimizers_those_that_a_backward_pass_reaches_are_known(many):
    """Two of them share a pass, the others have gradients of their own; one pass goes through a function of Python."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    with Watch(every=1, timing=False) as watch:
        models = [nn.Linear(4, 1) for _ in range(many)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        pending = lambda: [len(watch._tracker.state_of(each).pending) for each in optimizers]  # noqa: E731
        (models[0](X) + models[1](X)).mean().backward()
        assert pending() == [1, 1] + [0] * (many - 2)
        for model in models[2:]:
            model(X).mean().backward()
        Twice.apply(models[0](X)).mean().backward()
        torch.autograd.backward([models[1](X).mean(), models[1].weight.sum() * 0 + models[2](X).mean()])
        assert pending() == [2, 2, 2] + [1] * (many - 3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert pending() == [0] * many
    assert watch.failures == []
