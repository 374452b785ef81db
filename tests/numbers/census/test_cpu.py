"""Many tensors at once on the CPU, times a factor: the C loop and its threads against the reference."""

from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampwise.numbers.census import cpu
from ampwise.numbers.census.count_row import SINGLE, count_in_torch, merge_rows

from ...for_each import for_each
from .conftest import hard_cases, wild_floats

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
FLATS = {name: tensor.reshape(-1) for name, tensor in hard_cases().items()}
FACTORS = [1.0, 2.0**-16, 0.3, 2.0**-140, 2.0**100]

floats32 = st.floats(width=32)
tensors = st.lists(floats32, max_size=30).map(lambda values: torch.tensor(values, dtype=torch.float32))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
narrow_tensors = st.builds(lambda tensor, dtype: tensor.to(dtype), tensors, dtypes)


def reference(flats, factor=1.0):
    rows, sums = zip(*(count_in_torch(flat.float() * factor) for flat in flats), strict=True)
    return torch.stack(rows), torch.stack(sums)


def assert_counted(flats, factor=1.0):
    rows, sums = cpu.count_all_on_cpu(flats, factor)
    expected, expected_sums = reference(flats, factor)
    assert (rows.dtype, sums.dtype) == (torch.int64, torch.float64)
    assert torch.equal(rows, expected)
    assert sums.tolist() == pytest.approx(expected_sums.tolist(), rel=2e-6, abs=0)


@pytest.fixture(params=["C loop", "torch"])
def either_way(request, monkeypatch):
    assert cpu._native is not None, "the C loop was not built"
    if request.param == "torch":
        monkeypatch.setattr(cpu, "_native", None)


@pytest.fixture
def many_threads(monkeypatch):
    """Work is shared out however little there is of it."""
    before = torch.get_num_threads()
    monkeypatch.setattr(cpu, "SHARE", 1000)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.few_by_day(4)
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("factor", [*FACTORS, -0.7, 0.0, 1e300])
@pytest.mark.parametrize("name", FLATS)
def test_what_is_counted_is_the_product_as_torch_rounds_it(name, factor):
    assert_counted([FLATS[name]], factor)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("factor", FACTORS)
def test_many_tensors_are_counted_each_in_its_row(factor):
    empty = torch.zeros(0)
    assert_counted([empty, *FLATS.values(), empty.half(), empty], factor)


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("factor", FACTORS)
def test_threads_share_many_tensors(factor):
    assert_counted([*FLATS.values(), torch.zeros(0)], factor)


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_threads_share_one_tensor(dtype):
    assert_counted([torch.cat([wild_floats(9000), torch.randn(4096 * 3 + 5)]).to(dtype)], 2.0**-16)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("dtype", FP8)
def test_fp8_is_widened_piece_by_piece_whatever_its_company(dtype, monkeypatch):
    monkeypatch.setattr(cpu, "WIDENED", 100)
    codes = torch.arange(256).to(torch.uint8).view(dtype)
    assert_counted([torch.randn(300), codes, FLATS["half"], codes[:0]], 0.3)


@pytest.mark.usefixtures("either_way")
def test_no_tensors_have_no_rows():
    rows, sums = cpu.count_all_on_cpu([])
    assert rows.shape == (0, SINGLE.columns)
    assert sums.shape == (0,)


@pytest.mark.half_by_day
@pytest.mark.parametrize("count", [*range(1, 70), 4095, 4096, 4097, 131_071, 131_072, 131_073])
def test_any_number_of_values(count):
    assert_counted([torch.randn(count)])
    assert_counted([wild_floats(count)], 2.0**-16)


def test_large_tensors_one_after_another_leave_nothing_to_the_next(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert_counted([torch.randn(140_000), torch.randn(140_000) * 1e-3, torch.randn(5000)])


def test_views_that_start_anywhere():
    assert_counted([FLATS["wild bits"][1:], FLATS["half, every code"][3:], FLATS["ordinary"][5:4096]], 0.3)


@given(st.lists(tensors, min_size=1, max_size=6), st.floats(width=32))
def test_merging_the_rows_of_pieces_is_counting_the_whole(pieces, factor):
    rows, sums = cpu.count_all_on_cpu(pieces, factor)
    whole, whole_sum = cpu.count_all_on_cpu([torch.cat(pieces)], factor)
    assert torch.equal(reduce(merge_rows, rows), whole[0])
    assert sums.sum().item() == pytest.approx(whole_sum.item(), rel=2e-6, abs=0)


@given(
    st.lists(narrow_tensors, min_size=1, max_size=6), st.sampled_from(FACTORS), st.integers(1, 20), st.integers(1, 4)
)
def test_however_the_work_is_shared_out(flats, factor, share, threads):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "SHARE", share)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        assert_counted(flats, factor)


def addresses(pieces):
    return [address + i * cpu.BYTES[kind] for address, size, kind, _ in pieces for i in range(size)]


@given(st.lists(st.integers(0, 50), min_size=1), st.integers(1, 60))
def test_shares_hold_every_value_once_and_are_full_except_the_last(sizes, share_size):
    whole = [(1000 * (row + 1), size, row % 3, row) for row, size in enumerate(sizes)]
    shares, owners = cpu._shared_out(whole, share_size)
    pieces = [piece for share in shares for piece in share]
    assert all(sum(size for _, size, _, _ in share) == share_size for share in shares[:-1])
    assert sum(size for _, size, _, _ in shares[-1]) <= share_size
    assert addresses(pieces) == addresses(whole)
    assert sorted(row for *_, row in pieces) == list(range(len(whole) + len(owners)))


@for_each(
    ("pieces", "message"),
    [
        ([(0, 1, 0, 0)], "no values there"),
        ([(64, -1, 0, 0)], "no values there"),
        ([(0, 0, 3, 0)], "a kind but 0, 1 or 2"),
        ([(0, 0, -1, 0)], "a kind but 0, 1 or 2"),
        ([(0, 0, 0, 0), (0, 5, 1, 1)], "no values there"),
        ([(0, 0, 0, -1)], "or no row"),
    ],
)
def test_the_c_loop_refuses_pieces_it_cannot_read(pieces, message):
    rows, sums = cpu._new_table(len(pieces))
    with pytest.raises(ValueError, match=message):
        cpu._native.count_floats(pieces, 1.0, rows.data_ptr(), sums.data_ptr())


def test_the_c_loop_refuses_to_write_to_address_zero():
    rows, sums = cpu._new_table(1)
    for places in ((0, sums.data_ptr()), (rows.data_ptr(), 0)):
        with pytest.raises(ValueError, match="nowhere to write"):
            cpu._native.count_floats([(0, 0, 0, 0)], 1.0, *places)
    assert cpu._native.count_floats([], 1.0, 0, 0) is None


@for_each("pieces", [[[64, 1, 0, 0]], [(64, 1, 0)], [("64", 1, 0, 0)], [None], ((0, 0, 0, 0),), 5])
def test_the_c_loop_refuses_what_are_no_pieces(pieces):
    rows, sums = cpu._new_table(1)
    with pytest.raises(TypeError):
        cpu._native.count_floats(pieces, 1.0, rows.data_ptr(), sums.data_ptr())


def test_the_c_loop_writes_its_rows_and_nothing_else():
    rows, sums = torch.full((4, SINGLE.columns), -1), torch.full((4,), -1.0, dtype=torch.float64)
    cpu._native.count_floats([(0, 0, 0, 0), (0, 0, 2, 1)], 1.0, rows[1].data_ptr(), sums[1].data_ptr())
    assert rows[1:3].count_nonzero() == 0
    assert sums.tolist() == [-1, 0, 0, -1]
    assert (rows[[0, 3]] == -1).all()
