"""Whether it is the same computation: held to float64, and to planted faults."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.tune.bench.loss_check import LossChecker, tolerance

from ...for_each import for_each
from .bench_toys import Clock, fielded, mlp, other_under_autocast, overflows_in_half

PRECISIONS = ("fp32", "fp16", "bf16")


def checked(make, *entries):
    subject, made = fielded(make, *(entries or PRECISIONS))
    checkup, found = LossChecker(subject, Clock()), {}
    for contender in made:
        with contender.turn():
            found[contender.label] = checkup.check(contender)[0]
    return subject, found


def deep():
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(24, 24), nn.LayerNorm(24), nn.GELU())])
    x, y = torch.randn(12, 24), torch.randn(12, 24)
    return model, (x, y), lambda x, y: F.mse_loss(model(x).float(), y)


def convolutional():
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 5))
    model = nn.Sequential(*layers)
    x, y = torch.randn(6, 3, 8, 8), torch.randint(5, (6,))
    return model, (x, y), lambda x, y: F.cross_entropy(model(x).float(), y)


def nearly_solved():
    """A regression whose loss is next to nothing: relative to the loss, rounding is large."""
    model = nn.Linear(16, 1)
    x = torch.randn(64, 16)
    y = (model(x) + 1e-3 * torch.randn(64, 1)).detach()
    return model, (x, y), lambda x, y: F.mse_loss(model(x).float(), y)


@for_each("make", [mlp, deep, convolutional, nearly_solved])
@for_each("seed", [0, 1, 2])
def test_rounding_alone_is_within_the_tolerance_of_float64(make, seed):
    torch.manual_seed(seed)
    subject, found = checked(make)
    model = copy.deepcopy(subject.model).double()
    x, y = (each.double() if each.is_floating_point() else each for each in subject.args)
    criterion = F.mse_loss if make in (deep, nearly_solved) else F.cross_entropy
    exact = criterion(model(x), y).item()
    for label, check in found.items():
        assert check.same is True, label
        assert abs(check.loss - exact) <= check.tolerance, label
        assert check.reference == found["fp32"].loss


def test_a_model_that_does_something_else_under_autocast_is_found_out():
    _, found = checked(other_under_autocast)
    assert [check.same for check in found.values()] == [True, False, False]


def test_an_overflow_is_found_out():
    _, found = checked(overflows_in_half)
    assert found["fp16"].same is False
    assert not math.isfinite(found["fp16"].loss)


@pytest.mark.parametrize("off", [1.02, 0.98])
def test_fp16_is_held_to_less_than_bf16_is(off):
    def make():
        model, batch, loss_fn = mlp()
        return model, batch, lambda x, y: loss_fn(x, y) * (off if torch.is_autocast_enabled("cpu") else 1)

    _, found = checked(make)
    assert found["fp16"].same is False
    assert found["bf16"].same is True, "2% is within what 8 bits of mantissa explain"


def test_each_begins_with_the_same_random_numbers_and_buffers():
    seen = []

    def make():
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        x = torch.randn(16, 8)

        def loss(x):
            seen.append((torch.rand(1).item(), model[1].running_mean.clone(), int(model[1].num_batches_tracked)))
            return model(x).float().square().mean() + model[1].running_mean.sum()

        return model, (x,), loss

    subject, _ = checked(make)
    first, *others = [each for each in seen if each[0] == seen[0][0]]
    assert len(others) == 2, "fp16 and bf16; a second pass of fp32 had other numbers, on purpose"
    for draw, mean, batches in others:
        assert draw == first[0]
        assert torch.equal(mean, first[1])
        assert batches == first[2] == 0
    assert int(subject.model[1].num_batches_tracked) == 0, "and they are left as they were"


def test_random_numbers_of_the_model_widen_the_tolerance():
    def make(dropout=0.5):
        model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(dropout), nn.Linear(64, 4))
        x, y = torch.randn(8, 16), torch.randint(4, (8,))
        return model, (x, y), lambda x, y: F.cross_entropy(model(x).float(), y)

    torch.manual_seed(0)
    _, random = checked(make)
    torch.manual_seed(0)
    _, plain = checked(lambda: make(0.0))
    assert random["fp16"].tolerance > 3 * plain["fp16"].tolerance
    assert all(check.same for check in random.values())


class Growing(nn.Module):
    """With a buffer that is one element seen many times, one that comes with the first pass, and one that grows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(1, 8).expand(4, 8))
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(8))
        self.seen = torch.cat([self.seen, self.seen.new_ones(1)])
        self.calls += 1
        return (self.layer(x) * self.mask * self.late).float().square().mean() + self.calls


def test_buffers_may_come_and_grow():
    subject, found = checked(lambda: (Growing(), torch.randn(4, 8)))
    assert all(check.same for check in found.values())
    assert int(subject.model.calls) == 0


def test_nothing_is_left_behind():
    subject, _ = checked(mlp)
    assert all(parameter.grad is None for parameter in subject.parameters)


def test_tolerance_follows_the_format():
    assert tolerance("bf16", 1.0, 0.0) == 8 * tolerance("fp16", 1.0, 0.0) == 8 * tolerance("tf32", 1.0, 0.0)
    assert tolerance("fp32", 1.0, 0.0) < tolerance("fp16", 1.0, 0.0) / 10
    assert tolerance("fp8", 1.0, 0.0) == 16 * tolerance("bf16", 1.0, 0.0)
    assert tolerance("bf16", 0.0, 1.0) == tolerance("bf16", 1.0, 0.0) == tolerance("bf16", -1.0, 0.0)


def test_one_that_fails_in_the_middle_does_not_move_the_next():
    draws = []

    def make():
        model, batch, loss_fn = mlp()

        def loss(x, y):
            draws.append(torch.rand(1).item())
            if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16:
                raise torch.OutOfMemoryError
            return loss_fn(x, y)

        return model, batch, loss

    subject, made = fielded(make, *PRECISIONS)
    checkup = LossChecker(subject, Clock())
    for contender in made:
        contender.attempt(partial(checkup.check, contender))
    assert [contender.problem for contender in made] == [None, "out of memory", None]
    assert draws[0] == draws[-2] == draws[-1]
