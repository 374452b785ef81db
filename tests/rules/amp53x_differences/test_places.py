"""Places that rounding does not explain: each kind has its rule, and says where and what to do."""

import pytest

from ampwise.finding import Severity

from .conftest import side, spot


def only(found):
    (finding,) = found
    return finding


def test_a_difference_of_nearly_equal_terms(findings):
    finding = only(findings(spots=(spot(0.5, op="aten.sub.Tensor", given=0.004, before="block.out"),)))
    assert finding.rule.code == "AMP530"
    assert str(finding.place) == "model.py:12 block"
    assert finding.message == (
        "the code of `block` before `block.out` is 50% off, 36 times what rounding explains: its input was 0.4% off; "
        "the error is BF16 rounding of terms that cancel"
    )
    assert finding.fix == (
        'Keep it in FP32: `Policy("bf16").keep("fp32", "block")`. `ampwise.diff(fn, …, b=Policy("bf16").keep("fp32", '
        '"block"))` shows the remaining error.'
    )
    assert finding.evidence["op"] == "aten.sub.Tensor"


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ({"op": "aten.addmm.default"}, "AMP530"),
        ({"op": "aten.mean.dim"}, "AMP530"),
        ({"shrinks": 200.0}, "AMP530"),  # what it makes is that much smaller than what it was given
        ({"shrinks": 2.0}, "AMP535"),
        ({"op": "aten._softmax.default", "shrinks": 200.0}, "AMP535"),
        ({"op": "aten.exp.default"}, "AMP535"),
        ({"op": "aten.native_layer_norm.default"}, "AMP535"),
        ({}, "AMP535"),
        ({"flushed": True, "op": "aten.mul.Tensor"}, "AMP531"),
        ({"op": "aten.mul.Tensor", "shrinks": 200.0}, "AMP538"),  # a product does not cancel
        ({"op": "aten.index.Tensor"}, "AMP538"),
        ({"bad_a": 2, "bad_b": 2, "bad_apart": 1}, "AMP532"),
        ({"bad_b": 3}, "AMP532"),
        ({"bad_b": 3, "flushed": True}, "AMP532"),
        ({"bad_a": 2, "bad_b": 2, "shrinks": 200.0}, "AMP530"),  # a mask, on both sides
        ({"changed": 5}, "AMP536"),
        ({"why_not": "4×8 in a, 3×8 in b"}, "AMP536"),
    ],
)
def test_which_rule_a_place_belongs_to(findings, parts, code):
    assert only(findings(spots=(spot(**parts),))).rule.code == code


def test_values_that_are_flushed(findings):
    lost = spot(0.9, "act", flushed=True, zeros_b=40, norm=1e-7)
    finding = only(findings("fp16", spots=(lost,)))
    assert finding.message == (
        "`act` underflows to zero for 40% of its values in FP16: their typical magnitude is 1e-08"
    )
    assert "or use BF16, which has FP32's range" in finding.fix
    gradient = spot(0.9, "act", phase="backward", flushed=True, zeros_b=40, norm=1e-7)
    unscaled, scaled = (only(findings(side("fp16", scale=scale), spots=(gradient,))) for scale in (None, 1024.0))
    assert unscaled.message.endswith("and the loss is not scaled")
    assert scaled.message.endswith("at a loss scale of 1024")
    assert 'b="fp16,scale=65536"' in scaled.fix


def test_values_that_overflow_on_either_side(findings):
    finding = only(findings("fp16", spots=(spot(bad_b=7, largest_a=1e6),)))
    assert finding.severity is Severity.ERROR
    assert finding.message == (
        "`block` has 7 of 100 values that are not finite in FP16 but finite in FP32, where the largest is 1,000,000"
    )
    assert "or train in BF16" in finding.fix
    other = only(findings("bf16", spots=(spot(bad_a=7),)))
    assert "not finite in FP32 but finite in BF16" in other.message
    assert "or train in BF16" not in other.fix


def test_values_that_overflow_otherwise(findings):
    finding = only(findings("fp16", spots=(spot(bad_a=2, bad_b=2, bad_apart=3),)))
    assert finding.message == "`block` has 3 of 100 values that are not finite in FP16 and different in FP32"


def test_what_is_no_rounding(findings):
    finding = only(findings(spots=(spot(0.25, op="aten.mul.Tensor", own=0.005),)))
    assert finding.message == (
        "`block` is 25% off, 50 times what rounding explains: its input was 0 off. The operation is `mul`, model.py:12"
    )


def test_what_is_to_be_kept_is_said_once(findings):
    for module in ("Block", "block"):
        for part in ({"op": "aten.exp.default"}, {"changed": 5}):
            assert only(findings(spots=(spot(module=module, **part),))).fix.count("the code that computes ") == 1


def test_a_choice_that_flips(findings):
    assert only(findings(spots=(spot(changed=5),))).message == (
        "`block` has 5 of 100 integers that differ: BF16 chooses differently from FP32"
    )


def test_code_of_the_model_itself_has_no_name_to_keep(findings):
    for module in ("Block", "the function"):
        fix = only(findings(spots=(spot(module=module, op="aten.sub.Tensor"),))).fix
        assert fix.startswith('Put this code into a function with `@ampwise.keep("fp32")`')


def test_a_call_of_several_is_kept_by_its_name(findings):
    fix = only(findings("e4m3", spots=(spot(module="layer (call 2)", op="aten.sub.Tensor"),))).fix
    assert 'Policy("bf16").keep("fp32", "layer")' in fix


def test_of_many_places_the_first_are_reported(findings):
    spots = tuple(spot(module=f"block.{number}", op="aten.sub.Tensor") for number in range(40))
    found = findings(spots=spots)
    assert [finding.place.module for finding in found] == [f"block.{number}" for number in range(5)]


def test_nothing_is_said_of_what_is_explained(findings):
    assert findings() == []
