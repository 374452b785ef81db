"""Formats to choose from, and on which modules they are."""

import pytest
import torch
from torch import nn

from ampwise.errors import BadInput, UnknownName
from ampwise.numbers.emulation.emulated_matmuls import emulated
from ampwise.numbers.emulation.recipe import recipe_for_format
from ampwise.tune.search.arrangement import arrange_formats, parse_formats
from ampwise.tune.search.units import find_units

from ...for_each import for_each
from .models import net

# Formats


def test_they_are_ordered_by_bits_and_run_in_regions():
    narrow, middle, wide = parse_formats(("fp32", "e4m3", "bf16"))
    assert (narrow.name, narrow.bits, narrow.region, narrow.narrow) == ("e4m3", 8, "bf16", True)
    assert (narrow.recipe.forward.name, narrow.recipe.backward.name) == ("e4m3fn", "e5m2")
    assert (middle.name, middle.region, middle.narrow) == ("bf16", "bf16", False)
    assert (wide.name, wide.region, wide.peak) == ("fp32", "fp32", "fp32")


def test_around_8_bits_there_is_bf16_unless_only_fp16_was_asked_for():
    assert parse_formats(("mxfp8", "fp32"))[0].region == "bf16"
    assert parse_formats(("mxfp8", "fp16", "fp32"))[0].region == "fp16"
    assert parse_formats(("mxfp8", "fp16", "bf16", "fp32"))[0].region == "bf16"


def test_bits_of_a_block_format_count_its_scales():
    assert [choice.bits for choice in parse_formats(("nvfp4", "mxfp8", "fp32"))] == [4.5, 8.25, 32]


@for_each(
    ("formats", "error", "said"),
    [
        (("e4m4", "fp32"), UnknownName, "unknown format 'e4m4'. Did you mean e4m3"),
        (("e4m3", "bf16"), BadInput, r"search\(formats=\('e4m3', 'bf16'\)\): expected 'fp32'"),
        (("fp32",), BadInput, "and a narrower one, such as"),
        ("fp32", BadInput, "and a narrower one, such as"),
        ((), BadInput, "expected 'fp32'"),
        (("tf32", "fp32"), BadInput, "TF32 is set for a whole device"),
        (("fp64", "fp32"), BadInput, "fp64 is not used for training at speed"),
        (("e8m0", "fp32"), BadInput, "e8m0 is an unsigned format"),
        (("e4m3", "fp8", "fp32"), BadInput, "'fp8' is listed twice"),
        ((16, "fp32"), BadInput, "expected names of formats"),
    ],
)
def test_what_cannot_be_chosen_among(formats, error, said):
    with pytest.raises(error, match=said):
        parse_formats(formats)


def test_scales_of_mx_formats_may_be_rounded_up():
    up, plain, _, _ = parse_formats(("mxfp8+up", "mxfp8", "bf16", "fp32"))
    assert (up.name, up.recipe.scales_up, plain.recipe.scales_up, up.peak) == ("mxfp8+up", True, False, "mxfp8")
    for name in ("e4m3+up", "mxfp8+down", "nvfp4+up"):
        with pytest.raises(BadInput, match="only 'up' may follow a plus, for MX formats: 'mxfp8\\+up'"):
            parse_formats((name, "fp32"))


# Arrangements


CPU = torch.device("cpu")
CHOICES = {choice.name: choice for choice in parse_formats(("e4m3", "mxfp8", "bf16", "fp16", "fp32"))}


def arranged(model, batch, formats, default="fp32"):
    units = find_units(model, lambda: model(*batch))
    return arrange_formats(units, [CHOICES[formats.get(unit.name, default)] for unit in units], CPU)


def outputs(model, batch, arrangement):
    """What each module returns, by name."""
    seen = {}
    with arrangement.on(model):
        hooks = [
            module.register_forward_hook(lambda _, args, out, name=name: seen.update({name: out.detach()}))
            for name, module in model.named_modules()
        ]
        with torch.autocast("cpu", torch.bfloat16, enabled=arrangement.base == "bf16"):
            model(*batch)
    for hook in hooks:
        hook.remove()
    return seen


def names(model, modules):
    return {name for name, module in model.named_modules() if module in modules}


def test_the_rest_decides_the_base_and_others_have_regions():
    model, batches = net(1)
    found = arranged(model, batches[0], {"body.0": "fp32", "attention.qkv": "e4m3"}, default="bf16")
    assert found.base == "bf16"
    assert {name: found.regions[module] for name, module in model.named_modules() if module in found.regions} == {
        "body.0": "fp32"
    }
    assert found.recipes[model.attention.qkv] is CHOICES["e4m3"].recipe
    assert found.widened == ()
    seen = outputs(model, batches[0], found)
    assert seen["body.0"].dtype == torch.float32
    assert seen["body.2"].dtype == seen["attention.qkv"].dtype == torch.bfloat16


def test_in_fp32_all_is_fp32():
    """What modules of 16 bits return is made FP32 again: an attention in FP32 would have a product in 16 bits."""
    model, batches = net(1)
    found = arranged(model, batches[0], {"attention.qkv": "bf16", "body.2": "e4m3"})
    assert found.base == "fp32"
    assert names(model, found.widened) == {"attention.qkv", "body.2"}
    seen = outputs(model, batches[0], found)
    assert {each.dtype for each in seen.values()} == {torch.float32}
    rounded = seen["attention.qkv"]
    assert torch.equal(rounded, rounded.bfloat16().float())


def test_a_narrow_module_leaves_those_inside_it_alone():
    model, batches = net(1)
    whole = outputs(model, batches[0], arranged(model, batches[0], {}))
    found = arranged(model, batches[0], {"attention": "e4m3"})
    seen = outputs(model, batches[0], found)
    assert torch.equal(seen["attention.qkv"], whole["attention.qkv"])
    assert not torch.equal(seen["attention.out"], whole["attention.out"])


@pytest.mark.parametrize("fmt", ["e4m3", "mxfp8"])
def test_8_bits_are_emulated_inside_of_autocast(fmt):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), torch.randn(8, 32)
    found = arranged(model, (x,), {}, default=fmt)
    with found.on(model), torch.autocast("cpu", torch.bfloat16):
        ours = model(x)
    with emulated(model, {model: recipe_for_format(fmt)}), torch.autocast("cpu", torch.bfloat16):
        theirs = model(x)
    assert torch.equal(ours, theirs)


def test_16_bits_on_a_cpu_are_those_of_autocast():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(4, 8)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        found = arranged(model, (x,), {}, default=name)
        with found.on(model), torch.autocast("cpu", dtype):
            ours = model(x)
        assert ours.dtype == dtype
        with torch.autocast("cpu", dtype), emulated(model, {model: recipe_for_format(name)}):
            torch.testing.assert_close(ours, model(x), rtol=0, atol=0)


def test_nothing_stays_on():
    model, batches = net(1)
    before = {module: dict(module.__dict__["_forward_hooks"]) for module in model.modules()}
    found = arranged(model, batches[0], {"attention.qkv": "bf16", "body.2": "e4m3"})
    with pytest.raises(RuntimeError, match="on purpose"), found.on(model):
        raise RuntimeError("on purpose")
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert dict(module._forward_hooks) == before[module]
        assert not module._forward_pre_hooks


def test_a_forward_of_the_users_own_is_put_back():
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    own = lambda given: given * 2  # noqa: E731
    units = find_units(model, lambda: model(x))
    found = arrange_formats(units, [CHOICES["bf16"]], CPU, base="fp32")
    model[0].forward = own
    with found.on(model):
        assert model[0].forward is not own
        assert model(x).sum() == 16
    assert model[0].forward is own
