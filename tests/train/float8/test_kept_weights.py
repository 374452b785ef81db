"""With several micro-batches a weight is cast once per step, and every pass sees it as it is."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from ampwise import Engine
from ampwise.train import engine as engines
from ampwise.train.float8 import kept_weights
from ampwise.train.float8.layer_forward import WEIGHT
from ampwise.train.float8.recipe import Fp8
from ampwise.train.precision.precision import EXTRA_PRECISIONS, ChosenPrecision

MICRO_BATCHES, LAYERS = 3, 2


@pytest.fixture(autouse=True)
def has_fp8(monkeypatch):
    real = engines.choose_precision
    fp8 = ChosenPrecision(EXTRA_PRECISIONS["fp8"], "in a test")
    monkeypatch.setattr(engines, "choose_precision", lambda asked, on: fp8 if asked == "fp8" else real(asked, on))


@pytest.fixture
def casts(monkeypatch):
    """How many weights are cast for several passes, at first and again."""
    noted = []
    for name in ("cast_to_fp8", "recast_fp8_"):
        real = getattr(kept_weights, name)
        monkeypatch.setattr(
            kept_weights, name, lambda *given, real=real, name=name, **more: noted.append(name) or real(*given, **more)
        )
    return noted


class Net(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.inside, self.head = nn.Embedding(16, 32), nn.Linear(32, 16)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(LAYERS))
        self.checkpointed = checkpointed

    def forward(self, x):
        x = self.inside(x)
        for block in self.blocks:
            x = x + F.gelu(checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return self.head(x)


class BehindTheBack(torch.optim.SGD):
    """As optimizers were written before there was torch.no_grad."""

    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                each.data.add_(each.grad, alpha=-group["lr"])


def trained(
    *, kept=True, steps=4, recipe="current", checkpointed=False, compiled=False, between=None, optimizer=BehindTheBack,
    prepare=None, **settings,
):  # fmt: skip
    """The losses of all micro-batches, and the weights."""
    torch.manual_seed(0)
    model = Net(checkpointed)
    if prepare is not None:
        prepare(model)
    engine = Engine(
        model, optimizer(model.parameters(), lr=0.1), Fp8(recipe, narrow=("blocks.*",), **settings),
        accumulate=MICRO_BATCHES,
    )  # fmt: skip
    if not kept:
        engine._plugin.micro_batch_context = lambda first: engines.NO_CONTEXT
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    generator = torch.Generator().manual_seed(1)

    def loss(x):
        assert any(block.__dict__[WEIGHT] is not None for block in model.blocks) == (kept and recipe == "current")
        return F.cross_entropy(called(x).flatten(0, 1).float(), (3 * x + 1).remainder(16).flatten())

    losses = []
    for place in range(steps * MICRO_BATCHES):
        losses.append(engine.step(loss, torch.randint(16, (4, 6), generator=generator)).loss)
        assert all(block.__dict__.get(WEIGHT) is None for block in model.blocks)
        if between is not None:
            between(model, place)
    return losses, [each.detach().clone() for each in model.parameters()]


def same(one, other):
    return one[0] == other[0] and all(torch.equal(*pair) for pair in zip(one[1], other[1], strict=True))


@pytest.mark.parametrize("optimizer", [BehindTheBack, torch.optim.SGD])
@pytest.mark.parametrize("settings", [{}, {"matmuls": ("forward",)}, {"matmuls": ("dgrad", "wgrad")}])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_weights_are_cast_once_per_step_and_all_is_as_without(casts, optimizer, settings, checkpointed):
    given = {"optimizer": optimizer, "checkpointed": checkpointed, **settings}
    assert same(trained(**given), trained(kept=False, **given))
    assert casts == ["cast_to_fp8"] * LAYERS + ["recast_fp8_"] * LAYERS * 3


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # what dynamo does itself
def test_compiled_it_is_the_same_and_compiled_once(casts):
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    losses, _ = trained(compiled=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
    assert losses == pytest.approx(trained(kept=False)[0], rel=1e-4)
    assert len(casts) == LAYERS * 4
    torch._dynamo.reset()


def test_weights_that_change_between_micro_batches_are_cast_again(casts):
    def change(model, place):
        if place == 4:  # in the middle of the second step
            with torch.no_grad():
                model.blocks[0].weight.mul_(0.5)

    assert same(trained(between=change), trained(kept=False, between=change))
    assert len(casts) == LAYERS * 4 + 1


def test_a_weight_that_is_replaced_is_cast_anew(casts):
    def change(model, place):
        if place == 4:
            model.blocks[0].weight = nn.Parameter(model.blocks[0].weight.detach() * 0.5)

    assert same(trained(between=change, steps=2), trained(kept=False, between=change, steps=2))
    assert casts.count("cast_to_fp8") == LAYERS + 1


@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_other_recipes_cast_in_each_pass(casts, recipe):
    assert same(trained(recipe=recipe), trained(kept=False, recipe=recipe))
    assert casts == []


def test_a_weight_that_is_computed_in_each_pass_is_not_kept(casts):
    def normalise(model):
        parametrizations.weight_norm(model.blocks[0])

    assert same(trained(prepare=normalise), trained(kept=False, prepare=normalise))
    assert len(casts) == (LAYERS - 1) * 4


def test_nothing_is_kept_after_an_error():
    model = Net()
    engine = Engine(model, torch.optim.SGD(model.parameters()), Fp8(narrow=("blocks.*",)), accumulate=2)
    with pytest.raises(ZeroDivisionError):
        engine.step(lambda: 1 / 0)
    assert all(block.__dict__[WEIGHT] is None for block in model.blocks)


def test_one_micro_batch_keeps_nothing(casts):
    model = Net()
    engine = Engine(model, torch.optim.SGD(model.parameters()), Fp8(narrow=("blocks.*",)))
    engine.step(lambda: model(torch.zeros(1, 2, dtype=torch.long)).sum())
    assert casts == []


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # as a linear layer does
@pytest.mark.parametrize("reshard", [True, False])
def test_weights_that_fsdp2_gathers_are_not_kept(casts, tmp_path, reshard):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        model = Net()
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model)
        engine = Engine(model, torch.optim.SGD(model.parameters()), Fp8(narrow=("blocks.*",)), accumulate=2)
        for _ in range(4):
            engine.step(lambda: model(torch.zeros(1, 2, dtype=torch.long)).float().square().mean())
        assert casts == []
    finally:
        dist.destroy_process_group()
