"""What can be asked of FP8, and what is said where it cannot be had."""

import importlib.util

import pytest

from ampwise.errors import BadInput, UnknownName
from ampwise.train.float8.fp8_cast import E4M3, E5M2
from ampwise.train.float8.recipe import RECIPES, Fp8
from ampwise.train.float8.torchao_backend import NAMES

from ...for_each import for_each


@for_each("recipe", RECIPES)
def test_each_recipe_has_a_backend_by_itself(recipe):
    assert Fp8(recipe).made_by == RECIPES[recipe][0]
    for backend in RECIPES[recipe]:
        assert Fp8(recipe, backend).made_by == backend


def test_measured_is_by_whoever_is_there():
    assert Fp8("measured").made_by is None
    assert Fp8("measured", history=4).by("delayed") == Fp8("delayed", "ampwise", history=4)
    assert Fp8("measured", history=4, margin=1, update="last").by("current") == Fp8("current", "ampwise")
    assert Fp8("measured", gradients="e4m3").by("rowwise") == Fp8("rowwise", "torchao")
    assert Fp8("measured", "transformer-engine", margin=1).by("delayed") == Fp8(
        "delayed", "transformer-engine", margin=1
    )


@for_each(
    ("fp8", "fmt"),
    [(Fp8(), "e5m2"), (Fp8(gradients="e4m3"), "e4m3"), (Fp8("delayed"), "e5m2"), (Fp8("tensorwise"), "e5m2"),
     (Fp8("block"), "e4m3"), (Fp8("rowwise"), "e4m3"), (Fp8("rowwise+hp-weight-grad"), "e4m3")],
)  # fmt: skip
def test_gradients_have_the_format_of_their_recipe(fp8, fmt):
    assert fp8.gradient_format == fmt
    if fp8.made_by == "torchao" and importlib.util.find_spec("torchao"):
        from torchao.float8 import Float8LinearConfig

        config = Float8LinearConfig.from_recipe_name(NAMES[fp8.recipe])
        assert config.cast_config_grad_output.target_dtype is {"e5m2": E5M2, "e4m3": E4M3}[fmt]


@for_each(
    ("asked", "error", "text"),
    [
        ({"recipe": "curent"}, UnknownName, "unknown FP8 recipe 'curent'. Did you mean current. The recipes are"),
        ({"recipe": 8}, BadInput, r"Fp8\(8\): expected the name of a recipe: 'current', 'delayed'"),
        (
            {"backend": "te"},
            UnknownName,
            "unknown FP8 backend 'te'.*The backends are ampwise, transformer-engine, torchao",
        ),
        (
            {"recipe": "delayed", "backend": "torchao"},
            BadInput,
            "torchao has 'tensorwise', .*'delayed' is available from amp",
        ),
        ({"gradients": "fp16"}, BadInput, "gradients='fp16'.: expected 'e5m2' or 'e4m3'"),
        ({"recipe": "rowwise", "gradients": "e4m3"}, BadInput, "the recipes of torchao set the format"),
        ({"update": "mean"}, BadInput, "update='mean'.: expected 'max' or 'last'"),
        ({"history": 0}, BadInput, r"history=0\): expected a whole number of steps, from 1 to 1024"),
        ({"history": True}, BadInput, "history=True"),
        ({"margin": -1}, BadInput, "margin=-1"),
        (
            {"recipe": "current", "margin": 3, "update": "last"},
            BadInput,
            r"^Fp8\('current', margin=3, update='last'\): history, margin and update are only for 'delayed' scaling. "
            r"Remove them, or use Fp8\('delayed', margin=3, update='last'\)\.$",
        ),
        ({"recipe": "rowwise", "history": 4}, BadInput, r"Fp8\('rowwise', history=4\): .* for 'delayed' scaling"),
        (
            {"recipe": "measured", "backend": "torchao", "margin": 1},
            BadInput,
            r"Fp8\('measured', backend='torchao', margin=1\): .* for 'delayed' scaling",
        ),
        ({"wide": "head"}, BadInput, "wide='head'.: expected a tuple of names or globs"),
        ({"narrow": ("",)}, BadInput, "narrow="),
        ({"matmuls": ()}, BadInput, r"matmuls=\(\)\): expected some of \('forward', 'dgrad', 'wgrad'\)"),
        ({"matmuls": ("wgrad", "forward")}, BadInput, "as a tuple in this order"),
        ({"matmuls": ("forward", "backward")}, BadInput, "expected some of"),
        ({"recipe": "delayed", "matmuls": ("forward",)}, BadInput, "only ampwise's 'current' has matmuls in BF16"),
        ({"recipe": "block", "matmuls": ("forward",)}, BadInput, "only ampwise's 'current' has matmuls in BF16"),
        ({"recipe": "block", "margin": 1}, BadInput, r"Fp8\('block', margin=1\): .* for 'delayed' scaling"),
        (
            {"recipe": "block", "backend": "torchao"},
            BadInput,
            "torchao has 'tensorwise', .*'block' is available from ampwise",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(asked, error, text):
    with pytest.raises(error, match=text):
        Fp8(**asked)
