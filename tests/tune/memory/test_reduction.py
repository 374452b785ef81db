"""The buffer of torch's sums, against what an H200 was seen to take for the gradients of biases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.tune.memory.row_sum import row_sum_buffer

MIB = 2**20


@pytest.mark.parametrize(("rows", "columns", "mebibytes"), [(4096, 512, 16), (16384, 512, 64), (4096, 2048, 64)])
def test_the_buffer_is_what_was_measured(rows, columns, mebibytes):
    assert row_sum_buffer(rows, columns) == mebibytes * MIB


@given(st.integers(1, 255), st.integers(1, 100_000))
def test_few_rows_need_none(rows, columns):
    assert row_sum_buffer(rows, columns) == 0


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 16))
def test_it_is_never_negative_and_always_whole(rows, columns):
    assert row_sum_buffer(rows, columns) % 4 == 0
    assert row_sum_buffer(rows, columns) >= 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "columns"), [(1024, 768), (4096, 512), (4096, 2048), (8192, 3072), (16384, 96), (999, 6)]
)
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_torch_takes_as_much(rows, columns, name):
    import torch

    from ampwise.tune.memory.allocation_log import rounded

    if torch.cuda.get_device_properties(0).multi_processor_count != 132:
        pytest.skip("the buffer depends on how many processors a GPU has")
    x = torch.zeros(rows, columns, dtype=getattr(torch, name), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = x.sum(0)
    taken = torch.cuda.max_memory_allocated() - before - rounded(y.nbytes)
    assert abs(taken - row_sum_buffer(rows, columns)) <= MIB + 2 * 2**10  # which is not cut off; and counters
