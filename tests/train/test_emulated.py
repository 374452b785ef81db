"""precision="emulate:…": an engine's step is the one that products on rounded values give, whatever else it does."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampwise import Engine, Policy
from ampwise.numbers.emulation.emulated_matmuls import emulated
from ampwise.numbers.emulation.recipe import parse_recipe, recipe_for_format, round_operand

from ..for_each import for_each
from .engine_toys import same

pytestmark = pytest.mark.usefixtures("small_operations_are_cheap")

FORMATS = ["mxfp8", "mxfp4", "nvfp4,plain", "e4m3", "e4m3/e4m3", "e5m2", "mxfp6/mxfp8", "bf16", "bf16/e5m2"]
LR = 0.1


class Block(nn.Module):
    """Attention, a residual, a layer: two products of weights and two of activations."""

    def __init__(self, width=32):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, again=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head, self.again = nn.ModuleList([Block(), Block()]), nn.Linear(32, 8), again

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.again is None else checkpoint(block, x, use_reentrant=self.again == "reentrant")
        return self.head(x)


def batch(number=0, rows=4):
    return torch.randn(rows, 5, 32, generator=torch.Generator().manual_seed(number))


def training(precision, model=None, **options):
    model = model or Net()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=LR), precision, **options)
    return model, engine, lambda x: model(x).square().mean()


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def by_hand(precision, *batches, model=None, recipes=None):
    """One step by plain torch means, over the mean of these batches."""
    model = model or Net()
    recipe = parse_recipe(precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for x in batches:
        with emulated(model, recipes(model, recipe) if recipes else {model: recipe}):
            (model(x).square().mean() / len(batches)).backward()
    optimizer.step()
    return weights(model)


@pytest.mark.half_by_day
@pytest.mark.parametrize("precision", FORMATS)
def test_a_step_is_that_of_the_products_on_rounded_values(precision):
    model, engine, loss_fn = training(f"emulate:{precision}")
    before, x = weights(model), batch()
    step = engine.step(loss_fn, x)
    assert not step.skipped
    assert same(weights(model), by_hand(precision, x))
    plain, by_plain, its_loss = training("fp32")
    by_plain.step(its_loss, x)
    assert not same(weights(model), weights(plain)), "and not that of FP32"
    assert not same(weights(model), before)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_where_gradients_are_too_small_for_the_format_the_loss_is_scaled():
    model, engine, _ = training("emulate:fp16", scaling={"init_scale": 2.0**10})
    step = engine.step(lambda x: 1e-7 * model(x).square().mean(), batch())
    assert step.scale == 2.0**10
    lost = Net()
    with emulated(lost, {lost: recipe_for_format("fp16")}):
        (1e-7 * lost(batch()).square().mean()).backward()
    scaled = (weights(model)[0] - weights(Net())[0]).norm() / LR
    assert lost.blocks[0].qkv.weight.grad.norm() < 0.99 * scaled


@for_each("precision", ["mxfp8", "nvfp4,plain", "e4m3", "e4m3/mxfp4", "mxfp4/bf16", "bf16/e4m3"])
def test_a_layer_by_hand_in_float64(precision):
    torch.manual_seed(0)
    layer, x = nn.Linear(48, 40, bias=False), torch.randn(20, 48)
    weight, recipe = layer.weight.detach().clone(), parse_recipe(precision)
    engine = Engine(layer, torch.optim.SGD(layer.parameters(), lr=1.0), f"emulate:{precision}")
    engine.step(lambda x: 0.5 * layer(x).square().sum(), x)

    def q(values, fmt, dim):
        return round_operand(values, fmt, dim, scaled=fmt.name in ("e4m3fn", "e5m2")).double()

    y = q(x, recipe.forward, -1) @ q(weight, recipe.forward, -1).T
    gradient = q(y.float(), recipe.backward, 0).T @ q(x, recipe.forward, 0)
    torch.testing.assert_close(weight - layer.weight.detach(), gradient.float(), rtol=1e-4, atol=1e-4)


def test_attention_by_hand_in_float64():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 33, 48) for _ in range(3))

    class Attention(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

    model, recipe = Attention(), recipe_for_format("mxfp4")
    with emulated(model, {model: recipe}):
        found = model(q, k, v)
    factor = 48**-0.25  # torch gives half of it to each
    scores = recipe.of(q * factor, -1, is_gradient=False).double() @ recipe.of(
        (k * factor).mT, -2, is_gradient=False
    ).double()  # fmt: skip
    shares = scores.float().softmax(-1)
    expected = recipe.of(shares, -1, is_gradient=False).double() @ recipe.of(v, -2, is_gradient=False).double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(found, F.scaled_dot_product_attention(q, k, v), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "module", [nn.MultiheadAttention(32, 2, batch_first=True), nn.TransformerEncoderLayer(32, 2, 64)]
)
def test_evaluation_in_one_operation_is_taken_apart(module):
    module.eval()
    engine = Engine(module, torch.optim.SGD(module.parameters(), lr=0.1), "emulate:mxfp4")
    x = torch.randn(2, 5, 32)

    def run():
        return module(x, x, x, need_weights=False)[0] if isinstance(module, nn.MultiheadAttention) else module(x)

    with torch.no_grad(), engine.autocast():
        emulated_there = run()
    with engine.autocast():
        emulated_here = run().detach()
    with torch.no_grad():
        plain = run()
    torch.testing.assert_close(emulated_there, emulated_here, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(emulated_there, plain, rtol=1e-3, atol=1e-3)
    assert torch.backends.mha.get_fastpath_enabled()


def test_stochastic_rounding_is_repeatable_differs_and_is_for_gradients_alone():
    def gradients(seed, precision="emulate:mxfp4,stochastic"):
        model, engine, loss_fn = training(precision)
        torch.manual_seed(seed)
        loss = engine.step(loss_fn, batch()).loss
        return loss, [before - after for before, after in zip(weights(Net()), weights(model), strict=True)]

    first, again, other = gradients(1), gradients(1), gradients(2)
    assert same(first, again)
    assert not same(first[1], other[1])
    assert first[0] == other[0] == gradients(1, "emulate:mxfp4")[0]


@pytest.mark.nightly
def test_stochastic_rounding_keeps_the_mean_where_nearest_does_not():
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 16, bias=False), torch.randn(64, 32)
    pushes = 0.3 + torch.rand(64, 16) * 0.05  # all in one place of the grid: to nearest they all go one way
    pushes[0] = 6.0

    def gradient(precision):
        engine = Engine(layer, torch.optim.SGD(layer.parameters(), lr=0.0), precision)
        with engine.autocast():
            out = (layer(x) * pushes).sum()
        engine.backward(out)
        return layer.weight.grad.clone()

    expected = recipe_for_format("bf16").of(pushes, 0, is_gradient=True).T @ recipe_for_format("mxfp4").of(
        x, 0, is_gradient=False
    )  # fmt: skip
    draws = torch.stack([gradient("emulate:mxfp4/mxfp4,stochastic") for _ in range(300)])
    error, sigma = draws.mean(0) - expected, draws.std(0) / 300**0.5
    usual = (error.abs() / sigma.clamp(min=1e-6)).mean()
    nearest = ((gradient("emulate:mxfp4") - expected).abs() / sigma.clamp(min=1e-6)).mean()
    assert usual < 2.5  # 0.8 but for the values beyond a block's largest, which saturate
    assert nearest > 2 * usual


def test_kept_modules_are_wide_forward_and_backward():
    policy = Policy("emulate:mxfp4").keep("fp32", "blocks.1", "head").keep("bf16", "blocks.0.out")
    model, engine, loss_fn = training(policy)
    seen = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, given, out, name=name: seen.update({name: (given[0].detach(), out)}))
    engine.step(loss_fn, batch())
    fresh = Net()
    given, out = seen["blocks.1"]
    torch.testing.assert_close(out, fresh.blocks[1](given))  # whose attention is another kernel's
    given, out = seen["blocks.0.out"]
    assert out.dtype == torch.bfloat16
    given, out = seen["blocks.0.qkv"]
    assert not torch.allclose(out.detach(), fresh.blocks[0].qkv(given), rtol=1e-3, atol=1e-3)
    # The head's gradient is that of FP32, given what it was given.
    given, out = seen["head"]
    gradient = (2 * out.detach() / out.numel()).flatten(0, 1).T @ given.flatten(0, 1)
    found = (fresh.head.weight - model.head.weight).detach() / LR
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6)


def test_all_kept_is_fp32():
    model, engine, loss_fn = training(Policy("emulate:mxfp4").keep("fp32", "*"))
    plain, by_plain, its_loss = training("fp32")
    for number in range(2):
        engine.step(loss_fn, batch(number))
        by_plain.step(its_loss, batch(number))
    torch.testing.assert_close(weights(model), weights(plain))


def test_micro_batches_pieces_and_the_step_by_hand():
    xs, expected = [batch(0), batch(1)], None
    expected = by_hand("mxfp4", *xs)
    model, engine, loss_fn = training("emulate:mxfp4", accumulate=2)
    for x in xs:
        engine.step(loss_fn, x)
    torch.testing.assert_close(weights(model), expected)

    model, engine, loss_fn = training("emulate:mxfp4")
    engine.step_in_pieces(2, loss_fn, torch.cat(xs))
    torch.testing.assert_close(weights(model), expected)

    model, engine, loss_fn = training("emulate:mxfp4", accumulate=2)
    for x in xs:
        with engine.autocast():
            loss = loss_fn(x)
        engine.backward(loss)
        engine.apply()
    torch.testing.assert_close(weights(model), expected)


@pytest.mark.half_by_day
@pytest.mark.parametrize("again", ["not reentrant", "reentrant"])
@pytest.mark.parametrize("precision", ["e4m3", "mxfp4"])
def test_what_is_computed_again_is_emulated_again(again, precision):
    model, engine, loss_fn = training(f"emulate:{precision}", Net(again))
    x = batch().requires_grad_()
    engine.step(loss_fn, x)
    assert same(weights(model), by_hand(precision, batch()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_function_without_modules_is_emulated_again(reentrant):
    class Functional(nn.Module):
        def __init__(self, again):
            super().__init__()
            torch.manual_seed(0)
            self.weight, self.again = nn.Parameter(torch.randn(32, 32)), again

        def forward(self, x):
            def run(x):
                return F.linear(F.linear(x, self.weight).relu(), self.weight)

            return checkpoint(run, x, use_reentrant=reentrant) if self.again else run(x)

    results = []
    for again in (False, True):
        model, engine, loss_fn = training("emulate:e4m3", Functional(again))
        engine.step(loss_fn, batch().requires_grad_())
        results.append(weights(model))
    assert same(*results)


class Checkpointed(nn.Module):
    """A method that is computed again, with products of its own around a layer, or before one."""

    def __init__(self, again, ends_in_layer):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.layer, self.head = nn.Parameter(torch.randn(32, 32) / 6), nn.Linear(32, 32), nn.Linear(32, 8)
        self.again, self.ends_in_layer = again, ends_in_layer

    def attend(self, x):
        if self.ends_in_layer:
            return self.layer(torch.tanh(x @ self.weight))
        return torch.tanh(self.layer(x) @ self.weight)

    def forward(self, x):
        if self.again is None:
            return self.head(self.attend(x))
        return self.head(checkpoint(self.attend, x, use_reentrant=self.again))


@pytest.mark.half_by_day
@pytest.mark.parametrize("ends_in_layer", [True, False])
@pytest.mark.parametrize("kept", ["head", "layer"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_function_is_emulated_again_where_modules_are_kept(reentrant, kept, ends_in_layer):
    results = []
    for again in (None, reentrant):
        policy = Policy("emulate:mxfp4").keep("fp32", kept)
        model, engine, loss_fn = training(policy, Checkpointed(again, ends_in_layer))
        for number in range(2):
            engine.step(loss_fn, batch(number).requires_grad_())
        results.append(weights(model))
    assert same(*results)


class Nested(Checkpointed):
    """A checkpointed function in another."""

    def inner(self, x):
        with torch.no_grad():
            aside = x @ self.weight
        return torch.tanh(self.attend(x + aside) @ self.weight.T)

    def outer(self, x):
        x = self.inner(x) if self.again is None else checkpoint(self.inner, x, use_reentrant=self.again[1])
        return torch.tanh(x @ self.weight)

    def forward(self, x):
        return self.head(
            self.outer(x) if self.again is None else checkpoint(self.outer, x, use_reentrant=self.again[0])
        )


@pytest.mark.half_by_day
@pytest.mark.parametrize("kept", ["head", "layer"])
@pytest.mark.parametrize("reentrant", [(True, True), (True, False), (False, True), (False, False)])
def test_of_checkpoints_in_checkpoints_all_is_emulated_again(reentrant, kept):
    results = []
    for again in (None, reentrant):
        policy = Policy("emulate:e4m3/mxfp4").keep("fp32", kept)
        model, engine, loss_fn = training(policy, Nested(again, True))
        engine.step(loss_fn, batch().requires_grad_())
        results.append(weights(model))
    torch.testing.assert_close(*results)  # gradients of one weight are summed in another order


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_was_not_emulated_is_not_when_it_is_computed_again(reentrant):
    """A product outside of the model, of the loss function."""
    results = []
    for again in (False, True):
        torch.manual_seed(0)
        model, engine, _ = training("emulate:mxfp4", nn.Linear(32, 32))

        def outside(x):
            return torch.tanh(x @ x.mT)

        def loss_fn(x, model=model, outside=outside, again=again):
            x = model(x)
            return (checkpoint(outside, x, use_reentrant=reentrant) if again else outside(x)).square().mean()

        engine.step(loss_fn, batch())
        results.append(weights(model))
    assert same(*results)


def test_products_of_a_function_of_ones_own_stay_wide_in_its_backward_pass():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            return gradient @ weight.T, x.T @ gradient

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 16))

        def forward(self, x):
            return Own.apply(x, self.weight)

    model, x = Calls(), torch.randn(4, 32)
    with emulated(model, {model: recipe_for_format("mxfp4")}):
        out = model(x)
        out.sum().backward()
    assert not torch.allclose(out, x @ model.weight, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(model.weight.grad, x.T @ torch.ones(4, 16))


def test_gradients_of_gradients_are_gradients():
    layer, recipe = nn.Linear(32, 16, bias=False), recipe_for_format("e4m3")
    engine = Engine(layer, torch.optim.SGD(layer.parameters(), lr=0.1), "emulate:e4m3")
    x, pushes = torch.randn(4, 32).requires_grad_(), torch.randn(4, 16)
    with engine.autocast():
        out = (layer(x) * pushes).sum()
    (found,) = engine.grad(out, x)
    q = recipe.of(pushes, -1, is_gradient=True) @ recipe.of(layer.weight.detach(), 0, is_gradient=False)
    torch.testing.assert_close(found.detach(), q)
    engine.backward(out + found.square().sum())
    assert layer.weight.grad.isfinite().all()


def test_several_models():
    first, second = Block(), nn.Linear(32, 4)
    copies = copy.deepcopy((first, second))
    models = [first, second]
    optimizer = torch.optim.SGD([parameter for each in models for parameter in each.parameters()], lr=LR)
    engine = Engine(models, optimizer, Policy("emulate:mxfp4").keep("fp32", "1"))
    engine.step(lambda x: second(first(x)).square().mean(), batch())
    with emulated(copies[0], {copies[0]: recipe_for_format("mxfp4")}):
        copies[1](copies[0](batch())).square().mean().backward()
    for model, other in zip(models, copies, strict=True):
        torch.optim.SGD(other.parameters(), lr=LR).step()
        assert same(weights(model), weights(other))


def test_precision_can_be_changed_to_it_and_from_it():
    model, engine, loss_fn = training("fp32")
    engine.change_precision("emulate:mxfp4")
    assert engine.precision == "emulate:mxfp4"
    engine.step(loss_fn, batch())
    assert same(weights(model), by_hand("mxfp4", batch()))
    before = copy.deepcopy(model)
    engine.change_precision("fp32")
    engine.step(loss_fn, batch(1))
    plain, by_plain, its_loss = training("fp32", before)
    by_plain.step(its_loss, batch(1))
    assert same(weights(model), weights(plain))
    engine.change_precision("emulate:fp16")
    assert engine.step(loss_fn, batch(2)).scale is not None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_compiled_runs_as_it_was_written(whole):
    model, compiled_so_often = Net(), []

    def backend(graph, inputs):
        compiled_so_often.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend) if whole else model
    if not whole:
        model.blocks[0].compile(backend=backend)
    engine = Engine(compiled, torch.optim.SGD(model.parameters(), lr=LR), "emulate:mxfp4")
    engine.step(lambda x: compiled(x).square().mean(), batch())
    assert same(weights(model), by_hand("mxfp4", batch()))
    assert not compiled_so_often


def test_evaluation_in_what_was_trained_in():
    model, engine, _ = training("emulate:mxfp4")
    with emulated(model, {model: recipe_for_format("mxfp4")}), torch.no_grad():
        expected = model(batch())
    with torch.no_grad():
        with engine.autocast():
            inside = model(batch())
        outside = model(batch())
    assert torch.equal(inside, expected)
    assert not torch.equal(outside, expected)


class Einsum(nn.Module):
    def forward(self, x):
        return torch.einsum("bij,bkj->bik", x, x) @ x.softmax(-1)


@for_each(
    "make",
    [
        Net,
        Einsum,
        lambda: nn.Sequential(nn.Conv1d(5, 32, 3), nn.ConvTranspose1d(32, 5, 3)),
        lambda: nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval(),
        lambda: nn.LSTMCell(32, 8),
    ],
)
def test_in_inference_mode_products_are_emulated_too(make):
    """Where torch hands over whole operations, and not their products."""
    torch.manual_seed(0)
    model = make()
    x, recipes = batch()[:, 0] if isinstance(model, nn.LSTMCell) else batch(), {model: recipe_for_format("mxfp4")}
    with torch.no_grad(), emulated(model, recipes):
        expected = model(x)
    with torch.inference_mode(), emulated(model, recipes):
        inside = model(x)
    with emulated(model, recipes), torch.inference_mode():
        later = model(x.clone())  # a tensor that has no gradients, wherever it is used
    with torch.inference_mode():
        plain = model(x)
    assert same(inside, expected)
    assert same(later, expected)
    assert not same(inside, plain)


def test_of_tensors_made_in_inference_mode_products_are_emulated_outside_of_it():
    with torch.inference_mode():
        model, x = Net().requires_grad_(False), batch().clone()
    results = []
    for each, given in ((model, x), (Net().requires_grad_(False), batch())):
        with emulated(each, {each: recipe_for_format("mxfp4")}):
            results.append(each(given))
    assert same(*results)


def test_in_inference_mode_kept_modules_stay_wide():
    model, engine, _ = training(Policy("emulate:mxfp4").keep("fp32", "blocks.1").keep("bf16", "head"))
    with torch.no_grad(), engine.autocast():
        expected = model(batch())
    with torch.inference_mode(), engine.autocast():
        assert same(model(batch()), expected)
    assert expected.dtype == torch.bfloat16


def test_in_inference_mode_what_is_compiled_runs_as_it_was_written():
    model = Net()
    compiled = torch.compile(model, backend="eager")
    with torch.inference_mode():
        plain = compiled(batch())  # compiled before the engine comes
    engine = Engine(compiled, torch.optim.SGD(model.parameters(), lr=LR), "emulate:mxfp4")
    with torch.no_grad(), engine.autocast():
        expected = model(batch())
    with torch.inference_mode():
        with engine.autocast():
            assert same(compiled(batch()), expected)
        assert same(compiled(batch()), plain)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_product_of_nested_tensors_is_reported(off, capsys):
    layer = nn.Linear(8, 4)
    engine = Engine(layer, torch.optim.SGD(layer.parameters(), lr=LR), "emulate:mxfp4")
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)])
    with off(), engine.autocast():
        found = layer(x)
    assert "ampwise: linear is not emulated: torch runs it as" in capsys.readouterr().err
    torch.testing.assert_close(found.unbind()[0], layer(x.unbind()[0]))


@pytest.mark.half_by_day
@pytest.mark.parametrize("precision", ["emulate:mxfp8", "emulate:nvfp4", "emulate:fp16"])
def test_a_checkpoint_goes_on_as_if_nothing_had_been(precision):
    model, engine, loss_fn = training(precision)
    engine.step(loss_fn, batch(0))
    states = copy.deepcopy((model.state_dict(), engine.state_dict()))
    engine.step(loss_fn, batch(1))
    other, again, its_loss = training(precision)
    other.load_state_dict(states[0])
    again.load_state_dict(states[1])
    again.step(its_loss, batch(1))
    assert same(weights(other), weights(model))
    in_fp32 = training("fp32")[1]
    with pytest.raises(ValueError, match=f"saved in {engine.precision}, but this engine trains in fp32"):
        in_fp32.load_state_dict(states[1])
    in_fp32.load_state_dict(states[1], other_precision=True)


def test_a_bad_batch_changes_nothing_and_the_next_one_is_emulated():
    model, engine, loss_fn = training("emulate:e4m3", trace=False)
    before = weights(model)
    assert engine.step(loss_fn, batch() * torch.nan).skipped
    assert same(weights(model), before)
    engine.step(loss_fn, batch())
    assert same(weights(model), by_hand("e4m3", batch()))


def test_what_torch_does_not_show_is_reported_once(capsys):
    class Bilinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Bilinear(4, 4, 2)

        def forward(self, x):
            return self.layer(x, x)

    model = Bilinear()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "emulate:mxfp8")
    for _ in range(2):
        engine.step(lambda x: model(x).square().mean(), torch.randn(3, 4))
    assert capsys.readouterr().err == (
        "ampwise: _trilinear is not emulated: torch runs it as one operation, and its matmuls cannot be "
        "intercepted. It runs in its own precision.\n"
    )


RANKS = """
import copy, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ampwise import Engine, Policy
from ampwise.numbers.emulation.emulated_matmuls import emulated
from ampwise.numbers.emulation.recipe import recipe_for_format

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 4))
batches = [torch.randn(6, 32) for _ in range(2)]
copies = [copy.deepcopy(model) for _ in batches]
child = os.fork()
rank = 0 if child else 1
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meet"), rank=rank, world_size=2)
wrapped = DistributedDataParallel(model)
policy = Policy("emulate:mxfp4").keep("fp32", "2")
engine = Engine(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), policy)
engine.step(lambda x: wrapped(x).square().mean(), batches[rank])
for each, x in zip(copies, batches):
    with emulated(each, {each: recipe_for_format("mxfp4"), each[2]: None}):
        each(x).square().mean().backward()
starts = zip(model.parameters(), *(each.parameters() for each in copies))
for found, a, b in starts:
    torch.testing.assert_close(found.detach(), a.detach() - 0.1 * (a.grad + b.grad) / 2)
dist.barrier()
dist.destroy_process_group()
if rank:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("as one")
"""


def test_two_ranks_train_on_the_mean_of_their_emulated_gradients(tmp_path, warm):
    (tmp_path / "train.py").write_text(RANKS)
    done = warm.run("train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "as one\n"), done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["emulate:mxfp8", "emulate:e4m3", "emulate:nvfp4,plain", "emulate:nvfp4,nearest"])
def test_in_cuda_graphs(precision):
    """Captured or not, the step is the same, and nothing waits."""
    results = []
    for graph in (False, True):
        model = Net().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, fused=True)
        engine = Engine(model, optimizer, precision, graph=graph)

        def loss_fn(x, model=model):
            return model(x).square().mean()

        for number in range(6):
            engine.step(loss_fn, batch(number).cuda())
        results.append(weights(model))
    torch.testing.assert_close(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [*FORMATS, "nvfp4,nearest"])
def test_on_a_gpu_as_on_the_cpu(precision):
    results = []
    for device in ("cpu", "cuda"):
        model = Net().to(device)
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=LR), f"emulate:{precision}")
        x = batch().to(device)
        engine.step(lambda x, model=model: model(x).square().mean(), x)
        results.append([each.cpu() for each in weights(model)])
    # Sums in another order, now and then, fall on the other side of a tie.
    start = weights(Net())
    for before, a, b in zip(start, *results, strict=True):
        assert (a - b).norm() <= 0.02 * (a - before).norm() + 1e-7


@pytest.mark.gpu
def test_stochastic_rounding_on_a_gpu_is_repeatable():
    def run(seed):
        model = Net().cuda()
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=LR), "emulate:mxfp4,stochastic")
        torch.manual_seed(seed)
        engine.step(lambda x: model(x).square().mean(), batch().cuda())
        return weights(model)

    first = run(1)
    assert same(first, run(1))
    assert not same(first, run(2))


@pytest.mark.gpu
@pytest.mark.parametrize("kept", ["head", "layer"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_on_a_gpu_a_function_is_emulated_again_where_modules_are_kept(reentrant, kept):
    """There the backward pass has a thread of its own, which counts nodes from the beginning."""
    results = []
    for again in (None, reentrant):
        policy = Policy("emulate:mxfp4").keep("fp32", kept)
        model, engine, loss_fn = training(policy, Checkpointed(again, True).cuda())
        for number in range(4):
            engine.step(loss_fn, batch(number).cuda().requires_grad_())
        results.append(weights(model))
    torch.testing.assert_close(*results)


@pytest.mark.gpu
def test_on_a_gpu_in_inference_mode():
    model = Net().cuda()
    results = []
    for off in (torch.no_grad, torch.inference_mode):
        with off(), emulated(model, {model: recipe_for_format("mxfp4")}):
            results.append(model(batch().cuda()))
    assert same(*results)
