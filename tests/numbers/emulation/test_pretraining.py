"""emulate:nvfp4, the published recipe: its parts against loops over values in float64, and their laws."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from ampwise import Policy, cast
from ampwise.errors import BadInput
from ampwise.numbers.emulation.emulated_matmuls import emulated
from ampwise.numbers.emulation.recipe import BF16, hadamard, parse_recipe, round_in_squares
from ampwise.numbers.formats import find_format
from ampwise.train.precision.kept_layers import blocks_kept, kept_layers
from ampwise.train.precision_plugin import make_emulation

from ...for_each import for_each
from ..formats.by_value import nearest

NVFP4, SIDE = find_format("nvfp4"), 16


def by_loops(values, height, four_over_six=False):
    """Round with a scale for each ``height`` × 16 values, one by one."""
    values = np.asarray(values, np.float64)
    whole = float(np.float32(np.abs(values).max() / (6 * (256 if four_over_six else 448)))) or 1.0
    rounded = np.zeros_like(values)
    for row in range(0, values.shape[0], height):
        for column in range(0, values.shape[1], SIDE):
            block = values[row : row + height, column : column + SIDE]
            tries = []
            for top in (6.0, 4.0) if four_over_six else (6.0,):
                scale = (nearest(np.abs(block).max() / top / whole, "e4m3fn") or 2.0**-9) * whole
                tries.append(np.array([[nearest(each / scale, "e2m1") * scale for each in line] for line in block]))
            best = min(tries, key=lambda each: ((each - block) ** 2).sum())  # the first of equals
            rounded[row : row + height, column : column + SIDE] = best
    return torch.from_numpy(rounded)


def cut_off(values):
    """Return what rounding keeps the mean of: a block's largest value is cut off where its scale is rounded down."""
    whole, values = float(values.abs().max() / (6 * 448)), values.double().clone()
    for block in (block for row in values for block in row.split(SIDE)):
        most = 6 * nearest(float(block.abs().max()) / 6 / whole, "e4m3fn") * whole
        block.clamp_(-most, most)
    return values.float()


def hadamard_by_loops(values):
    """Multiply 16 rows at a time by a matrix of ±1/4: the sign is the parity of the bits that both places have."""
    signs = hadamard(torch.eye(SIDE, dtype=torch.float64), -1)[:, 0] * 4
    padded = F.pad(values, (0, 0, 0, -values.shape[0] % SIDE))
    done = torch.zeros_like(padded)
    for start in range(0, padded.shape[0], SIDE):
        for place in range(SIDE):
            for other in range(SIDE):
                sign = signs[other] * (-1) ** (place & other).bit_count()
                done[start + place] += sign * padded[start + other] / 4
    return done


def run(model, x, recipe, seed=0):
    model.zero_grad()
    x = x.clone().requires_grad_()
    with emulated(model, {model: recipe}):
        y = model(x)
        torch.manual_seed(seed)
        y.square().sum().backward()
    return y.detach(), x.grad, [parameter.grad.clone() for parameter in model.parameters()]


@for_each("shape", [(32, 48), (16, 16), (20, 37), (3, 70)])
def test_a_weight_and_its_transpose_have_the_same_values(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, shape[1])
    rounded = round_in_squares(weight, NVFP4)
    assert torch.equal(round_in_squares(weight.T, NVFP4), rounded.T)
    torch.testing.assert_close(rounded.double(), by_loops(weight, SIDE), rtol=1e-6, atol=0)
    assert not torch.equal(cast(weight, NVFP4, dim=0), cast(weight, NVFP4, dim=1)), "blocks of rows are not alike"


def test_each_matrix_of_several_has_squares_of_its_own():
    weights = torch.randn(3, 20, 37, generator=torch.Generator().manual_seed(0))
    weights[:, 0, 0] = 10.0  # one scale for the whole tensor
    assert torch.equal(
        round_in_squares(weights, NVFP4), torch.stack([round_in_squares(each, NVFP4) for each in weights])
    )


@for_each("length", [16, 48, 37, 1])
def test_a_transform_of_both_operands_leaves_the_product_as_it_was(length):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, dtype=torch.float64, generator=generator) for size in ((5, length), (length, 7)))
    torch.testing.assert_close(hadamard(a, -1) @ hadamard(b, 0), a @ b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hadamard(b, 0), hadamard_by_loops(b), rtol=1e-12, atol=1e-12)


def test_the_transform_spreads_an_outlier_over_its_block_alone():
    x = torch.zeros(1, 48)
    x[0, 20] = 8.0
    spread = hadamard(x, 1)
    assert (spread[0, 16:32].abs() == 2.0).all()
    assert spread.count_nonzero() == 16


def test_a_linear_layer_is_three_products_of_different_operands():
    torch.manual_seed(0)
    layer, x = nn.Linear(48, 40), torch.randn(21, 48)
    y, by_x, (by_weight, by_bias) = run(layer, x, parse_recipe("nvfp4,nearest"))
    weight = by_loops(layer.weight.detach(), SIDE)
    expected = by_loops(x, 1) @ weight.T + layer.bias.detach().double()
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    g = 2 * y
    torch.testing.assert_close(by_x.double(), by_loops(g, 1) @ weight, rtol=1e-5, atol=1e-4)
    spread_g, spread_x = (by_loops(hadamard(each, 0).T, 1) for each in (g, x))
    torch.testing.assert_close(by_weight.double(), spread_g @ spread_x.T, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(by_bias, g.sum(0), rtol=1e-5, atol=1e-4)


def test_gradients_are_rounded_stochastically_and_nothing_else():
    torch.manual_seed(0)
    layer, x, recipe = nn.Linear(32, 16, bias=False), torch.randn(64, 32), parse_recipe("nvfp4")
    y, by_x, (by_weight,) = run(layer, x, recipe, seed=1)
    again = run(layer, x, recipe, seed=1)
    other = run(layer, x, recipe, seed=2)
    assert torch.equal(by_x, again[1])
    assert torch.equal(by_weight, again[2][0])
    assert torch.equal(y, other[0]), "the forward pass has no chance in it"
    assert not torch.equal(by_x, other[1])
    assert not torch.equal(by_weight, other[2][0])


def test_stochastic_rounding_keeps_the_mean_of_both_gradients():
    torch.manual_seed(0)
    layer, x, recipe = nn.Linear(16, 16, bias=False), torch.randn(32, 16), parse_recipe("nvfp4")
    g = torch.linspace(-1, 1, 32 * 16).reshape(32, 16)
    draws = []
    for seed in range(400):
        layer.weight.grad, given = None, x.clone().requires_grad_()
        with emulated(layer, {layer: recipe}):
            torch.manual_seed(seed)
            layer(given).backward(g)
        draws.append((given.grad, layer.weight.grad))
    by_x = cut_off(g) @ round_in_squares(layer.weight.detach(), NVFP4)
    by_weight = cut_off(hadamard(g, 0).T) @ cast(hadamard(x, 0), NVFP4, dim=0)
    for each, exact in zip(zip(*draws, strict=True), (by_x, by_weight), strict=True):
        found = torch.stack(each)
        sigma = found.std(0) / len(draws) ** 0.5
        assert sigma.mean() > 1e-4
        assert ((found.mean(0) - exact).abs() / sigma.clamp(min=1e-6)).mean() < 1.2, "0.8 is usual"


class Attends(nn.Module):
    """Matmuls of activations between two of weights."""

    def __init__(self, between=None):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave, self.between = nn.Linear(32, 32), nn.Linear(32, 32), between

    def forward(self, x):
        x = self.enter(x)
        x = x @ x.mT if self.between is None else self.between(x)
        return self.leave(F.pad(x, (0, 32 - x.shape[-1])))


def test_matmuls_of_activations_stay_in_bf16_in_both_passes():
    class Between(nn.Module):
        def forward(self, x):
            return x @ x.mT

    x, recipe = torch.randn(2, 8, 32), parse_recipe("nvfp4,nearest")
    told = run(Attends(), x, recipe)
    model = Attends(Between())
    given = x.clone().requires_grad_()
    with emulated(model, {model: recipe, model.between: BF16}):
        y = model(given)
        y.square().sum().backward()
    for one, other in zip(
        (told[0], told[1], *told[2]), (y, given.grad, *(p.grad for p in model.parameters())), strict=True
    ):
        assert torch.equal(one, other)


def test_a_weight_that_its_parent_uses_is_a_weight():
    """As nn.MultiheadAttention uses that of its output layer."""

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.child = nn.Linear(32, 16, bias=False)

        def forward(self, x):
            return F.linear(x, self.child.weight)

    model, x = Parent(), torch.randn(6, 32)
    y, by_x, _ = run(model, x, parse_recipe("nvfp4,nearest"))
    weight = by_loops(model.child.weight.detach(), SIDE)
    torch.testing.assert_close(y.double(), by_loops(x, 1) @ weight.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(by_x.double(), by_loops(2 * y, 1) @ weight, rtol=1e-5, atol=1e-4)


def test_a_head_tied_to_the_embedding_stays_in_bf16_and_a_weight_that_is_computed_does_not():
    torch.manual_seed(0)
    recipe, tokens = parse_recipe("nvfp4"), torch.arange(12)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(32, 32)

        def forward(self, tokens):
            return F.linear(self.wte(tokens), self.wte.weight)

    tied = Tied()
    with emulated(tied, {tied: recipe}):
        found = tied(tokens)
    with emulated(tied, {tied: BF16}):
        assert torch.equal(found, tied(tokens))

    normed = weight_norm(nn.Linear(32, 32, bias=False))
    x = torch.randn(4, 32)
    with emulated(normed, {normed: recipe}):
        found = normed(x)
    expected = by_loops(x, 1) @ by_loops(normed.weight.detach(), SIDE).T
    torch.testing.assert_close(found.detach().double(), expected, rtol=1e-5, atol=1e-5)


@for_each("reentrant", [True, False])
def test_what_is_computed_again_is_computed_alike(reentrant):
    class Checkpointed(Attends):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    x, recipe = torch.randn(2, 8, 32), parse_recipe("nvfp4,nearest")
    plain, again = run(Attends(), x, recipe), run(Checkpointed(), x, recipe)
    for one, other in zip((plain[1], *plain[2]), (again[1], *again[2]), strict=True):
        assert torch.equal(one, other)


def test_four_over_six_by_value_and_that_it_loses_less():
    values = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    values[0, 0] = 8.0
    fmt = parse_recipe("nvfp4,plain,four-over-six").forward
    found = cast(values, fmt)
    torch.testing.assert_close(found.double(), by_loops(values, 1, four_over_six=True), rtol=1e-6, atol=0)
    assert (found - values).norm() < 0.97 * (cast(values, NVFP4) - values).norm()
    torch.testing.assert_close(
        round_in_squares(values, fmt).double(), by_loops(values, SIDE, four_over_six=True), rtol=1e-6, atol=0
    )
    assert cast(torch.tensor([float("nan"), 1.0]), fmt).isnan().all()


@pytest.mark.parametrize("count", range(100))
def test_about_a_sixth_of_the_blocks_is_kept_most_of_them_late(count):
    first, last = blocks_kept(count)
    assert 0 <= first <= last
    assert abs(first + last - 0.16 * count) <= 0.5


class Model(nn.Module):
    def __init__(self, blocks, block=lambda: nn.Sequential(nn.Linear(32, 32), nn.GELU())):
        super().__init__()
        self.stem, self.blocks = nn.Linear(32, 32), nn.ModuleList(block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def test_the_summary_names_what_is_kept_and_why():
    model = Model(24)
    names = {module: name for name, module in model.named_modules()}
    assert [names[module] for module in kept_layers(model)] == [
        "blocks.0.0", "blocks.21.0", "blocks.22.0", "blocks.23.0", "stem", "head",
    ]  # fmt: skip
    told = Policy("emulate:nvfp4").keep("fp32", "blocks.23").describe(model)
    lines = {line.split()[0]: line.split("  ")[-1].strip() for line in told.splitlines()}
    assert lines["blocks.{1..20}.0"] == "base"
    assert lines["blocks.0.0"] == "in the first of 24 blocks: sensitive"
    assert lines["blocks.{21,22}.0"] == "in the last 3 of 24 blocks: sensitive"
    assert lines["blocks.23.0"] == "inside blocks.23"
    assert lines["head"] == "last layer: its output goes into the loss"
    assert "emulate:nvfp4,plain" in Policy("emulate:nvfp4,plain").describe(model)
    assert "sensitive" not in Policy("emulate:nvfp4,plain").describe(model)


def test_what_is_no_stack_of_blocks_has_no_kept_layers():
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(12)))
    assert not kept_layers(layers), "layers, of which none is known to be sensitive"
    assert not kept_layers(nn.Linear(8, 8))
    different = Model(1)
    different.blocks.append(nn.Bilinear(4, 4, 4))
    assert not kept_layers(different)
    compiled = Model(12)
    compiled.blocks[3] = torch.compile(compiled.blocks[3], backend="eager")
    assert len(kept_layers(compiled)) == len(kept_layers(Model(12))) == 4


def test_options_that_do_not_fit():
    for text, why in (
        ("mxfp8,plain", "only nvfp4 has a recipe to leave out by plain"),
        ("mxfp8,four-over-six", "four-over-six needs NVFP4"),
        ("nvfp4,nearest,stochastic", "expected FORMAT"),
        ("nvfp4/mxfp8,plain", "only nvfp4 has a recipe"),
    ):
        with pytest.raises(BadInput, match=why):
            parse_recipe(text)


def test_what_is_kept_is_in_bf16_unless_the_policy_says_otherwise():
    model, x, recipe = Model(6), torch.randn(4, 32), parse_recipe("nvfp4,nearest")
    results = []
    for policy, own in ((Policy(), {}), (Policy().keep("fp32", "blocks.5", "head"), {"blocks.5": None, "head": None})):
        recipes = {model: recipe, model.stem: BF16, model.blocks[5]: BF16, model.head: BF16}
        recipes.update({model.get_submodule(name): kept for name, kept in own.items()})
        found = []
        for context in (make_emulation(policy, recipe, [model]).on(), emulated(model, recipes)):
            with context, torch.no_grad():
                found.append(model(x))
        assert torch.equal(*found)
        results.append(found[0])
    assert not torch.equal(*results)


def test_each_of_several_models_has_its_own_kept_layers():
    models = [Model(6), Model(6)]
    x, recipe = torch.randn(4, 32), parse_recipe("nvfp4,nearest")
    together, alone = make_emulation(Policy(), recipe, models), make_emulation(Policy(), recipe, models[:1])
    found = []
    for context in (together.on(), alone.on()):
        with context, torch.no_grad():
            found.append(models[0](x))
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # as a linear layer does
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_weights_are_recognised_in_wrapped_models(tmp_path, wrapper):
    x, recipe = torch.randn(20, 32), parse_recipe("nvfp4,nearest")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        alone = Model(6)
        model = copy.deepcopy(alone)
        if wrapper == "fsdp2":
            for block in model.blocks:
                fully_shard(block)
        wrapped = fully_shard(model) if wrapper == "fsdp2" else DistributedDataParallel(model)
        found = []
        for each in (alone, wrapped):
            with make_emulation(Policy(), recipe, [each]).on():
                each(x).square().sum().backward()
            gradients = [parameter.grad for parameter in each.parameters()]
            found.append([each.full_tensor() if isinstance(each, DTensor) else each for each in gradients])
        torch.testing.assert_close(*found)
    finally:
        dist.destroy_process_group()
