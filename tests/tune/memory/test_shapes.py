"""Sizes of a decoder: as given, as typical, and such as make no sense."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.errors import BadInput
from ampwise.numbers.number_text import count_text
from ampwise.tune.advise.model import parse_count
from ampwise.tune.memory.decoder import TYPICAL, Decoder, DecoderShape, decoder_shape
from ampwise.tune.memory.fake_tensors import without_memory

from ...for_each import for_each


@for_each("shape", TYPICAL[::3])
def test_the_count_of_a_shape_is_that_of_the_model(shape):
    few = DecoderShape(layers=2, hidden=shape.hidden, heads=shape.heads, kv_heads=shape.kv_heads, ffn=shape.ffn, seq=8)
    with without_memory():
        assert sum(parameter.numel() for parameter in Decoder(few).parameters()) == few.parameters


@given(st.floats(1.8e7, 5e11))
def test_any_number_of_parameters_has_a_shape_near_it(params):
    assert decoder_shape(round(params), {}).parameters == pytest.approx(params, rel=0.1)


@given(st.integers(1, 10**14))
def test_a_count_is_read_as_it_is_written(count):
    assert parse_count(str(count)) == count
    assert parse_count(count_text(count).replace(" ", "")) == pytest.approx(count, rel=0.005)


@for_each("text", ["", "7Q", "-7B", "0", "B", "seven", "1e99", "1.2.3B", "nan"])
def test_what_is_no_count_is_said(text):
    with pytest.raises(BadInput, match=r"expected a number of parameters, such as 124M, 7B or 1.3e9"):
        parse_count(text)


@for_each(
    ("params", "given", "said"),
    [
        (None, {"layers": 2}, "unknown: give --hidden"),
        (None, {"heads": 2}, "unknown: give --layers and --hidden"),
        (None, {"layers": 2, "hidden": 130, "heads": 4}, "not divisible by the number of heads"),
        (None, {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 3}, "not divisible by that of key-value heads"),
        (None, {"layers": 2, "hidden": 12, "heads": 4}, "each head would have width 3"),
        (None, {"layers": 0, "hidden": 128}, "--layers 0: expected at least 1"),
        (None, {"layers": 2, "hidden": -128}, "--hidden -128: expected at least 1"),
        (None, {"layers": 2, "hidden": 128, "kv_heads": 0}, "--kv-heads 0: expected at least 1"),
        (7_000_000_000, {"layers": 2}, "Leave out --params to use these sizes, or give other sizes"),
    ],
)
def test_sizes_that_make_no_sense_are_said(params, given, said):
    with pytest.raises(BadInput, match=said):
        decoder_shape(params, given)


def test_what_is_given_is_kept():
    shape = decoder_shape(7 * 10**9, {"seq": 512, "vocab": 50_000, "kv_heads": 8})
    assert (shape.seq, shape.vocab, shape.kv_heads) == (512, 50_000, 8)
    assert decoder_shape(3 * 10**9, {"hidden": 2048}).layers > 24  # as many as it takes
