"""Nothing stays changed: weights, buffers, gradients, arguments, random numbers, Python's variables, switches."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import ampwise
from ampwise.errors import BadInput
from ampwise.tune.diff.diff import diff

from ...for_each import for_each

SIDES = ["bf16", "fp16", "fp64", "mxfp8", ampwise.Policy("bf16").keep("fp32", "norm")]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop, self.head = (
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.5),
            nn.Linear(8, 1),
        )
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        return self.head(self.drop(self.norm(self.layer(x))))


@for_each("b", SIDES)
def test_all_is_as_it_was(b):
    torch.manual_seed(0)
    model, batch = Net(), torch.randn(16, 4)
    model.head.weight.grad = torch.full_like(model.head.weight, 7.0)
    before = copy.deepcopy(model.state_dict())
    memory = [parameter.data_ptr() for parameter in model.parameters()]
    counter = [0]

    def loss_fn(x):
        counter[0] += 1
        x.mul_(2)
        random.random()
        np.random.rand()
        return model(x).square().mean()

    kept, states = batch.clone(), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    diff(loss_fn, batch, b=b)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [parameter.data_ptr() for parameter in model.parameters()] == memory
    assert [parameter.dtype for parameter in model.parameters()] == [torch.float32] * 6
    assert model.head.weight.grad.tolist() == [[7.0] * 8]
    assert model.layer.weight.grad is None
    assert torch.equal(batch, kept)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (states[1], states[2].tolist())
    assert (model.calls, counter) == (0, [0])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.get_default_dtype() == torch.float32
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.half_by_day
@pytest.mark.parametrize("sides", [("fp32", "fp32,compiled=eager"), ("fp32,compiled=eager", "fp32")])
def test_all_is_as_it_was_around_compiled_code(sides):
    model, batch = Net(), torch.randn(16, 4)
    model.head.weight.grad = torch.full_like(model.head.weight, 1e6)
    before, kept, random_numbers = copy.deepcopy(model.state_dict()), batch.clone(), torch.get_rng_state()
    result = diff(lambda x: model(x.mul_(2)).square().mean(), batch, a=sides[0], b=sides[1])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(batch, kept)
    assert torch.equal(torch.get_rng_state(), random_numbers)
    assert model.head.weight.grad.tolist() == [[1e6] * 8]
    assert model.layer.weight.grad is None
    assert [row.compared.error for row in result.parameters] == [0.0] * 6
    assert result.rows == ()
    compiled = "a" if "compiled" in sides[0] else "b"
    assert result.evidence.notes == (
        f"{compiled} is compiled, so modules are not compared: only the function's results and the gradients of "
        "parameters.",
        "Compiled code may draw different random numbers: set dropout to 0 for this comparison.",
    )
    assert result.verdict == f"{sides[1]} against {sides[0]}: what the function returns is the same"


def test_also_when_it_fails():
    model, batch = Net(), torch.randn(16, 4)
    before = copy.deepcopy(model.state_dict())

    def loss_fn(x):
        loss = model(x).square().mean()
        return loss @ loss if torch.is_autocast_enabled("cpu") else loss

    with pytest.raises(BadInput, match=r"diff: bf16: the step failed: RuntimeError: .*\(test_left_as_it_was.py:\d+\)"):
        diff(loss_fn, batch)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_the_gradients_are_those_of_this_step_alone():
    model, batch = nn.Linear(4, 1), torch.randn(8, 4)
    clean = diff(lambda x: model(x).square().mean(), batch)
    model.weight.grad = torch.full_like(model.weight, 1e6)
    again = diff(lambda x: model(x).square().mean(), batch)
    assert [row.compared for row in clean.parameters] == [row.compared for row in again.parameters]


def test_a_dropout_drops_the_same_on_both_sides():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    for b in ("bf16", "fp64", "e4m3"):
        row = diff(lambda x: model(x).square().mean(), torch.randn(64, 4), b=b).rows[2]
        measured = row.outputs[0].measured
        assert 180 < measured.zeros_a < 330
        assert measured.zeros_a == measured.zeros_b


def test_what_the_function_prints_is_printed_once(capsys):
    model = nn.Linear(2, 1)

    def loss_fn(x):
        print("hello")
        return model(x).sum()

    diff(loss_fn, torch.ones(1, 2))
    assert capsys.readouterr().out == "hello\n"


def test_autocast_of_the_functions_own_is_the_sides():
    model = nn.Linear(4, 1)

    def loss_fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).square().mean()

    result = diff(loss_fn, torch.randn(8, 4), a="fp32", b="fp64")
    assert result.rows[0].error < 1e-6
    assert diff(loss_fn, torch.randn(8, 4), a="fp32", b="bf16").rows[0].error > 1e-4
