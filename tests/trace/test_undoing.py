"""What a run writes to is put back; what it has made is its own."""

import pytest
import torch
from torch import nn

import ampwise
from ampwise.trace.recorder import UndoMode


@pytest.mark.parametrize("make", [lambda norm, x: norm(x), lambda norm, x: x + 1, lambda norm, x: x.clone()])
def test_what_a_run_has_made_is_left_as_it_is(make):
    norm, x = nn.BatchNorm1d(3), torch.randn(8, 3)
    before = [buffer.clone() for buffer in norm.buffers()]
    with UndoMode() as run:
        made = make(norm, x).relu_()
        kept = made.clone()
    run.put_back()
    assert torch.equal(made, kept)
    assert all(map(torch.equal, norm.buffers(), before))


def test_what_was_there_is_put_back():
    x = torch.randn(8)
    before = x.clone()
    with UndoMode() as run:
        x.mul_(2).relu_()
        torch.add(x, 1, out=x)
    run.put_back()
    assert torch.equal(x, before)


@pytest.mark.parametrize("factor", [1.0, float("inf")])
@pytest.mark.parametrize("had", [False, True])
def test_a_trace_leaves_gradients_as_they_were(had, factor):
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    before = [torch.ones_like(each) if had else None for each in model.parameters()]
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        parameter.grad = gradient
    assert bool(ampwise.trace(lambda x: (model(x) * factor).sum(), x)) == (factor != 1)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert parameter.grad is gradient
        assert gradient is None or torch.equal(gradient, torch.ones_like(parameter))
