"""What "bf16-pure" and what may follow it means."""

import pytest

from ampwise import Policy
from ampwise.errors import UnknownName
from ampwise.train.low_bit.pure_bf16 import PureBf16, parse_pure_bf16
from ampwise.train.precision.precision import precision_named

from ...for_each import for_each


@for_each("kahan", [False, True])
@for_each("bf16_states", [False, True])
@for_each("elementwise", [False, True])
def test_its_text_is_read_back(kahan, bf16_states, elementwise):
    pure = PureBf16(kahan=kahan, bf16_states=bf16_states, elementwise=elementwise)
    assert parse_pure_bf16(pure.text) == pure
    assert precision_named(pure.text).pure == pure
    assert precision_named(pure.text).name == pure.text == Policy(pure.text).base


def test_options_in_any_order_have_one_name():
    assert precision_named("bf16-pure, bf16-states,kahan").name == "bf16-pure,kahan,bf16-states"


@pytest.mark.parametrize("make", [precision_named, Policy])
def test_an_option_that_is_none(make):
    with pytest.raises(UnknownName, match=r"unknown option of bf16-pure 'kahn'. Did you mean kahan\? After bf16-pure"):
        make("bf16-pure,kahn")
