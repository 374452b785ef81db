"""A side is what one asks for, and what cannot be had is said."""

import json

import pytest
import torch

from ampwise import Policy
from ampwise.errors import BadInput, PrecisionUnavailable, UnknownName
from ampwise.tune.diff.side import parse_side

from ...for_each import for_each

CPU = torch.device("cpu")


@for_each(
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
    side = parse_side(text)
    assert side.label == text
    assert parse_side(side.label) == side
    assert parse_side(side) is side


def test_separators_and_other_names_of_formats():
    assert parse_side("bf16+attention=math") == parse_side("bf16, attention=math")
    assert parse_side("e4m3").precision == "e4m3fn"
    assert parse_side("mxfp8").precision == "mxfp8_e4m3"


@for_each(
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
    assert parse_side(text).roundoffs == (forward, backward)


def test_which_losses_are_scaled():
    scaled = {text: parse_side(text).is_scaled for text in ("fp32", "fp16", "bf16", "e4m3", "fp16,emulated", "mxfp4")}
    assert [text for text, is_scaled in scaled.items() if is_scaled] == ["fp16", "fp16,emulated"]


def test_values_below_a_format_are_known_where_tensors_have_no_scale():
    assert parse_side("fp16").flushed_below == 16 * 2**-14
    assert parse_side("bf16").flushed_below < 1e-36
    assert parse_side("e4m3").flushed_below == 0


def test_a_policy_by_itself_and_as_a_file(tmp_path):
    policy = Policy("bf16").keep("fp32", "head")
    assert parse_side(policy).policy == policy
    assert parse_side(policy).label == "Policy('bf16').keep('fp32', 'head')"
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(policy.as_dict()))
    assert parse_side(f"{file},attention=math").policy == policy
    assert parse_side(Policy("auto")).on(CPU).precision in ("fp32", "bf16")
    file.write_text("{}")
    with pytest.raises(BadInput, match=r"expected JSON as written from Policy.as_dict\(\): .*version"):
        parse_side(str(file))
    with pytest.raises(BadInput, match=r"none\.json: cannot read the policy: No such file"):
        parse_side(str(tmp_path / "none.json"))


@for_each(
    ("text", "told"),
    [
        ("float32", "diff: 'float32': expected PRECISION.*Did you mean 'fp32'. The precisions are fp32, tf32"),
        ("", "diff: '': expected PRECISION"),
        ("bf16,quick", "diff: 'bf16,quick': unknown option 'quick'; expected PRECISION.*attention=math|flash"),
        ("fp16,scale=-2", "diff: 'fp16,scale=-2': expected a positive loss scale, such as 65536; got scale=-2."),
        ("fp16,scale=lots", "expected a positive loss scale, such as 65536; got scale=lots"),
        ("fp32@moon", "diff: 'fp32@moon': expected a device such as cpu or cuda:1, got 'moon'."),
        ("fp32@cpu:3", "diff: 'fp32@cpu:3': torch sees 1 cpu devices. Run: ampwise gpu"),
        (3, "diff: expected PRECISION.* or a Policy; got 3."),
        ("e8m0", "e8m0 is an unsigned format for scales, not for matmuls. Choose a signed format."),
    ],
)
def test_what_makes_no_sense_is_said(text, told):
    with pytest.raises(BadInput, match=told):
        parse_side(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there():
    with pytest.raises(BadInput, match=r"diff: 'fp32@cuda': torch sees no CUDA devices\. Run: ampwise gpu"):
        parse_side("fp32@cuda")


def test_unknown_names_have_a_guess():
    with pytest.raises(UnknownName, match=r"unknown precision 'bf61'. Did you mean .*bf16.*Precisions are fp32"):
        parse_side("bf61")
    with pytest.raises(UnknownName, match=r"unknown attention kernel 'flsh'\. Did you mean flash"):
        parse_side("bf16,attention=flsh")


def test_a_precision_that_a_device_has_not_got():
    with pytest.raises(PrecisionUnavailable, match=r"diff: tf32: .* It runs fp32, .*fp64. To emulate it"):
        parse_side("tf32").on(CPU)
    assert parse_side("tf32,emulated").on(CPU).recipe is not None
    assert parse_side("fp32@cpu").on(CPU).device is None  # where it is anyway


def test_what_a_search_has_found_is_a_side(tmp_path):
    file = tmp_path / "policy.json"
    policy = Policy("bf16").keep("fp32", "*.router")
    found = {"what": "a policy of ampwise search", "version": 1, "policy": policy.as_dict(), "narrow": {}}
    file.write_text(json.dumps(found))
    assert parse_side(str(file)).policy == policy
    file.write_text(json.dumps(found | {"narrow": {"head": "e4m3", "body": "mxfp8"}}))
    with pytest.raises(
        BadInput, match=r"has modules in e4m3, mxfp8, which an autocast policy cannot express\. Compare"
    ):
        parse_side(str(file))


def test_scales_of_mx_formats_may_be_rounded_up():
    side = parse_side("mxfp8,up")
    assert (side.label, side.recipe.scales_up) == ("mxfp8_e4m3,up", True)
    assert parse_side(side.label) == parse_side("mxfp8+up") == side != parse_side("mxfp8")
    with pytest.raises(
        BadInput, match="diff: 'e4m3,up': rounding scales up needs an MX format, whose scales are powers of two"
    ):
        parse_side("e4m3,up")
    with pytest.raises(BadInput, match="unknown option 'up'"):
        parse_side("bf16,up")
