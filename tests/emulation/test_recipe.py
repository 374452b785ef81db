"""Recipes by their text."""

import pytest

from ampwise.emulation.recipe import recipe_from, recipe_named
from ampwise.errors import BadInput, UnknownName


@pytest.mark.parametrize(
    ("text", "forward", "backward", "rounding", "up"),
    [
        ("mxfp8", "mxfp8_e4m3", "mxfp8_e4m3", "nearest", False),
        ("e4m3", "e4m3fn", "e5m2", "nearest", False),
        ("e4m3/e4m3", "e4m3fn", "e4m3fn", "nearest", False),
        ("nvfp4,stochastic", "nvfp4", "nvfp4", "stochastic", False),
        ("mxfp8,up", "mxfp8_e4m3", "mxfp8_e4m3", "nearest", True),
        (" mxfp4 / mxfp8 , up , stochastic ", "mxfp4", "mxfp8_e4m3", "stochastic", True),
    ],
)
def test_a_recipe_is_what_its_text_says_and_has_it(text, forward, backward, rounding, up):
    recipe = recipe_from(text)
    assert (recipe.forward.name, recipe.backward.name, recipe.rounding) == (forward, backward, rounding)
    assert getattr(recipe.forward, "scales_up", False) is up
    assert recipe_from(recipe.text) == recipe


def test_scales_rounded_up_are_another_recipe():
    assert recipe_from("mxfp8,up") != recipe_named("mxfp8")
    assert recipe_from("mxfp8/e5m2,up").backward == recipe_named("e5m2").forward


@pytest.mark.parametrize("text", ["", "mxfp8,down", "/e5m2", "e4m3/", "mxfp8,"])
def test_what_is_no_recipe(text):
    with pytest.raises(BadInput, match=f"emulate:{text}: expected is a format"):
        recipe_from(text)


def test_formats_without_powers_of_two_for_scales():
    with pytest.raises(BadInput, match="emulate:nvfp4,up: of these formats none has scales that are powers of two"):
        recipe_from("nvfp4,up")
    with pytest.raises(UnknownName, match="unknown format 'fp9'"):
        recipe_from("fp9")
