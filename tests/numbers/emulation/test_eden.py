"""emulate:nvfp4,eden: gradients that keep their mean, with less noise than by stochastic rounding."""

from dataclasses import replace

import torch
from torch import nn

from ampwise.numbers.emulation.eden import TOGETHER, round_by_eden
from ampwise.numbers.emulation.emulated_matmuls import emulated
from ampwise.numbers.emulation.recipe import hadamard, parse_recipe, round_operand
from ampwise.numbers.formats import find_format

from ...for_each import for_each

NVFP4 = find_format("nvfp4")
FOUR_OVER_SIX = replace(NVFP4, four_over_six=True)
DRAWS = 100


def gradients(layer, x, g):
    """Return the gradients of the input and of the weight, stacked over draws."""
    drawn = []
    with emulated(layer, {layer: parse_recipe("nvfp4,eden")}):
        for seed in range(DRAWS):
            torch.manual_seed(seed)
            given, layer.weight.grad = x.clone().requires_grad_(), None
            layer(given).backward(g)
            drawn.append((given.grad, layer.weight.grad))
    return [torch.stack(each) for each in zip(*drawn, strict=True)]


def example():
    torch.manual_seed(0)
    layer, x = nn.Linear(80, 48, bias=False), torch.randn(70, 80) * torch.logspace(-1, 1, 80)
    return layer, x, torch.randn(70, 48) * torch.logspace(-2, 0, 70)[:, None]


def test_the_forward_pass_is_four_over_six_in_blocks_of_16():
    layer, x, _ = example()
    with emulated(layer, {layer: parse_recipe("nvfp4,eden")}):
        y = layer(x)
    rounded = (round_operand(each, FOUR_OVER_SIX, -1, scaled=False) for each in (x, layer.weight.detach()))
    torch.testing.assert_close(y, next(rounded) @ next(rounded).T)


def test_both_gradients_keep_their_mean():
    layer, x, g = example()
    weight, given = (round_operand(each, FOUR_OVER_SIX, -1, scaled=False) for each in (layer.weight.detach(), x))
    exact = g @ weight, g.T @ given  # of what the forward pass has multiplied
    for drawn, right in zip(gradients(layer, x, g), exact, strict=True):
        off = drawn.mean(0) - right
        noise = drawn.std(0) / DRAWS**0.5
        assert (off.abs() < 5 * noise + 1e-3 * right.abs().max()).all()


def test_it_loses_about_half_of_what_stochastic_rounding_loses():
    torch.manual_seed(0)
    x = hadamard(torch.randn(512, TOGETHER), -1)
    by_chance = round_operand(x, NVFP4, -1, scaled=False, rounding="stochastic")
    assert (round_by_eden(x, NVFP4, -1) - x).square().sum() < 0.55 * (by_chance - x).square().sum()


def test_a_rounded_vector_is_as_long_along_itself_as_before():
    torch.manual_seed(0)
    x = hadamard(torch.randn(4096, TOGETHER), -1, torch.ones(TOGETHER))
    along = (round_by_eden(x, NVFP4, -1) * x).sum(-1) / (x * x).sum(-1)
    nearest = (round_operand(x, NVFP4, -1, scaled=False) * x).sum(-1) / (x * x).sum(-1)
    assert abs(float(along.mean()) - 1) < 2e-4 < abs(float(nearest.mean()) - 1)


@for_each("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(bad):
    x = torch.ones(2, 2 * TOGETHER)
    x[0, 3] = bad
    assert round_by_eden(x, NVFP4, -1)[0, :TOGETHER].isnan().all()


def test_zeros_and_shapes_that_are_no_multiples():
    assert not round_by_eden(torch.zeros(3, TOGETHER), NVFP4, -1).any()
    layer = nn.Linear(5, 3)
    x = torch.randn(2, 7, 5, requires_grad=True)
    with emulated(layer, {layer: parse_recipe("nvfp4,eden")}):
        layer(x).square().sum().backward()
    assert x.grad.shape == x.shape
    assert torch.isfinite(x.grad).all()
    assert layer.weight.grad.shape == layer.weight.shape
