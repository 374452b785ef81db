"""BF16 weights and coded moments: bytes that are predicted against bytes that are there."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ampwise import Engine, make_optimizer, memory
from ampwise.errors import UnknownName
from ampwise.train.low_bit.optimizers import TORCHAO_OPTIMIZERS
from ampwise.tune.memory.allocation_log import COMPENSATION, GRADIENTS, PARAMETERS, STATE

ROWS = 4


def make(batch=ROWS):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 96), nn.Linear(96, 10))
    x, y = torch.randn(batch, 128), torch.randint(10, (batch,))
    return model, (x, y), lambda x, y: F.cross_entropy(model(x).float(), y)


def held(value):
    """Bytes of tensors, and of those they are made of; counts of steps are not on the device."""
    parts = getattr(value, "tensor_attrs", None)
    if parts:
        return sum(held(getattr(value, part)) for part in parts)
    return value.numel() * value.element_size() if value.dim() else 0


def really(precision, optimizer):
    """What an engine has of a parameter after a step, by kind."""
    model, batch, loss = make()
    its = make_optimizer(optimizer, model, lr=1e-3)
    engine, gradients = Engine(model, its, precision), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: gradients.append(held(each.grad)))
    engine.step(loss, *batch)
    return {
        PARAMETERS: sum(map(held, model.parameters())),
        GRADIENTS: sum(gradients),
        STATE: sum(held(value) for state in its.state.values() for value in state.values()),
        COMPENSATION: sum(map(held, getattr(engine._plugin, "rests", ()))),
    }


@pytest.fixture
def eager():
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


# Of large models; this one is small, and has more than its share of tensors that are not coded.
BYTES = {
    ("bf16", "adamw"): 16,
    ("bf16", "adamw8bit"): 10,
    ("bf16", "adamw4bit"): 9,
    ("bf16-pure", "adamw"): 12,
    ("bf16-pure,kahan", "adamw"): 14,
    ("bf16-pure,bf16-states", "adamw"): 8,
    ("bf16-pure", "sgd"): 4,
    ("bf16-pure", "adamw8bit"): 6,
    ("bf16-pure,kahan", "adamw8bit"): 8,
    ("bf16-pure", "adamw4bit"): 5,
    ("bf16-pure", "adamwfp8"): 6,
    ("bf16-pure", "adam8bit"): 6,
    ("bf16-pure", "adam4bit"): 5,
    ("bf16-pure", "adamfp8"): 6,
}


@pytest.mark.few_by_day(4)
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("precision", "optimizer"), BYTES)
def test_what_is_predicted_is_what_is_there(precision, optimizer):
    if optimizer in TORCHAO_OPTIMIZERS:
        pytest.importorskip("torchao.optim")
    found = really(precision, optimizer)
    estimate = memory(make, precisions=[precision], optimizer=optimizer, largest=False)
    most = estimate.at(precision).most
    parameters = sum(each.numel() for each in make()[0].parameters())
    for kind, nbytes in found.items():
        # Blocks of 512 bytes, and one for each count of steps.
        assert most.get(kind, 0) == pytest.approx(nbytes, rel=0.01, abs=11 * 2 * 512), kind
    whole = sum(found.values()) / parameters
    assert whole == pytest.approx(BYTES[precision, optimizer], rel=0.15)


@pytest.mark.few_by_day(2)
@pytest.mark.parametrize(("precision", "optimizer"), BYTES)
def test_bytes_a_parameter_of_a_large_model(precision, optimizer):
    sizes = {"layers": 1, "hidden": 512, "heads": 8, "vocab": 8192, "seq": 16}
    estimate = memory(precisions=[precision], optimizer=optimizer, largest=False, **sizes)
    (shown,) = (each["bytes_per_parameter"] for each in estimate.as_dict()["estimates"])
    assert shown == pytest.approx(BYTES[precision, optimizer], abs=0.1)
    (line,) = (line for line in str(estimate).splitlines() if line.startswith("bytes per parameter"))
    assert line.split()[-2:] == [f"{shown:.2f}", "derived"]


def test_an_unknown_option_is_said():
    with pytest.raises(UnknownName, match="unknown option of bf16-pure 'kahn'"):
        memory(make, precisions=["bf16-pure,kahn"])
