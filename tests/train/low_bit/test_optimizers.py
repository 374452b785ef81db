"""Optimizers by name, and torchao's in an engine: their own rounding, on the slow path, saved and loaded."""

import io
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampwise
from ampwise import BadInput, Engine, make_optimizer
from ampwise.errors import MissingDependency, UnknownName
from ampwise.train.low_bit.optimizers import (
    OPTIMIZER_NAMES,
    QUANTIZED_OPTIMIZERS,
    TORCHAO_OPTIMIZERS,
    keeps_small_updates,
)

torchao = pytest.importorskip("torchao.optim")


@pytest.fixture(autouse=True)
def eager():
    """Torchao compiles its update for each shape, which takes seconds; as plain code it does the same."""
    torch.compiler.set_stance("force_eager")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.compiler.set_stance("default")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 4))


def train(engine, *numbers):
    (model,) = engine.models
    steps = []
    for number in numbers:
        torch.manual_seed(number or 0)
        x, y = torch.randn(8, 64), torch.randint(4, (8,))
        steps.append(engine.step(loss_of, model, x * (1 if number else torch.nan), y))
    return steps


def loss_of(model, x, y):
    with torch.autocast("cpu", enabled=False):
        weights = {name: each.float() for name, each in model.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(model, weights, x), y)


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_each_name_makes_its_optimizer(name):
    parameters = [each for each in net().parameters() if each.dim() == 2 or name != "muon"]
    optimizer = make_optimizer(name, parameters, lr=2.0**-10)
    assert type(optimizer).__name__.lower() == name
    assert float(optimizer.param_groups[0]["lr"]) == 2.0**-10
    assert optimizer.param_groups[0]["params"] == parameters


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize("name", QUANTIZED_OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16-pure", "bf16-pure,kahan"])
def test_it_trains_skips_and_is_saved(name, precision):
    model = net()
    engine = Engine(model, make_optimizer(name, model, lr=1e-2), precision, clip_norm=1.0, trace=False)
    (optimizer,) = engine.optimizers
    steps = train(engine, *[1] * 6)
    assert float(steps[-1].loss) < float(steps[0].loss)
    before = [each.detach().clone() for each in model.parameters()]
    (skipped,) = train(engine, None)
    assert skipped.skipped
    assert all(map(torch.equal, before, model.parameters()))
    assert float(optimizer.state[model[0].weight]["step"]) == 6
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = optimizer.state[model[0].weight]["exp_avg"].dequantize()
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"].dequantize(), state)
    (step,) = train(engine, 2)
    assert not step.skipped


def test_in_bf16_pure_it_rounds_by_chance_alike_everywhere_and_as_it_did_afterwards():
    ended = []
    for seed in (1, 2):
        model = net()
        engine = Engine(model, make_optimizer("adamw8bit", model, lr=1e-5), "bf16-pure")
        (optimizer,) = engine.optimizers
        assert optimizer.bf16_stochastic_round
        assert keeps_small_updates(optimizer)
        before = model[0].weight.detach().clone()
        torch.manual_seed(seed)
        train(engine, 1, 2)
        moved = float((model[0].weight != before).float().mean())
        assert 0 < moved < 0.5, "by chance, some"
        ended.append(model[0].weight.detach().clone())
        expected = torch.get_rng_state()
        with engine._plugin.step_context(optimizer):
            optimizer.step()
        assert torch.equal(torch.get_rng_state(), expected)
        engine.change_precision("bf16")
        assert not optimizer.bf16_stochastic_round
        assert not keeps_small_updates(optimizer)
    assert torch.equal(*ended)


def test_what_cannot_be_had(monkeypatch):
    with pytest.raises(UnknownName, match=r"unknown optimizer 'adamw8bits'. Did you mean adamw8bit.* The optimizers"):
        make_optimizer("adamw8bits", net())
    with pytest.raises(
        BadInput, match=r"make_optimizer\('adamw4bit'\): .*momentum.* The options are those of AdamW4bit"
    ):
        make_optimizer("adamw4bit", net(), momentum=0.9)
    with pytest.raises(BadInput, match="expected at least one parameter"):
        make_optimizer("adamw", [])
    with pytest.raises(BadInput, match=r"AdamW8bit already keeps its state in fewer bits. Remove bf16-states"):
        Engine(model := net(), make_optimizer("adamw8bit", model), "bf16-pure,bf16-states")
    with pytest.raises(BadInput, match=r"Engine\(optimizer='adamw'\): .* ampwise.make_optimizer\('adamw', model, lr"):
        Engine(net(), "adamw")
    monkeypatch.delattr(torchao, "AdamWFp8")
    with pytest.raises(MissingDependency, match=r"and torchao \S+ has no AdamWFp8: pip install 'ampwise\[fp8\]' --up"):
        make_optimizer("adamwfp8", net())


@pytest.mark.parametrize("name", TORCHAO_OPTIMIZERS)
def test_without_torchao(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    monkeypatch.setattr("ampwise.train.low_bit.optimizers._version", lambda: None)
    with pytest.raises(MissingDependency, match=rf"optimizer '{name}' is torchao's, which is not installed.*ampwise\["):
        make_optimizer(name, net())
    assert ampwise.make_optimizer("sgd", net())


def bytes_of(value):
    names = getattr(value, "tensor_attrs", None)
    return sum(bytes_of(getattr(value, each)) for each in names) if names else value.numel() * value.element_size()


@pytest.mark.parametrize("name", QUANTIZED_OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (4095,), (64, 66), (128, 97), (1000,), (3, 4096)])
def test_what_is_kept_has_the_bytes_that_are_said(name, dtype, shape):
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer = make_optimizer(name, [parameter])
    buffer = optimizer._new_buffer(parameter, True)
    assert bytes_of(buffer) == QUANTIZED_OPTIMIZERS[name].moment_bytes(parameter.numel(), dtype.itemsize)
