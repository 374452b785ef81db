"""The laws of the census, and its answers against real casts."""

import copy
import json
import math
import pickle
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ampwise import Census, cast, census, find_format
from ampwise.errors import BadInput, UnknownName
from ampwise.numbers.census import Count
from ampwise.numbers.formats import BLOCK_FORMATS, FORMATS, binade_of

from ...for_each import for_each

SIGNED = [fmt for fmt in FORMATS.values() if fmt.signed]
floats32 = st.floats(width=32)
finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
tensors = st.lists(floats32, max_size=30).map(lambda values: torch.tensor(values, dtype=torch.float32))
finite_tensors = st.lists(finite32, max_size=30).map(lambda values: torch.tensor(values, dtype=torch.float32))
small_k = st.integers(-40, 40)
scalar_formats = st.sampled_from(SIGNED)
many = settings(max_examples=3 * settings.default.max_examples)  # where few of the cases are at an edge


@given(tensors, tensors)
def test_merging_is_the_census_of_the_whole(a, b):
    assert census(a) + census(b) == census(torch.cat([a, b]))


@given(tensors, tensors, tensors)
def test_merging_is_associative_and_commutative_with_an_empty_census(a, b, c):
    a, b, c = census(a), census(b), census(c)
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + Census() == a == sum([a])


@given(tensors)
def test_every_value_is_counted_once(tensor):
    counted = census(tensor)
    assert counted.count == tensor.numel()
    assert counted.zeros == (tensor == 0).sum()
    assert counted.infs == tensor.isinf().sum()
    assert counted.nans == tensor.isnan().sum()
    assert counted.finite == bool(tensor.isfinite().all())


@given(finite_tensors)
def test_extremes_and_sum_of_squares(tensor):
    magnitudes = [abs(value) for value in tensor.tolist() if value]
    counted = census(tensor)
    assert counted.amax == max(magnitudes, default=0.0)
    assert counted.amin == min(magnitudes, default=0.0)
    exact = float(sum(Fraction(value) ** 2 for value in magnitudes))
    assert counted.sum_squares == pytest.approx(exact, rel=1e-6)
    assert counted.norm == pytest.approx(math.sqrt(exact), rel=1e-6)


def test_norm_says_what_is_not_finite():
    assert census(torch.tensor([1.0, math.inf])).norm == math.inf
    assert math.isnan(census(torch.tensor([1.0, math.inf, math.nan])).norm)


@given(tensors, small_k, small_k)
def test_scaling_is_a_group_action(tensor, j, k):
    counted = census(tensor.double())
    assert counted.scaled(0) == counted
    assert counted.scaled(j).scaled(k) == counted.scaled(j + k)


@given(finite_tensors, small_k)
def test_scaling_is_the_census_of_the_scaled_values(tensor, k):
    scaled, measured = census(tensor.double()).scaled(k), census(tensor.double() * 2.0**k)
    assert measured == scaled
    assert measured.sum_squares == pytest.approx(scaled.sum_squares, rel=1e-9, abs=0)


@given(st.floats(min_value=5e-324, allow_infinity=False))
def test_a_binade_is_closed_at_its_upper_end(magnitude):
    exponent = Fraction(2) ** binade_of(magnitude)
    assert exponent < Fraction(magnitude) <= 2 * exponent


# --- answers against real casts -------------------------------------------------------------------


@many
@given(finite_tensors, scalar_formats, small_k)
def test_flushed_is_exact(tensor, fmt, k):
    scaled = tensor.double() * 2.0**k
    vanished = ((cast(scaled, fmt) == 0) & (scaled != 0)).sum().item()
    flushed = census(tensor).flushed(fmt, k)
    assert flushed == vanished
    assert flushed.exact


@many
@given(finite_tensors, scalar_formats, small_k)
def test_overflowed_holds_the_truth_between_its_bounds(tensor, fmt, k):
    scaled = tensor.double() * 2.0**k
    beyond = _beyond(scaled, fmt)
    overflowed = census(tensor).overflowed(fmt, k)
    assert overflowed.low <= beyond <= overflowed.high
    assert bool(overflowed) == bool(beyond), "whether anything overflows is always known"


def _beyond(values, fmt):
    """How many a real cast cannot hold; formats that always saturate are asked by what they clip."""
    if fmt.infinities or fmt.nans:
        return (~cast(values, fmt).isfinite()).sum().item()
    return (values.abs() > fmt.overflow_threshold).sum().item() + (
        (values.abs() == fmt.overflow_threshold).sum().item() if fmt.overflow_at_threshold else 0
    )


@many
@given(finite_tensors, scalar_formats, small_k)
def test_subnormal_holds_the_truth_between_its_bounds(tensor, fmt, k):
    magnitudes = tensor.double().abs() * 2.0**k
    kept = cast(magnitudes, fmt) != 0
    truth = ((magnitudes < fmt.smallest_normal) & kept & (magnitudes > 0)).sum().item()
    counted = census(tensor).subnormal(fmt, k)
    assert counted.low <= truth <= counted.high


@for_each("fmt", SIGNED)
def test_counts_on_many_random_values(fmt):
    torch.manual_seed(1)
    values = torch.randn(20_000) * torch.exp2(torch.randint(-30, 12, (20_000,)))
    counted = census(values)
    for k in (-10, 0, 7, 16):
        scaled = values.double() * 2.0**k
        assert counted.flushed(fmt, k) == ((cast(scaled, fmt) == 0) & (scaled != 0)).sum()
        overflowed = counted.overflowed(fmt, k)
        assert overflowed.low <= _beyond(scaled, fmt) <= overflowed.high


@many
@given(finite_tensors, st.sampled_from(list(BLOCK_FORMATS.values())), st.integers(-20, 20))
def test_block_formats_flush_within_the_bounds(tensor, fmt, k):
    scaled = tensor.double() * 2.0**k
    vanished = ((cast(scaled, fmt) == 0) & (scaled != 0)).sum().item()
    flushed = census(tensor).flushed(fmt, k)
    assert flushed.low <= vanished <= flushed.high


def test_known_thresholds_of_fp16():
    edge = 2.0**-25
    values = torch.tensor([edge, math.nextafter(edge, 1.0), 65504.0, 65519.0, 65520.0], dtype=torch.float64)
    counted = census(values)
    assert counted.flushed("fp16") == 1
    assert (counted.overflowed("fp16").low, counted.overflowed("fp16").high) == (1, 3)
    assert census(values[:4]).overflowed("fp16") == 0
    assert repr(census(values[3:]).overflowed("fp16")) == "Count(1)", "the extremes settle which of the two it is"


def test_the_smallest_normal_itself_is_in_doubt():
    counted = census(torch.tensor([2.0**-14, 1.5 * 2.0**-15, 1.0]))
    assert repr(counted.subnormal("fp16")) == "Count(1..2)"
    assert census(torch.tensor([2.0**-14, 1.0])).subnormal("fp16").low == 0
    assert repr(census(torch.tensor([1.5 * 2.0**-15, 2.0**-24])).subnormal("fp16")) == "Count(2)"


def test_extremes_must_make_sense():
    with pytest.raises(BadInput, match=r"Census\(amin=2.0, amax=1.0\): expected finite numbers, 0 <= amin <= amax"):
        Census(amin=2.0, amax=1.0)


def test_scaling_out_of_reach_is_an_error_and_not_a_wrong_answer():
    one = census(torch.tensor([1.9]))
    for k in (2000, -1100):
        with pytest.raises(BadInput, match="would leave FP64's range"):
            one.scaled(k)
    assert one.flushed("fp16", -2000) == 1
    assert one.overflowed("fp16", 2000) == 1


@many
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20),
    st.sampled_from(list(BLOCK_FORMATS.values())),
)
def test_block_formats_overflow_only_where_no_scale_reaches(values, fmt):
    tensor = torch.tensor(values, dtype=torch.float64)
    clipped = (tensor.abs() > fmt.overflow_threshold).sum().item()
    overflowed = census(tensor).overflowed(fmt)
    assert overflowed.low <= clipped <= overflowed.high
    assert bool(overflowed) == bool(clipped)


def test_a_tensor_scale_reaches_far():
    tensor = torch.tensor([1e6, -3e5, 1.0])
    assert census(tensor).overflowed("nvfp4") == 0
    assert cast(tensor, "nvfp4")[0] == pytest.approx(1e6)
    beyond = torch.tensor([1e39, 1e45], dtype=torch.float64)
    assert census(beyond).overflowed("nvfp4") == 1
    assert cast(beyond, "nvfp4")[1] == pytest.approx(find_format("nvfp4").max * torch.finfo(torch.float32).max)


def test_one_block_flushes_what_the_bound_says():
    values = torch.cat([torch.tensor([448.0]), torch.full((31,), 2.0**-10)])
    flushed = census(values).flushed("mxfp8")
    assert flushed.high == 31 == ((cast(values, "mxfp8") == 0) & (values != 0)).sum()
    assert census(values * 2).flushed("mxfp8").high == 31
    assert census(torch.full((4,), 1e300, dtype=torch.float64)).flushed("mxfp4", 900).high == 0


# --- choosing a scale -----------------------------------------------------------------------------


@given(finite_tensors, st.sampled_from(["fp16", "bf16", "e4m3fn", "e5m2", "e2m1"]))
def test_best_scale_never_overflows_and_nothing_beats_it(tensor, name):
    counted = census(tensor)
    best = counted.best_scale(name)
    assert counted.overflowed(name, best) == 0
    for k in range(best - 40, best + 40):
        if counted.overflowed(name, k) == 0:
            assert counted.flushed(name, k) >= counted.flushed(name, best)


@given(finite_tensors)
def test_best_scale_is_the_nearest_to_none_among_equals(tensor):
    counted = census(tensor)
    best = counted.best_scale("fp16")
    nearer = range(min(best, 0), max(best, 0) + 1)
    losses = {k: _loss(counted, k) for k in nearer if counted.overflowed("fp16", k) == 0}
    assert all(loss > losses[best] for k, loss in losses.items() if abs(k) < abs(best))


def _loss(counted, k):
    """Flushed values, then bits below FP16's full 11 summed over the values: value by value, not by search."""
    short = [min(max(-14 - e - k, 0), 11) * count for e, count in counted.binades.items()]
    return counted.flushed("fp16", k), sum(short)


def test_best_scale_leaves_headroom_when_asked():
    counted = census(torch.tensor([1.0, 1e-9]))
    assert counted.best_scale("fp16") == 15
    assert counted.best_scale("fp16", headroom=3) == 12


def test_nothing_to_scale():
    assert Census().best_scale("fp16") == 0
    assert census(torch.zeros(3)).best_scale("fp16") == 0
    assert census(torch.tensor([1e300, 1e308], dtype=torch.float64)).best_scale("fp64") == 0


def test_unknown_format_names_the_nearest():
    with pytest.raises(UnknownName, match=r"unknown format 'fp17'\. Did you mean fp16"):
        Census().flushed("fp17")


def test_block_formats_have_no_single_scale():
    with pytest.raises(BadInput, match=r"mxfp8_e4m3 is a block format.*Use its element format, e4m3fn"):
        census(torch.ones(2)).best_scale("mxfp8")


# --- as data --------------------------------------------------------------------------------------


@given(tensors)
def test_json_round_trip(tensor):
    counted = census(tensor)
    again = Census.from_json(counted.to_json())
    assert again == counted
    assert again.sum_squares == counted.sum_squares


def test_json_is_strict_even_when_the_squares_overflow():
    counted = census(torch.tensor([1e200, 1e200], dtype=torch.float64))
    json.loads(counted.to_json(), parse_constant=pytest.fail)
    assert Census.from_json(counted.to_json()).sum_squares == math.inf


@for_each(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"binades": 3}',
        Census().to_json().replace('"zeros": 0', '"zeros": -1'),
        Census().to_json().replace('"amax": 0.0', '"amax": -1'),
        Census().to_json().replace('"amax": 0.0', '"amax": Infinity'),
        Census().to_json().replace('"amax": 0.0', '"amax": 1' + "0" * 400),
        Census().to_json().replace('"amin": 0.0', '"amin": NaN'),
        Census().to_json().replace('"sum_squares": 0.0', '"sum_squares": -3'),
        Census().to_json().replace('"amax": 0.0', '"amax": 2.0'),
        Census(binades={0: 1}, amax=1.5, amin=1.5).to_json().replace("1.5", "0.0"),
        Census().to_json().replace('"zeros": 0', '"zeros": ' + "9" * 5000),
    ],
)
def test_not_a_census(text):
    with pytest.raises(BadInput, match="not a census"):
        Census.from_json(text)


def test_the_picture_shows_what_is_lost_and_escapes_nothing_strange():
    page = census(torch.tensor([1e-9, 1e-6, 1.0, 1e9]))._repr_html_()
    assert "FP16 loses 1" in page
    assert page.count('height="0"') > 4
    assert 'height="80"' in page.split("</svg>")[0].partition("<rect")[2]
    assert Census()._repr_html_().startswith("<figure")


@given(st.integers(0, 100), st.integers(0, 100))
def test_count_is_an_int_with_bounds(a, b):
    low, high = sorted((a, b))
    count = Count(low, high)
    assert count == high
    assert count.exact == (low == high)
    assert f"{count:>4}" == (f"{high:>4}" if low == high else f"{low:>4}–{high:>4}")
    for same in (pickle.loads(pickle.dumps(count)), copy.deepcopy(count)):
        assert (same.low, same.high) == (low, high)


def test_count_refuses_bounds_the_wrong_way_round():
    with pytest.raises(ValueError, match="at least 3 and at most 2"):
        Count(3, 2)


@given(st.lists(st.floats(-65504, 65504, width=32)).map(lambda values: torch.tensor(values, dtype=torch.float32)))
def test_bounds_are_exact_when_the_extremes_say_so(tensor):
    assert census(tensor).overflowed("fp16").exact


def test_equal_censuses_hash_alike():
    a, b = census(torch.tensor([1.0, 2.0])), census(torch.tensor([2.0, -1.0]))
    assert a == b
    assert hash(a) == hash(b)
    assert find_format("fp16") in {find_format("half")}
