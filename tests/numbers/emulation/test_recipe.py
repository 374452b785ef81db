"""Recipes by their text."""

import pytest

from ampwise.errors import BadInput, UnknownName
from ampwise.numbers.emulation.recipe import parse_recipe, recipe_for_format

from ...for_each import for_each


@for_each(
    ("text", "forward", "backward", "rounding", "up"),
    [
        ("mxfp8", "mxfp8_e4m3", "mxfp8_e4m3", "nearest", False),
        ("e4m3", "e4m3fn", "e5m2", "nearest", False),
        ("e4m3/e4m3", "e4m3fn", "e4m3fn", "nearest", False),
        ("nvfp4", "nvfp4", "nvfp4", "stochastic", False),
        ("nvfp4,nearest", "nvfp4", "nvfp4", "nearest", False),
        ("nvfp4,plain", "nvfp4", "nvfp4", "nearest", False),
        ("nvfp4,eden", "nvfp4", "nvfp4", "stochastic", False),
        ("nvfp4,plain,stochastic,four-over-six", "nvfp4", "nvfp4", "stochastic", False),
        ("mxfp8,up", "mxfp8_e4m3", "mxfp8_e4m3", "nearest", True),
        (" mxfp4 / mxfp8 , up , stochastic ", "mxfp4", "mxfp8_e4m3", "stochastic", True),
    ],
)
def test_a_recipe_is_what_its_text_says_and_has_it(text, forward, backward, rounding, up):
    recipe = parse_recipe(text)
    assert (recipe.forward.name, recipe.backward.name, recipe.rounding) == (forward, backward, rounding)
    assert getattr(recipe.forward, "scales_up", False) is up
    assert parse_recipe(recipe.text) == recipe


def test_scales_rounded_up_are_another_recipe():
    assert parse_recipe("mxfp8,up") != recipe_for_format("mxfp8")
    assert parse_recipe("mxfp8/e5m2,up").backward == recipe_for_format("e5m2").forward


@for_each("text", ["", "mxfp8,down", "/e5m2", "e4m3/", "mxfp8,", "nvfp4,eden,nearest"])
def test_what_is_no_recipe(text):
    with pytest.raises(BadInput, match=f"emulate:{text}: expected FORMAT"):
        parse_recipe(text)


def test_formats_without_powers_of_two_for_scales():
    with pytest.raises(
        BadInput, match="emulate:nvfp4,up: rounding scales up needs an MX format, whose scales are powers of two"
    ):
        parse_recipe("nvfp4,up")
    with pytest.raises(BadInput, match="emulate:nvfp4,plain,eden: eden needs the pretraining recipe"):
        parse_recipe("nvfp4,plain,eden")
    with pytest.raises(UnknownName, match="unknown format 'fp9'"):
        parse_recipe("fp9")
