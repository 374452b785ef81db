"""A side is what one asks for, and what cannot be had is said."""

import json

import pytest
import torch

from ampwise import Policy
from ampwise.errors import BadInput, PrecisionUnavailable, UnknownName
from ampwise.tune.diff.side import side_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "text",
    [
        "fp32",
        "fp64",
        "bf16,attention=math",
        "fp16,scale=1024",
        "fp32@cpu",
        "bf16,compiled",
        "fp32,compiled=aot_eager,attention=flash",
        "tf32,emulated",
        "nvfp4",
    ],
)
def test_a_label_is_the_text_that_asks_for_it(text):
    side = side_of(text)
    assert side.label == text
    assert side_of(side.label) == side
    assert side_of(side) is side


def test_separators_and_other_names_of_formats():
    assert side_of("bf16+attention=math") == side_of("bf16, attention=math")
    assert side_of("e4m3").precision == "e4m3fn"
    assert side_of("mxfp8").precision == "mxfp8_e4m3"


@pytest.mark.parametrize(
    ("text", "forward", "backward"),
    [
        ("fp32", 2**-24, 2**-24),
        ("tf32,emulated", 2**-11, 2**-11),
        ("fp16", 2**-11, 2**-11),
        ("bf16", 2**-8, 2**-8),
        ("fp64", 2**-53, 2**-53),
        ("e4m3", 2**-4, 2**-3),
        ("nvfp4", 2**-2, 2**-2),
    ],
)
def test_unit_roundoffs_follow_from_the_format(text, forward, backward):
    assert side_of(text).roundoffs == (forward, backward)


def test_which_losses_are_scaled():
    scaled = {text: side_of(text).is_scaled for text in ("fp32", "fp16", "bf16", "e4m3", "fp16,emulated", "mxfp4")}
    assert [text for text, is_scaled in scaled.items() if is_scaled] == ["fp16", "fp16,emulated"]


def test_values_below_a_format_are_known_where_tensors_have_no_scale():
    assert side_of("fp16").flushed_below == 16 * 2**-14
    assert side_of("bf16").flushed_below < 1e-36
    assert side_of("e4m3").flushed_below == 0


def test_a_policy_by_itself_and_as_a_file(tmp_path):
    policy = Policy("bf16").keep("fp32", "head")
    assert side_of(policy).policy == policy
    assert side_of(policy).label == "Policy('bf16').keep('fp32', 'head')"
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(policy.as_dict()))
    assert side_of(f"{file},attention=math").policy == policy
    assert side_of(Policy("auto")).on(CPU).precision in ("fp32", "bf16")
    file.write_text("{}")
    with pytest.raises(BadInput, match=r"it is no policy, as Policy.as_dict\(\) writes it in JSON: .*version"):
        side_of(str(file))
    with pytest.raises(BadInput, match=r"none\.json: the policy cannot be read: No such file"):
        side_of(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("float32", "diff: 'float32': a side is PRECISION.*Here that is called 'fp32'. The precisions are fp32, tf32"),
        ("", "diff: '': a side is PRECISION"),
        ("bf16,quick", "diff: 'bf16,quick': there is no option 'quick'; a side is PRECISION.*attention=math|flash"),
        ("fp16,scale=-2", "diff: 'fp16,scale=-2': scale=-2 is no loss scale; 65536 is what a GradScaler begins with."),
        ("fp16,scale=lots", "scale=lots is no loss scale"),
        ("fp32@moon", "diff: 'fp32@moon': there is no kind of device 'moon'; cpu and cuda:1 are devices."),
        ("fp32@cpu:3", "diff: 'fp32@cpu:3': torch sees 1 cpu devices here. Try: ampwise gpu"),
        (3, "diff: 3: a side is PRECISION.* or a Policy."),
        ("e8m0", "e8m0 has no sign: it is a format of scales, and no product is computed in it."),
    ],
)
def test_what_makes_no_sense_is_said(text, told):
    with pytest.raises(BadInput, match=told):
        side_of(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there():
    with pytest.raises(BadInput, match=r"diff: 'fp32@cuda': torch sees no CUDA devices here\. Try: ampwise gpu"):
        side_of("fp32@cuda")


def test_unknown_names_have_a_guess():
    with pytest.raises(UnknownName, match=r"unknown precision 'bf61'. Did you mean .*bf16.*Precisions are fp32"):
        side_of("bf61")
    with pytest.raises(UnknownName, match=r"unknown attention kernel 'flsh'\. Did you mean flash"):
        side_of("bf16,attention=flsh")


def test_a_precision_that_a_device_has_not_got():
    with pytest.raises(
        PrecisionUnavailable, match=r"diff: tf32: .* It runs fp32, .*fp64. What it lacks can be emulated"
    ):
        side_of("tf32").on(CPU)
    assert side_of("tf32,emulated").on(CPU).recipe is not None
    assert side_of("fp32@cpu").on(CPU).device is None  # where it is anyway


def test_what_a_search_has_found_is_a_side(tmp_path):
    file = tmp_path / "policy.json"
    policy = Policy("bf16").keep("fp32", "*.router")
    found = {"what": "a policy of ampwise search", "version": 1, "policy": policy.as_dict(), "narrow": {}}
    file.write_text(json.dumps(found))
    assert side_of(str(file)).policy == policy
    file.write_text(json.dumps(found | {"narrow": {"head": "e4m3", "body": "mxfp8"}}))
    with pytest.raises(BadInput, match=r"has modules in e4m3, mxfp8, which a policy of autocast cannot have\. Compare"):
        side_of(str(file))


def test_scales_of_mx_formats_may_be_rounded_up():
    side = side_of("mxfp8,up")
    assert (side.label, side.recipe.scales_up) == ("mxfp8_e4m3,up", True)
    assert side_of(side.label) == side_of("mxfp8+up") == side != side_of("mxfp8")
    with pytest.raises(BadInput, match="diff: 'e4m3,up': of these formats none has scales that are powers of two"):
        side_of("e4m3,up")
    with pytest.raises(BadInput, match="there is no option 'up'"):
        side_of("bf16,up")
