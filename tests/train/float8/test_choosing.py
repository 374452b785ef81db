"""Which layers become FP8: the reason for each that does not."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from ampwise import Policy
from ampwise.errors import UnknownName
from ampwise.train.float8.layer_choice import choose_layers
from ampwise.train.float8.recipe import Fp8

from ...for_each import for_each

BIG = 512


def block(width=BIG):
    return nn.ModuleDict({"up": nn.Linear(width, 2 * width), "down": nn.Linear(2 * width, width)})


class Other(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def whys(model, fp8=None, kept=()):
    return {choice.name: choice.fp8 or choice.why for choice in choose_layers(model, dict(kept), fp8 or Fp8()).values()}


def gpt(**more):
    return nn.ModuleDict({"wte": nn.Embedding(64, BIG), "blocks": nn.ModuleList([block(), block()]), **more})


def test_blocks_become_fp8_and_the_head_does_not():
    found = whys(gpt(head=nn.Linear(BIG, 1024)))
    assert found.pop("head") == "last layer: its output goes into the loss"
    assert found == {f"blocks.{i}.{name}": True for i in range(2) for name in ("up", "down")}


def test_a_block_is_neither_first_nor_last_where_the_head_is_the_embedding():
    assert set(whys(gpt()).values()) == {True}


def test_of_an_mlp_the_first_and_the_last_stay_wide():
    model = nn.Sequential(nn.Linear(BIG, BIG), nn.ReLU(), nn.Linear(BIG, BIG), nn.ReLU(), nn.Linear(BIG, BIG))
    assert whys(model) == {
        "0": "first layer: it reads the data",
        "2": True,
        "4": "last layer: its output goes into the loss",
    }
    assert whys(model, Fp8(narrow=("0", "4"))) == {"0": True, "2": True, "4": True}


@for_each(
    ("layer", "why"),
    [
        (lambda: nn.Linear(BIG, 1000), "1000: not a multiple of 16, see ampwise.pad_"),
        (lambda: nn.Linear(1001, 1000), "1001 and 1000: not a multiple of 16, see ampwise.pad_"),
        (lambda: nn.Linear(BIG, BIG - 16), "small: casting 253952 weights costs more than FP8 saves"),
        (lambda: nn.Linear(BIG, BIG, dtype=torch.float64), "its weight is in float64"),
        (lambda: Other(BIG, BIG), "Other overrides forward"),
        (lambda: parametrizations.weight_norm(nn.Linear(BIG, BIG)), True),
        (lambda: nn.Linear(BIG, BIG, bias=False), True),
        (lambda: nn.Linear(BIG, BIG).requires_grad_(False), True),
    ],
)
def test_layers_that_cannot_or_should_not(layer, why):
    model = gpt(middle=layer(), head=nn.Linear(BIG, 1024))
    assert whys(model)["middle"] == why


@for_each(("name", "outputs", "is_router"), [
    ("router", 64, True), ("gate", 512, True), ("gate", 2048, False), ("gate_proj", 512, False), ("wg", 16, True),
])  # fmt: skip
def test_routers_are_known_by_name_and_by_few_outputs(name, outputs, is_router):
    model = gpt(moe=nn.ModuleDict({name: nn.Linear(4096, outputs)}), head=nn.Linear(BIG, 1024))
    assert whys(model)[f"moe.{name}"] == ("a router: its choices are discrete" if is_router else True)


def test_a_weight_that_is_shared_stays_wide():
    model = gpt(head=nn.Linear(BIG, 64, bias=False), more=nn.Linear(BIG, BIG))
    model["head"].weight = model["wte"].weight
    assert whys(model)["head"] == "its weight is shared with another module"


def test_attention_that_does_not_call_its_layer():
    model = gpt(attention=nn.MultiheadAttention(BIG, 8), head=nn.Linear(BIG, 1024))
    assert whys(model)["attention.out_proj"] == "nn.MultiheadAttention uses its weight without calling it"


def test_a_forward_that_someone_has_put_on():
    model = gpt(middle=nn.Linear(BIG, BIG), head=nn.Linear(BIG, 1024))
    model["middle"].forward = lambda x: x
    assert whys(model)["middle"] == "its forward was replaced"


def test_what_a_policy_keeps_and_what_is_inside_of_it():
    model = gpt(head=nn.Linear(BIG, 1024))
    kept = Policy("fp8").keep("bf16", "blocks.0").patterns(model)
    found = whys(model, kept=kept)
    assert found["blocks.0.up"] == found["blocks.0.down"] == "kept by 'blocks.0'"
    assert found["blocks.1.up"] is True


def test_wide_by_name_and_narrow_does_not_make_the_impossible_possible():
    model = gpt(odd=nn.Linear(BIG, 1000), head=nn.Linear(BIG, 1024))
    found = whys(model, Fp8(wide=("*.up",), narrow=("odd", "head")))
    assert found["blocks.0.up"] == "wide by '*.up'"
    assert found["odd"] == "1000: not a multiple of 16, see ampwise.pad_"
    assert found["head"] is True
    with pytest.raises(UnknownName, match=r"unknown module 'haed'\. Did you mean head"):
        whys(model, Fp8(narrow=("haed",)))


def test_wide_and_narrow_take_what_is_inside_of_a_module():
    model = gpt(head=nn.Linear(BIG, 1024))
    found = whys(model, Fp8(wide=("blocks.0",)))
    assert found["blocks.0.up"] == found["blocks.0.down"] == "wide by 'blocks.0'"
    assert found["blocks.1.up"] is True
    assert set(whys(model, Fp8(wide=("blocks",))).values()) == {
        "wide by 'blocks'",
        "last layer: its output goes into the loss",
    }
    small = gpt(small=nn.ModuleDict({"in": nn.Linear(32, 32), "out": nn.Linear(32, 32)}), head=nn.Linear(BIG, 1024))
    assert whys(small)["small.in"] == "small: casting 1024 weights costs more than FP8 saves"
    found = whys(small, Fp8(narrow=("small",)))
    assert found["small.in"] is found["small.out"] is True
    assert found["head"] == "last layer: its output goes into the loss"
    with pytest.raises(UnknownName, match=r"unknown module 'bloks'"):
        whys(model, Fp8(wide=("bloks",)))


def test_the_region_of_a_policy_is_no_forward_of_its_own():
    model = gpt(middle=nn.Linear(BIG, BIG), head=nn.Linear(BIG, 1024))
    with Policy("bf16").keep("fp32", "middle").apply(model):
        assert whys(model)["middle"] is True
    model["middle"].forward = lambda x: x
    with Policy("bf16").keep("fp32", "middle").apply(model):
        assert whys(model)["middle"] == "its forward was replaced"


def test_the_reasons_are_in_the_description():
    with torch.device("meta"):
        model = gpt(odd=nn.Linear(BIG, 1000), head=nn.Linear(BIG, 1024))
    text = Policy("fp8").keep("fp32", "blocks.1.down").describe(model)
    assert text.splitlines()[0] == "fp8 base; parameters: 1.6 M in fp8, 1.1 M in bf16, 524.8 k in fp32"
    lines = {line.split()[0]: line for line in text.splitlines()[2:]}
    assert lines["blocks.{0,1}.up"].endswith("fp8      current scaling")
    assert lines["blocks.1.down"].endswith("fp32     kept by 'blocks.1.down'")
    assert lines["wte"].endswith("bf16     not a linear layer")
    assert lines["odd"].endswith("bf16     1000: not a multiple of 16, see ampwise.pad_")
    assert lines["head"].endswith("bf16     last layer: its output goes into the loss")
