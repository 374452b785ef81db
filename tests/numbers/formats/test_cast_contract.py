"""What cast promises beside the numbers: shapes, dtypes, the input left alone, and its refusals."""

import pytest
import torch

from ampwise import BadInput, cast
from ampwise.errors import UnknownName, UnsupportedTensor
from ampwise.numbers.formats import BLOCK_FORMATS, FORMATS
from ampwise.numbers.formats.cast import can_round_by_adding

from ...for_each import for_each
from ...night import chessboard

EVERY = [*FORMATS, *BLOCK_FORMATS]
each_format = pytest.mark.parametrize("name", EVERY)
each_rounding = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])


@each_rounding
def test_shape_and_dtype_are_kept(rounding):
    shapes = ((), (0,), (0, 5), (3, 0), (1,), (2, 3, 5))
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    for name, shape, dtype in chessboard(EVERY, shapes, dtypes):
        result = cast(torch.ones(shape, dtype=dtype), name, rounding)
        assert (result.shape, result.dtype) == (shape, dtype), name
        assert (result == 1).all() or name == "nvfp4", name


@each_format
@each_rounding
def test_the_input_is_left_alone(name, rounding):
    values = torch.randn(5, 37, generator=torch.Generator().manual_seed(0)).requires_grad_()
    before = values.detach().clone()
    result = cast(values, name, rounding)
    assert not result.requires_grad
    result.fill_(0.5)
    assert torch.equal(values, before)
    assert values.requires_grad


@each_format
def test_strides_do_not_matter(name):
    values = torch.randn(6, 8, 10, generator=torch.Generator().manual_seed(0)).abs()
    for view in (values.permute(2, 0, 1), values[:, ::2, 1::3], values[..., :1].expand(6, 8, 40)):
        assert torch.equal(cast(view, name), cast(view.contiguous(), name))


def test_a_lazily_negated_tensor_is_negated():
    lazy = torch.tensor([1 + 2.1j]).conj().imag
    assert lazy.is_neg()
    assert cast(lazy, "e2m1").tolist() == [-2.0]


@for_each(
    ("name", "open_end", "largest"),
    [
        ("fp16", torch.inf, 65504.0),
        ("bf16", torch.inf, FORMATS["bf16"].max),
        ("e5m2", torch.inf, 57344.0),
        ("e4m3fn", torch.nan, 448.0),
        ("e4m3fnuz", torch.nan, 240.0),
        ("e2m1", 6.0, 6.0),
    ],
)
def test_beyond_the_largest_value(name, open_end, largest):
    values = torch.tensor([torch.inf, -torch.inf, 3.4e38, -3.4e38])
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    torch.testing.assert_close(cast(values, name), signs * open_end, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(cast(values, name, saturate=True), signs * largest)
    assert cast(torch.tensor(torch.nan), name, saturate=True).isnan()


def test_a_format_may_be_given_in_any_way():
    values = torch.tensor([0.1, 1e-8])
    expected = values.half().float()
    for fmt in ("fp16", "half", torch.float16, FORMATS["fp16"]):
        assert torch.equal(cast(values, fmt), expected)


@for_each(("value", "kept"), [(1.2e-7, 2**-23), (1e-7, 2**-23), (3e-8, 2**-24), (2.98e-8, 0.0)])
def test_what_fp16_really_loses(value, kept):
    """1e-7 is often said to become zero in FP16."""
    assert cast(torch.tensor(value), "fp16").item() == kept


@for_each(
    ("tensor", "text"),
    [
        (
            torch.arange(3),
            "cast() needs a floating-point tensor, got torch.int64. Convert it first: tensor.float().",
        ),
        (
            torch.tensor([True]),
            "cast() needs a floating-point tensor, got torch.bool. Convert it first: tensor.float().",
        ),
        (
            torch.tensor([1j]),
            "cast() needs a floating-point tensor, got torch.complex64. Convert it first: torch.view_as_real(tensor).",
        ),
        (
            torch.ones(2, 2).to_sparse(),
            "cast() needs a dense tensor, got torch.sparse_coo. Cast tensor.values().",
        ),
    ],
)
def test_tensors_it_refuses(tensor, text):
    with pytest.raises(UnsupportedTensor) as caught:
        cast(tensor, "fp16")
    assert str(caught.value) == text


def test_packed_fp4_is_refused():
    dtype = getattr(torch, "float4_e2m1fn_x2", None)
    if dtype is None:
        pytest.skip("this torch has no packed FP4")
    with pytest.raises(
        UnsupportedTensor, match=r"^cast\(\) cannot unpack torch\.float4_e2m1fn_x2, with two values per byte"
    ):
        cast(torch.empty(2, dtype=dtype), "fp16")


def test_a_rounding_it_does_not_know():
    with pytest.raises(BadInput) as caught:
        cast(torch.ones(1), "fp16", "up")
    assert str(caught.value) == "cast(rounding='up'): choose 'nearest' or 'stochastic'."


def test_a_format_it_does_not_know():
    with pytest.raises(UnknownName, match=r"^unknown format 'fp17'\. Did you mean fp16\? "):
        cast(torch.ones(1), "fp17")


@each_format
def test_a_dimension_is_as_if_it_were_the_last(name):
    values = torch.randn(5, 37, 40, generator=torch.Generator().manual_seed(0))
    for dim in (0, 1, -1):
        found = cast(values, name, dim=dim)
        expected = cast(values.movedim(dim, -1).contiguous(), name).movedim(-1, dim)
        assert found.shape == values.shape
        assert torch.equal(found.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0)), dim


@for_each("name", ["mxfp8", "e4m3"])
@for_each("dim", [4, 2, -3, "x", None, 1.0])
def test_a_dimension_that_is_not_there(name, dim):
    with pytest.raises(BadInput) as caught:
        cast(torch.ones(3, 2), name, dim=dim)
    assert str(caught.value) == (f"cast(dim={dim!r}): expected a dimension from -2 to 1; the tensor has 2.")


@pytest.mark.parametrize("dim", [0, -1])
def test_a_number_by_itself_has_a_dimension_as_torch_has_it(dim):
    assert cast(torch.tensor(3.3), "mxfp8", dim=dim).shape == ()
    with pytest.raises(BadInput, match=r"^cast\(dim=1\): expected a dimension from -1 to 0; the tensor has 0\.$"):
        cast(torch.tensor(3.3), "mxfp8", dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if can_round_by_adding(fmt, torch.float32)])
def test_adding_rounds_as_bits_do(name, dtype, monkeypatch):
    integer = torch.int32 if dtype == torch.float32 else torch.int64
    limits, generator = torch.iinfo(integer), torch.Generator().manual_seed(0)
    anything = torch.randint(limits.min, limits.max, (20_000,), dtype=integer, generator=generator).view(dtype)
    near = torch.randn(20_000, dtype=dtype, generator=generator) * FORMATS[name].max / 2
    small = torch.randn(20_000, dtype=dtype, generator=generator) * FORMATS[name].smallest * 3
    values = torch.cat([anything, near, small])
    for saturate in (False, True):
        by_adding = cast(values, name, saturate=saturate)
        with monkeypatch.context() as patch:
            patch.setattr("ampwise.numbers.formats.cast.can_round_by_adding", lambda *_: False)
            by_bits = cast(values, name, saturate=saturate)
        assert torch.equal(by_adding.isnan(), by_bits.isnan())
        known = ~by_bits.isnan()
        assert torch.equal(by_adding.view(integer)[known], by_bits.view(integer)[known])
