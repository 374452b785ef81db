"""Which modules have products of their own, and how many FLOPs those are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.errors import BadInput, UnknownName
from ampwise.tune.search.arguments import find_called_model
from ampwise.tune.search.units import REST, find_units, select_units

from .models import net


def flops_of(model, forward):
    return {unit.name: unit.flops for unit in find_units(model, forward)}


def test_products_belong_to_the_innermost_module():
    model, batches = net(1)
    rows, width, words = 32, 16, 32
    assert flops_of(model, lambda: model(*batches[0])) == {
        "attention.qkv": 2 * rows * width * 3 * width,
        "attention": 2 * (2 * 4 * 8 * 8 * width),  # scores, and the mix: four sequences of eight
        "attention.out": 2 * rows * width * width,
        "body.0": 2 * rows * width * 2 * width,
        "body.2": 2 * rows * 2 * width * width,
        REST: 2 * rows * width * words,
    }


def test_convolutions_count_by_their_places():
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.ConvTranspose2d(6, 3, 2, stride=2))
    found = flops_of(model, lambda: model(torch.randn(2, 4, 5, 5)))
    assert found == {"0": 2 * 2 * 6 * 25 * (2 * 9), "1": 2 * 2 * 6 * 25 * (3 * 4)}


def test_what_computes_with_weights_of_others_is_the_unit():
    """nn.MultiheadAttention never calls its out_proj."""
    model = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    found = flops_of(model, lambda: model(torch.randn(2, 3, 16)))
    assert set(found) == {"self_attn", "linear1", "linear2"}


def test_products_of_the_function_are_those_of_the_rest():
    model = nn.Linear(8, 4)
    holder = nn.ModuleDict({"only": model})
    x = torch.randn(6, 8)
    units = find_units(holder, lambda: model(x) @ torch.randn(4, 3))
    assert {unit.name: (unit.flops, unit.emulated) for unit in units} == {
        "only": (2 * 6 * 8 * 4, True),
        REST: (2 * 6 * 4 * 3, False),
    }


@pytest.mark.usefixtures("onednn")
def test_a_recurrent_layer_is_one_that_cannot_be_emulated():
    model = nn.ModuleDict({"lstm": nn.LSTM(8, 16), "head": nn.Linear(16, 2)})
    x = torch.randn(5, 3, 8)
    units = find_units(model, lambda: model["head"](model["lstm"](x)[0]))
    assert {unit.name: (unit.flops, unit.emulated) for unit in units} == {
        "lstm": (2 * 15 * (4 * 16) * (8 + 16), False),
        "head": (2 * 15 * 16 * 2, True),
    }


def test_products_of_integers_and_of_fp64_are_nothing_to_choose_for():
    model = nn.Linear(4, 2)
    counts = torch.ones(3, 3, dtype=torch.long)
    units = find_units(
        model,
        lambda: model(torch.ones(3, 4)).sum() + (counts @ counts).sum() + counts.double().mm(counts.double()).sum(),
    )
    assert [unit.flops for unit in units] == [2 * 3 * 4 * 2]


@pytest.mark.parametrize("where", ["autocast", "weights"])
def test_what_computes_in_16_bits_by_itself_is_no_fp32_to_compare_with(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if where == "weights":
        model.bfloat16()

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "autocast"):
            return model(torch.ones(3, 4, dtype=model[0].weight.dtype))

    with pytest.raises(BadInput, match=r"a matmul in 0 is bfloat16; expected FP32.* Remove autocast from"):
        find_units(model, forward)


def test_without_products_there_is_nothing_to_choose():
    model = nn.LayerNorm(4)
    with pytest.raises(BadInput, match="computes no FP32 matmul"):
        find_units(model, lambda: model(torch.ones(2, 4)))


def test_a_pattern_is_for_a_module_and_what_is_in_it():
    model, batches = net(1)
    units = find_units(model, lambda: model(*batches[0]))
    assert [unit.name for unit in select_units(units, ["attention"])] == ["attention.qkv", "attention", "attention.out"]
    assert [unit.name for unit in select_units(units, ["*.0", "*out"])] == ["attention.out", "body.0"]
    assert select_units(units, []) == units
    with pytest.raises(UnknownName, match=r"unknown module 'atention\.qkv'. Did you mean attention\.qkv"):
        select_units(units, ["atention.qkv"])
    with pytest.raises(UnknownName, match="It matches no module with matmuls"):
        select_units(units, ["norm"])


def test_the_model_is_what_the_function_calls():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    x, criterion = torch.randn(3, 4), nn.CrossEntropyLoss()
    before, numbers = {name: each.clone() for name, each in model.named_buffers()}, torch.get_rng_state()
    labels = torch.zeros(3, dtype=torch.long)
    assert find_called_model(lambda: criterion(model(x), labels), x.device) is model
    assert all(torch.equal(each, before[name]) for name, each in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert not model._forward_pre_hooks


def test_nothing_is_changed_where_the_function_fails():
    model, x = nn.BatchNorm1d(4), torch.randn(3, 4)
    numbers = torch.get_rng_state()

    def fails():
        torch.rand(1)
        model(x)
        raise ValueError("on purpose")

    with pytest.raises(BadInput, match="failed in FP32 on the first batch: ValueError: on purpose"):
        find_called_model(fails, x.device)
    assert torch.equal(model.running_mean, torch.zeros(4))
    assert torch.equal(torch.get_rng_state(), numbers)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda one, two, x: one(x) + two(x), "the function calls Linear, Linear; name the model"),
        (lambda one, two, x: F.relu(x), "the function calls no module with parameters"),
    ],
)
def test_where_it_is_not_clear_one_has_to_say(function, said):
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(BadInput, match=said):
        find_called_model(lambda: function(one, two, torch.ones(1, 2)), torch.device("cpu"))
