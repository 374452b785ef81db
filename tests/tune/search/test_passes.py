"""Passes give loss and gradients, and leave everything as it was."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampwise.errors import BadInput
from ampwise.tune.search.arrangement import FormatArrangement, arrange_formats, parse_formats
from ampwise.tune.search.passes import PassRunner, SearchBatch
from ampwise.tune.search.units import find_units

from ...for_each import for_each

CPU = torch.device("cpu")
IN_FP16 = FormatArrangement(base="fp16", regions={}, recipes={}, widened=())


def of(function, model, *tensors):
    return PassRunner(function, model, CPU), SearchBatch(tensors, {})


def test_they_are_those_of_torch():
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    passes, batch = of(lambda x: model(x).square().mean(), model, x)
    found = passes.outcome(batch)
    loss = model(x).square().mean()
    loss.backward()
    assert found.loss == loss.item()
    for own, parameter in zip(found.gradients, model.parameters(), strict=True):
        assert torch.equal(own, parameter.grad)
    assert passes.count == 1


def test_weights_buffers_gradients_and_random_numbers_stay():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    x = torch.randn(8, 4)
    model(x).sum().backward()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    numbers, drawn = torch.get_rng_state(), random.getstate()
    passes, batch = of(lambda x: model(x).mean() + 0 * random.random(), model, x)
    units = find_units(model, lambda: passes.forward(batch))
    narrow = arrange_formats(units, [parse_formats(("e4m3", "fp32"))[0]] * 2, CPU)
    first, second = passes.outcome(batch), passes.outcome(batch)
    passes.outcome(batch, narrow)
    passes.kept_bytes(batch, narrow)
    assert first.loss == second.loss  # the same dropout
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), numbers)
    assert random.getstate() == drawn


def test_they_stay_also_where_the_function_fails():
    model, x = nn.Sequential(nn.BatchNorm1d(4)), torch.randn(8, 4)
    before = model[0].running_mean.clone()

    def fails(x):
        model(x)
        raise RuntimeError("on purpose")

    passes, batch = of(fails, model, x)
    with pytest.raises(RuntimeError, match="on purpose"):
        passes.outcome(batch)
    assert torch.equal(model[0].running_mean, before)


def test_a_buffer_that_is_replaced_comes_back():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen = self.seen + 1
            return (self.weight * x).sum() * self.seen

    model = Counter()
    passes, batch = of(model, model, torch.ones(2))
    assert passes.outcome(batch).loss == passes.outcome(batch).loss == 2.0
    assert model.seen == 0


def test_in_fp16_the_loss_is_scaled_by_less_where_gradients_overflow():
    """At a scale of 65536 a gradient of 8 is beyond FP16; at 4096 it is not."""
    model = nn.Linear(1, 1, bias=False)
    passes, batch = of(lambda x: 8.0 * model(x).float().sum(), model, torch.ones(1, 1))
    found = passes.outcome(batch, IN_FP16)
    assert found.gradients[0].item() == 8.0
    assert passes.count == 2
    passes.outcome(batch, IN_FP16)
    assert passes.count == 3  # it was remembered


def test_in_fp16_small_gradients_are_not_lost():
    model = nn.Linear(1, 1, bias=False)
    passes, batch = of(lambda x: 1e-9 * model(x).float().sum(), model, torch.ones(1, 1))
    assert passes.outcome(batch, IN_FP16).gradients[0].item() == pytest.approx(1e-9, rel=1e-2)


def test_what_is_kept_for_the_backward_pass_is_counted_once_and_without_weights():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    passes, batch = of(lambda x: model(x).sum(), model, torch.randn(8, 16))
    # The input, and the output of ReLU, which the next layer keeps as well.
    whole = passes.kept_bytes(batch, FormatArrangement(base="fp32", regions={}, recipes={}, widened=()))
    assert whole == 2 * 8 * 16 * 4


def test_fp32_is_not_tf32_whatever_is_set():
    model, seen, before = nn.Linear(4, 1), [], torch.get_float32_matmul_precision()

    def function(x):
        seen.append(torch.get_float32_matmul_precision())
        return model(x).sum()

    passes, batch = of(function, model, torch.ones(2, 4))
    torch.set_float32_matmul_precision("high")
    try:
        passes.outcome(batch)
        assert (seen, torch.get_float32_matmul_precision()) == (["highest"], "high")
    finally:
        torch.set_float32_matmul_precision(before)


def test_compiled_code_is_run_as_what_it_was_made_of():
    model = torch.compile(nn.Linear(4, 1), backend="eager")
    passes, batch = of(lambda x: model(x).sum(), model, torch.ones(2, 4))
    units = find_units(model, lambda: passes.forward(batch))
    narrow = arrange_formats(units, [parse_formats(("e2m1", "fp32"))[0]] * len(units), CPU)
    assert passes.outcome(batch, narrow).loss != passes.outcome(batch).loss


@for_each(
    ("function", "said"),
    [
        (lambda model, x: model(x), "a tensor of shape"),
        (lambda model, x: None, "returned None"),
        (lambda model, x: model(x).sum().item(), "returned float"),
        (lambda model, x: model(x).sum().detach(), "does not require a gradient"),
        (lambda model, x: _backward(model(x).sum()), r"must not call backward\(\)"),
        (lambda model, x: _step(model, model(x).sum()), "changes the weights"),
    ],
)
def test_functions_that_do_not_return_a_loss(function, said):
    model = nn.Linear(4, 2)
    passes, batch = of(lambda x: function(model, x), model, torch.ones(3, 4))
    with pytest.raises(BadInput, match=said):
        passes.outcome(batch)


def _backward(loss):
    loss.backward(retain_graph=True)
    return loss


def _step(model, loss):
    with torch.no_grad():
        model.weight.mul_(0.9)
    return loss


def test_weights_have_to_be_fp32():
    for dtype in ("bfloat16", "float64"):  # no autocast makes FP64 anything else
        with pytest.raises(BadInput, match=rf"weights are {dtype}; .* call model.float\(\) first"):
            PassRunner(lambda x: x, nn.Linear(2, 2).to(getattr(torch, dtype)), CPU)
    with pytest.raises(BadInput, match="no parameter of the model requires a gradient"):
        PassRunner(lambda x: x, nn.Linear(2, 2).requires_grad_(False), CPU)


def test_a_checkpoint_of_the_old_kind_is_refused_with_what_to_do():
    model, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    passes, batch = of(lambda x: checkpoint(model, x, use_reentrant=True).sum(), model, x)
    with pytest.raises(BadInput, match="use_reentrant=False"):
        passes.outcome(batch)
    passes, batch = of(lambda x: checkpoint(lambda x: F.relu(model(x)), x, use_reentrant=False).sum(), model, x)
    assert passes.outcome(batch).gradients[0] is not None
