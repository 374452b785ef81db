"""Products on rounded operands, against the same written out by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampwise.errors import BadInput, UnknownName
from ampwise.numbers.emulation.emulated_matmuls import emulated
from ampwise.numbers.emulation.recipe import recipe_for_format, round_operand
from ampwise.numbers.formats import find_format

from ...for_each import for_each

FORMATS = ["e4m3", "e5m2", "mxfp8", "mxfp4", "nvfp4", "bf16", "fp16"]


def run(model, x, recipes):
    model.zero_grad()
    x = x.clone().requires_grad_()
    with emulated(model, recipes):
        y = model(x)
        y.square().sum().backward()
    return y.detach(), x.grad, [parameter.grad for parameter in model.parameters()]


@pytest.mark.half_by_day
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(48,), (5, 48), (2, 3, 48)])
def test_a_linear_layer_is_three_products(name, bias, shape):
    torch.manual_seed(0)
    layer, x, recipe = nn.Linear(48, 40, bias=bias), torch.randn(shape), recipe_for_format(name)

    def q(tensor, dim, gradient=False):
        fmt = recipe.backward if gradient else recipe.forward
        return round_operand(tensor, fmt, dim, scaled=recipe.scaled)

    y, by_x, (by_weight, *by_bias) = run(layer, x, {layer: recipe})
    weight, rows = layer.weight.detach(), x.reshape(-1, 48)
    expected = q(rows, -1) @ q(weight, 1).T + (layer.bias.detach() if bias else 0)
    torch.testing.assert_close(y.reshape(-1, 40), expected, rtol=1e-6, atol=1e-6)
    g = 2 * y.reshape(-1, 40)
    torch.testing.assert_close(by_x.reshape(-1, 48), q(g, -1, True) @ q(weight, 0), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(by_weight, q(g, 0, True).T @ q(rows, 0), rtol=1e-6, atol=1e-5)
    if bias:
        torch.testing.assert_close(by_bias[0], g.sum(0), rtol=1e-6, atol=1e-5)


@for_each("name", ["e4m3", "mxfp8"])
@for_each("groups", [1, 2])
def test_a_convolution_is_three_products(name, groups):
    torch.manual_seed(0)
    layer, x, recipe = nn.Conv2d(64, 32, 3, padding=1, groups=groups), torch.randn(2, 64, 5, 7), recipe_for_format(name)
    y, by_x, (by_weight, by_bias) = run(layer, x, {layer: recipe})
    q = {"scaled": recipe.scaled}
    weight = layer.weight.detach()
    expected = F.conv2d(
        round_operand(x, recipe.forward, 1, **q), round_operand(weight, recipe.forward, 1, **q), layer.bias.detach(),
        padding=1, groups=groups,
    )  # fmt: skip
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    g = 2 * y
    by_hand = torch.nn.grad.conv2d_input(
        x.shape,
        round_operand(weight, recipe.forward, 0, **q),
        round_operand(g, recipe.backward, 1, **q),
        padding=1,
        groups=groups,
    )
    torch.testing.assert_close(by_x, by_hand, rtol=1e-5, atol=1e-4)
    flat = [
        round_operand(t.movedim(1, 0).flatten(1), f, 1, **q) for t, f in ((x, recipe.forward), (g, recipe.backward))
    ]
    flat_x, flat_g = (f.unflatten(1, (2, 5, 7)).movedim(0, 1) for f in flat)
    by_hand = torch.nn.grad.conv2d_weight(flat_x, weight.shape, flat_g, padding=1, groups=groups)
    torch.testing.assert_close(by_weight, by_hand, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(by_bias, g.sum((0, 2, 3)), rtol=1e-5, atol=1e-4)


def test_the_inner_module_has_its_own_recipe_and_others_none():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), nn.Linear(32, 32))
    x = torch.randn(4, 32)
    whole, inner = recipe_for_format("mxfp4"), recipe_for_format("bf16")
    outputs = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, given, out, name=name: outputs.update({name: (given[0], out)}))
    run(model, x, {model[1]: whole, model[1][1]: inner})
    for name, fmt in (("0", None), ("1.0", whole), ("1.1", inner), ("2", None)):
        given, out = outputs[name]
        layer = model.get_submodule(name)
        if fmt is None:
            assert torch.equal(out, layer(given))
        else:
            q = [round_operand(each.detach(), fmt.forward, -1, scaled=fmt.scaled) for each in (given, layer.weight)]
            torch.testing.assert_close(out, q[0] @ q[1].T + layer.bias, rtol=1e-6, atol=1e-6)


def test_attention_and_einsum_are_products_too():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(32, 2, batch_first=True)
    x = torch.randn(2, 6, 32)
    plain = attention(x, x, x, need_weights=False)[0]
    with emulated(attention, {attention: recipe_for_format("mxfp4")}):
        narrow = attention(x, x, x, need_weights=False)[0]
    assert 0.01 < (narrow - plain).norm() / plain.norm() < 1

    class Einsum(nn.Module):
        def forward(self, a, b):
            return torch.einsum("ij,kj->ik", a, b)

    einsum, a, b = Einsum(), torch.randn(3, 32), torch.randn(4, 32)
    recipe = recipe_for_format("mxfp4")
    with emulated(einsum, {einsum: recipe}):
        found = einsum(a, b)
    q = [round_operand(each, recipe.forward, -1, scaled=True) for each in (a, b)]
    torch.testing.assert_close(found, q[0] @ q[1].T)


def test_what_is_computed_again_is_computed_alike():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))

    class Checkpointed(nn.Module):
        def __init__(self, again):
            super().__init__()
            self.inner, self.again = inner, again

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)

    x = torch.randn(4, 32)
    results = [run(model, x, {model: recipe_for_format("e4m3")}) for model in map(Checkpointed, (False, True))]
    for plain, again in zip(results[0][2], results[1][2], strict=True):
        assert torch.equal(plain, again)
    assert torch.equal(results[0][1], results[1][1])


def test_a_gradient_that_the_user_brings_is_one():
    torch.manual_seed(0)
    layer, x, g, recipe = (
        nn.Linear(32, 32, bias=False),
        torch.randn(4, 32),
        torch.randn(4, 32),
        recipe_for_format("e4m3"),
    )
    with emulated(layer, {layer: recipe}):
        layer(x).backward(g)
    q = round_operand(g, recipe.backward, 0, scaled=True).T @ round_operand(x, recipe.forward, 0, scaled=True)
    torch.testing.assert_close(layer.weight.grad, q)


def test_under_autocast_results_stay_in_16_bits():
    layer = nn.Linear(32, 16)
    x = torch.randn(4, 32)
    with emulated(layer, {layer: recipe_for_format("e4m3")}), torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    q = [round_operand(t.detach().bfloat16(), find_format("e4m3"), -1, scaled=True) for t in (x, layer.weight)]
    expected = (q[0] @ q[1].T + layer.bias.bfloat16().float()).bfloat16()
    assert torch.equal(out, expected.detach())


def test_nothing_is_left_behind():
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    before = layer(x)
    with emulated(layer, {layer: recipe_for_format("mxfp4")}):
        assert not torch.equal(layer(x), before)
    assert torch.equal(layer(x), before)
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


def test_a_forward_that_fails_leaves_the_module():
    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("no")

    model = nn.ModuleList([Fails(), nn.Linear(8, 8)])
    x = torch.randn(2, 8)
    with emulated(model, {model[0]: recipe_for_format("mxfp4")}):
        with pytest.raises(RuntimeError, match="no"):
            model[0](x)
        with torch.no_grad():
            inside = model[1](x)
    assert torch.equal(inside, model[1](x).detach())


def test_scaling_keeps_what_is_far_below_the_format():
    tiny = torch.tensor([1e-12, 3e-12, -2e-12])
    assert torch.equal(round_operand(tiny, find_format("e4m3"), -1, scaled=False), torch.zeros(3))
    error = (round_operand(tiny, find_format("e4m3"), -1, scaled=True) - tiny).abs() / tiny.abs()
    assert error.max() <= 2**-4


@for_each("values", [[0.0, 0.0], [float("inf"), 1.0], [float("nan"), 1.0], []])
def test_scales_of_what_has_none(values):
    out = round_operand(torch.tensor(values), find_format("e4m3"), -1, scaled=True)
    assert out.shape == (len(values),)
    assert not values or torch.equal(out[0].isnan(), torch.tensor(values[0] != values[0]))


def test_recipes_that_make_no_sense():
    with pytest.raises(BadInput, match="e8m0 is an unsigned format for scales"):
        recipe_for_format("e8m0")
    with pytest.raises(UnknownName, match="unknown format 'e4m4'"):
        recipe_for_format("e4m4")
