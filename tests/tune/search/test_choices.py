"""Which formats can be asked for, and what is said of others."""

import pytest

from ampwise.errors import BadInput, UnknownName
from ampwise.tune.search.format_choices import parse_formats


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


@pytest.mark.parametrize(
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
