"""Steps that are passed over: what following them would cost is measured, and what goes wrong in them is found."""

import itertools
import math
import sys

import pytest
import torch
from torch import nn

from ampwise.watch import rest
from ampwise.watch.rest import Rest
from ampwise.watch.watch import Watch

X = torch.ones(2, 4)


class Clock:
    """Time that passes as it is told to."""

    now = 0.0

    def __call__(self):
        return self.now


def steps_of(cost, plain, count):
    """What is asked for after each of ``count`` steps that take so long, and cost so much more to follow."""
    clock = Clock()
    one = Rest(clock=clock)
    asked = []
    for _ in range(count):
        one.spent += cost
        clock.now += cost + plain
        asked.append(one.step_followed())
    return asked


def test_steps_are_passed_over_as_often_as_following_them_is_dear():
    assert steps_of(cost=0.001, plain=0.03, count=500) == [0] * 500  # of any ordinary model
    asked = steps_of(cost=0.001, plain=0.001, count=200)
    assert not any(asked[: rest.IN_FULL - 1])
    assert all(100 <= each <= 103 for each in asked[rest.IN_FULL :])  # a hundredth of the time
    assert max(steps_of(cost=1.0, plain=0.0001, count=200)) <= rest.LONGEST + 2


def test_who_wants_every_step_gets_it():
    clock = Clock()
    one = Rest(allowed=False, clock=clock)
    for _ in range(300):
        one.spent += 1.0
        clock.now += 1.5
        assert one.step_followed() == 0


@pytest.fixture
def dear(monkeypatch):
    """Following seems to cost so much that nearly all steps are passed over, after the first few."""
    monkeypatch.setattr(rest, "IN_FULL", 8)
    monkeypatch.setattr(rest, "SHARE", 1e-9)
    monkeypatch.setattr(rest, "TOO_DEAR", 0.0)


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


def test_steps_that_are_passed_over_count(dear):
    plain = Training().run(1300)
    with Watch(timing=False) as watch:
        watched = Training().run(1300)
    assert torch.equal(plain.model.weight, watched.model.weight)
    assert watch.failures == []
    assert watch.facts()["steps"] == 1300
    assert list(watch.findings) == []


def calls_of(training):
    """Functions called in the cheapest of some steps, of Python and of C."""
    counts = []
    for _ in range(5):
        count = itertools.count()
        sys.setprofile(lambda frame, event, arg, count=count: event.endswith("call") and next(count))
        training.step()
        sys.setprofile(None)
        counts.append(next(count))
    return min(counts)


def test_a_step_that_is_passed_over_costs_a_few_calls(dear):
    plain = calls_of(Training().run(20))
    with Watch(timing=False):
        watched = calls_of(Training().run(20))
    assert watched - plain <= 35


def test_a_loss_that_is_not_finite_is_found_at_its_step_and_replayed(dear):
    with Watch(timing=False) as watch:
        training = Training(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)))
        training.run(200)
        training.step(torch.full((2, 4), math.inf))
        training.run(3)
    assert watch.failures == []
    assert {code: seen.first_step for code, seen in rules_of(watch).items()} == {"AMP612": 201, "AMP901": 201}


def test_an_evaluation_in_another_precision_is_found(dear):
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


def test_a_scaler_ends_it_for_good(dear):
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


def test_optimizers_that_share_a_backward_pass_wait_for_each_other(dear):
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


def test_optimizers_that_come_and_go(dear):
    with Watch(timing=False) as watch:
        for _ in range(30):
            Training().run(20)
    assert watch.failures == []
    assert list(watch.findings) == []
