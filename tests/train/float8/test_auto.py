"""Fp8("auto"): errors against the same by hand, choices on times and errors that are given."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampwise.numbers.census.measure import census
from ampwise.train.float8.auto_choice import choose_matmuls, has_errors
from ampwise.train.float8.layer_forward import AmpwiseForward, ShapeRecorder, install_forward
from ampwise.train.float8.matmul_choices import Fp8Choices
from ampwise.train.float8.matmul_errors import ProbingForward, empty_sums, relative_errors
from ampwise.train.float8.recipe import MATMULS, Fp8
from ampwise.train.float8.recipe_timing import LayerTimes, candidate_recipes

from ...for_each import for_each

CPU = torch.device("cpu")
COMBINATIONS = [each.short for each in candidate_recipes(Fp8("auto"), CPU)]
SMALL, LARGE = 0.04, 0.5


def layer_times(shape="8×16→16", **micro):
    """Times by name, with _ for a space or plus; what is not given is as fast as BF16."""
    given = {name.replace("current_", "current ").replace("_", "+"): each for name, each in micro.items()}
    times = {"bf16": 100, **dict.fromkeys(COMBINATIONS, 100), **given}
    return LayerTimes(shape=shape, times={name: [each * 1e-6] * 7 for name, each in times.items()}, failed={})


ALL_FASTER = layer_times(
    current=60, current_forward=90, current_dgrad=92, current_wgrad=95, current_forward_dgrad=70,
    current_forward_wgrad=80, current_dgrad_wgrad=85,
)  # fmt: skip


def by_hand(layer, x, g, e5m2):
    """Errors from the output and the gradients of a layer in FP8 and one in BF16."""
    found = []
    for narrow in (True, False):
        given = x.detach().clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            own = nn.Linear(layer.in_features, layer.out_features, bias=False)
            own.weight = nn.Parameter(layer.weight.detach().clone())
            if narrow:
                install_forward(own, AmpwiseForward(e5m2=e5m2))
            y = own(given)
        y.backward(g)
        found.append((y.detach(), given.grad, own.weight.grad))
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(*found, strict=True)]


def probed(module, how, e5m2=True):
    sums = empty_sums(1, CPU)
    install_forward(module, ProbingForward(how, sums[0], e5m2=e5m2))
    return sums


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@for_each("e5m2", [True, False])
@for_each("scale", [1.0, 1e-25])
@for_each("checkpointed", [False, True])
def test_errors_are_those_of_the_layer_in_fp8(e5m2, scale, checkpointed):
    torch.manual_seed(0)
    layer, x = nn.Linear(48, 32), torch.randn(3, 7, 48)
    x[0, 0, 0] = 3e4  # beside which much becomes zero
    g = (scale * torch.randn(3, 7, 32)).bfloat16()
    expected = by_hand(layer, x, g, e5m2)
    plain = nn.Linear(48, 32)
    plain.load_state_dict(layer.state_dict())
    sums = probed(layer, ShapeRecorder(), e5m2)
    results = []
    for module in (layer, plain):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(module, given, use_reentrant=False) if checkpointed else module(given)
        y.add_(0)  # a model may change an output in place
        y.backward(g)
        results.append((y.detach(), given.grad, module.weight.grad, module.bias.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other), "what is measured is computed as ever"
    (found,) = relative_errors(sums)
    assert found == pytest.approx(expected, rel=0.05)
    assert all(0.02 < error < 0.2 for error in found)


def test_what_does_not_run_has_no_error_and_what_is_not_finite_is_none_either():
    layer = nn.Linear(48, 32)
    sums = probed(layer, ShapeRecorder())
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(4, 48)).sum().backward()
        with torch.no_grad():
            layer(torch.full((4, 48), torch.inf))
    (errors,) = relative_errors(sums)
    assert errors[1] is None
    assert errors[0] > 0
    assert has_errors([errors])
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.full((4, 48), torch.inf))
    assert not has_errors(relative_errors(sums))


@for_each(
    ("times", "errors", "matmuls"),
    [
        (ALL_FASTER, (SMALL, SMALL, SMALL), MATMULS),
        (ALL_FASTER, (SMALL, SMALL, LARGE), ("forward", "dgrad")),
        (ALL_FASTER, (LARGE, SMALL, SMALL), ("dgrad", "wgrad")),
        (ALL_FASTER, (LARGE, LARGE, SMALL), ("wgrad",)),
        (ALL_FASTER, (LARGE, LARGE, LARGE), ()),
        (ALL_FASTER, (SMALL, None, SMALL), ("forward", "wgrad")),  # the first layer: nothing needs its input's gradient
        (ALL_FASTER, (SMALL, SMALL, float("nan")), ("forward", "dgrad")),
        (layer_times(), (SMALL, SMALL, SMALL), ()),  # no gain
        (layer_times(current=98), (SMALL, SMALL, SMALL), ()),  # within noise
        (layer_times(current=80, current_forward=79.5), (SMALL, SMALL, SMALL), ("forward",)),  # as fast with fewer
        (layer_times(current=80, current_forward=95), (SMALL, SMALL, LARGE), ("forward",)),
        (LayerTimes(shape="", times={}, failed={}, trouble="no memory"), (SMALL, SMALL, SMALL), ()),
    ],
)
def test_a_matmul_is_in_fp8_if_it_gains_and_its_error_is_within_the_limit(times, errors, matmuls):
    choice = choose_matmuls({"up": times}, {"up": errors}, 0.1)["up"]
    assert choice.matmuls == matmuls
    assert choice.excluded == tuple(m for m, e in zip(MATMULS, errors, strict=True) if e is LARGE)


def test_like_blocks_differ_in_two_ways_at_most():
    """Else torch.compile would compile a block of many variants many times."""
    within, outer = (SMALL, SMALL, SMALL), {"0": (SMALL, SMALL, LARGE), "11": (LARGE, SMALL, SMALL)}
    names = [f"layers.{place}.{name}" for place in range(12) for name in ("up", "down")]
    errors = {name: outer.get(name.split(".")[1], within) if name.endswith("up") else within for name in names}
    found = choose_matmuls(dict.fromkeys(names, ALL_FASTER), errors, 0.1)
    assert {found[f"layers.{place}.up"].matmuls for place in range(1, 11)} == {MATMULS}
    assert {found[f"layers.{place}.up"].matmuls for place in (0, 11)} == {("dgrad",)}, "what both may have"
    assert {found[f"layers.{place}.down"].matmuls for place in range(12)} == {MATMULS}
    del outer["11"]
    errors["layers.11.up"] = within
    found = choose_matmuls(dict.fromkeys(names, ALL_FASTER), errors, 0.1)
    assert found["layers.0.up"].matmuls == ("forward", "dgrad"), "two ways: each has its own"


def test_the_table_has_a_line_for_each_group_of_layers():
    names = [f"layers.{place}.{name}" for place in range(4) for name in ("up", "down")]
    errors = dict.fromkeys(names, (0.037, 0.058, 0.057))
    errors["layers.3.down"] = (0.038, 0.058, 0.345)
    slow = layer_times()
    times = {name: ALL_FASTER if name.endswith("down") else slow for name in names}
    values = torch.cat([torch.full((90,), 1.0), torch.full((10,), 1e-20)])
    samples = {"layers.3.down": {("gradient", "whole"): census(values), ("input", "whole"): census(torch.ones(9))}}
    choices = choose_matmuls(times, errors, 0.1, samples)
    told = str(Fp8Choices(limit=0.1, decided_after=1000, layers=tuple(choices.values()))).splitlines()
    assert told == [
        "decided after step 1,000; errors relative to BF16, up to 0.1 in FP8",
        "layer                   in fp8               speed-up  error forward  error dgrad  error wgrad  why",
        "layers.{0..3}.up    ×4  none                 1.00x     0.037          0.058        0.057        not faster",
        "layers.{0..2}.down  ×3  forward+dgrad+wgrad  1.67x     0.037          0.058        0.057        faster, and errors within the limit",  # noqa: E501
        "layers.3.down           forward+dgrad        1.43x     0.038          0.058        0.345        wgrad: error above 0.1; 10% of the gradient's values become zero",  # noqa: E501
    ]


def test_an_error_is_none_of_the_output_alone():
    """The layer's own output has a bias, which would hide the error of the matmul."""
    layer, x = nn.Linear(48, 32), torch.randn(64, 48)
    with torch.no_grad():
        layer.bias.fill_(1e4)
    sums = probed(layer, ShapeRecorder())
    with torch.autocast("cpu", torch.bfloat16):
        assert F.mse_loss(layer(x).float(), torch.zeros(64, 32)) > 1e7
    assert relative_errors(sums)[0][0] > 0.01
